"""A request's spans as the code that works for it sees them, whether or not they are recorded.

Nothing here knows OpenTelemetry: without a recording tracer every span is `NO_SPAN`, whose methods do nothing, and no
call carries a header for it. Times are `time.monotonic()`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Protocol

from halfmoon.errors import HalfmoonError

Attributes = Mapping[str, str | int | float | bool | Sequence[str]]
NO_ATTRIBUTES: Attributes = {}


class Span(Protocol):
    """One operation of a trace, recorded when it ends."""

    @property
    def is_recording(self) -> bool:
        """Whether the span is recorded: if not, its attributes need not be computed."""

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        """Headers by which a call makes the spans behind it children of this one (W3C trace context)."""

    def child(self, name: str, start_s: float | None = None, attributes: Attributes = NO_ATTRIBUTES) -> Span:
        """A child span that starts now or at `start_s`."""

    def event(self, name: str, at_s: float) -> None:
        """Records a moment within the span."""

    def end(self, end_s: float | None = None, error: str | None = None, attributes: Attributes = NO_ATTRIBUTES) -> None:
        """Ends the span now or at `end_s`; `error` says why it failed. Nothing after the first end has an effect."""


class Tracer(Protocol):
    """Begins the spans of incoming requests and calls."""

    def request(self, name: str, headers: Mapping[str, str], start_s: float, attributes: Attributes) -> Span:
        """A client's request, in the client's trace if its headers name one."""

    def call(self, method: str, headers: Mapping[str, str]) -> Span:
        """An RPC (`/package.Service/Method`) from another service; no span unless its headers name one."""


class _NoSpan:
    is_recording = False
    headers: tuple[tuple[str, str], ...] = ()

    def child(self, name: str, start_s: float | None = None, attributes: Attributes = NO_ATTRIBUTES) -> Span:
        return self

    def event(self, name: str, at_s: float) -> None:
        pass

    def end(self, end_s: float | None = None, error: str | None = None, attributes: Attributes = NO_ATTRIBUTES) -> None:
        pass


class _NoTracer:
    def request(self, name: str, headers: Mapping[str, str], start_s: float, attributes: Attributes) -> Span:
        return NO_SPAN

    def call(self, method: str, headers: Mapping[str, str]) -> Span:
        return NO_SPAN


NO_SPAN: Span = _NoSpan()
NO_TRACER: Tracer = _NoTracer()

_current: ContextVar[Span] = ContextVar("span", default=NO_SPAN)


def current_span() -> Span:
    """The span that this code is part of."""
    return _current.get()


@contextmanager
def span_scope(span: Span) -> Iterator[Span]:
    """Makes the code inside, and the calls that it makes, part of `span`."""
    token = _current.set(span)
    try:
        yield span
    finally:
        with suppress(ValueError):  # a generator finalised in another context: nothing to reset there
            _current.reset(token)


@contextmanager
def operation(span: Span) -> Iterator[Span]:
    """Makes the code inside part of `span`, which ends with it: in success, or with the error raised."""
    with span_scope(span):
        try:
            yield span
        except BaseException as error:
            span.end(error=reason_of(error))
            raise
        span.end()


def reason_of(error: BaseException) -> str:
    """The status text of a span for `error`; the text of an error that is not ours stays in the log."""
    if isinstance(error, HalfmoonError):
        return error.message
    is_cancelled = isinstance(error, asyncio.CancelledError | GeneratorExit)
    return "cancelled" if is_cancelled else type(error).__name__
