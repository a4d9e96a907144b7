"""Bounds the HTTP connections, and closes those that send nothing in time."""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import time
from collections.abc import Awaitable, Callable
from typing import Any, cast

from aiohttp import web

from services.gateway.http.connections import Admission, Bound, Connections
from services.gateway.http.malformed_requests import FaultHandler

log = logging.getLogger(__name__)

_SPARE_DESCRIPTORS = 64  # always left for workers, files and ledger
_MOST_BY_DEFAULT = 16_384  # connections
_SHARE_BY_DEFAULT = 0.75  # of the descriptors that the process may open
_LOG_EVERY_S = 10.0
_FULL = json.dumps(
    {
        "error": {
            "message": "too many connections are open: close those that you do not need, or come back later",
            "type": "service_unavailable_error",
            "param": None,
            "code": "too_many_connections",
        }
    }
).encode()
_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json; charset=utf-8\r\nRetry-After: 1\r\n"
    b"Connection: close\r\nContent-Length: %d\r\n\r\n%s"
) % (len(_FULL), _FULL)


class ConnectionGuard:
    """Owns the open connections, and how long one may be without a request."""

    def __init__(
        self,
        most: int | None,
        most_per_client: int,
        header_timeout_s: float,
        count: Callable[[Bound, bool], None],
    ) -> None:
        """`count` is called with the bound that was reached, and whether the new connection was admitted."""
        self._most_descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if most is None:
            most = min(_MOST_BY_DEFAULT, int(self._most_descriptors * _SHARE_BY_DEFAULT))
        self.open: Connections[web.RequestHandler] = Connections(most, most_per_client)
        self.header_timeout_s = header_timeout_s
        self._count = count
        self._logged_s = -_LOG_EVERY_S
        self._num_since = 0

    def admit(self, handler: web.RequestHandler, transport: asyncio.Transport) -> bool:
        """Whether the new connection may stay. Closes the one that gives way."""
        peer = transport.get_extra_info("peername")
        address = str(peer[0]) if isinstance(peer, tuple) else ""
        descriptor = transport.get_extra_info("socket").fileno()  # the lowest that was free
        is_last = descriptor >= self._most_descriptors - _SPARE_DESCRIPTORS
        admission = self.open.admit(handler, address, is_last=is_last)
        if admission.evicted is not None:
            admission.evicted.force_close()
        if admission.bound is not None:
            self._note(admission, admission.bound, address)
        return admission.is_admitted

    def _note(self, admission: Admission[Any], bound: Bound, address: str) -> None:
        self._count(bound, admission.is_admitted)
        self._num_since += 1
        now_s = time.monotonic()
        if now_s - self._logged_s >= _LOG_EVERY_S:
            fields = {"bound": bound, "client": address, "open": len(self.open), "times": self._num_since}
            log.warning("http.connections_full", extra=fields)
            self._logged_s, self._num_since = now_s, 0


def guard_connections(server: web.Server, guard: ConnectionGuard) -> None:
    """Makes `server` ask `guard` about its connections, and answer malformed HTTP as JSON.

    aiohttp has methods to override for this, but no way to choose the class that has them.
    """
    server.__class__ = _Server
    server.guard = guard  # type: ignore[attr-defined]


class _Server(web.Server):
    guard: ConnectionGuard

    def __call__(self) -> web.RequestHandler:
        handler = super().__call__()
        handler.__class__ = _Handler
        return handler


class _Handler(FaultHandler):
    __slots__ = ()

    @property
    def _guard(self) -> ConnectionGuard | None:
        return self._manager.guard if isinstance(self._manager, _Server) else None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Refuses the connection, or waits for its first request."""
        guard = self._guard
        assert guard is not None
        stream = cast(asyncio.Transport, transport)  # uvloop's transports have the methods and not the class
        if not guard.admit(self, stream):
            self._force_close = True
            stream.write(_REFUSAL)
            transport.close()
            return
        super().connection_made(transport)
        self._close_unless_request_within(guard.header_timeout_s)

    def data_received(self, data: bytes) -> None:
        """Limits the time for the rest of a request's head after its first bytes."""
        super().data_received(data)
        guard = self._guard
        if guard is None:
            return
        if self._messages:
            guard.open.note_busy(self)
        elif self._request_count and self._waiter is not None and not self._waiter.done():
            self._close_unless_request_within(guard.header_timeout_s)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Forgets the connection."""
        if self._guard is not None:
            self._guard.open.forget(self)
        super().connection_lost(exc)

    async def _handle_request(
        self,
        request: web.BaseRequest,
        start_time: float | None,
        request_handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
    ) -> tuple[web.StreamResponse, bool]:
        guard = self._guard
        if guard is None:  # the connection is lost
            return await super()._handle_request(request, start_time, request_handler)
        guard.open.note_busy(self)
        try:
            return await super()._handle_request(request, start_time, request_handler)
        finally:
            guard.open.note_idle(self)

    def _close_unless_request_within(self, seconds: float) -> None:
        """Moves the end of the wait for a request nearer, never away."""
        close_s = self._loop.time() + seconds
        if close_s >= self._next_keepalive_close_time and self._keepalive_handle is not None:
            return
        if self._keepalive_handle is not None:
            self._keepalive_handle.cancel()
        self._next_keepalive_close_time = close_s
        self._keepalive_handle = self._loop.call_at(close_s, self._process_keepalive)
