"""Context that follows a call through a process and on to the next one: its request id and its deadline."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar

REQUEST_ID_KEY = "halfmoon-request-id"  # gRPC metadata

_request_id: ContextVar[str] = ContextVar("request_id", default="")
_deadline_at_s: ContextVar[float | None] = ContextVar("deadline_at_s", default=None)  # time.monotonic()


def request_id() -> str:
    """Id of the request that this code works for; empty outside a request."""
    return _request_id.get()


@contextmanager
def request_scope(request_id: str, remaining_s: float | None = None) -> Iterator[None]:
    """Makes the code inside work for `request_id` and, if given, with `remaining_s` seconds left."""
    id_token = _request_id.set(request_id)
    deadline_token = _deadline_at_s.set(None if remaining_s is None else time.monotonic() + remaining_s)
    try:
        yield
    finally:
        with suppress(ValueError):  # a generator finalised in another context: nothing to reset there
            _request_id.reset(id_token)
        with suppress(ValueError):
            _deadline_at_s.reset(deadline_token)


def bounded_deadline_s(own_s: float) -> float:
    """`own_s`, or the rest of the caller's deadline if that is less."""
    deadline_at_s = _deadline_at_s.get()
    return own_s if deadline_at_s is None else max(0.0, min(own_s, deadline_at_s - time.monotonic()))
