"""A channel to another service: every call has a deadline, every stream is cancelled when its reader leaves."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Self

import grpc

from halfmoon.errors import DataLoss
from halfmoon.rpc.context import REQUEST_ID_KEY, bounded_deadline_s, request_id
from halfmoon.rpc.credentials.credential import Credential
from halfmoon.rpc.credentials.roles import ClusterRole
from halfmoon.rpc.status import in_our_tree
from halfmoon.rpc.telemetry.spans import current_span
from halfmoon.rpc.tls.channel import TlsChannel

LONG_LIVED_S = 24 * 3600.0  # a stream that lives as long as both ends, which reconnect when it expires

_KEEPALIVE_MS = 5_000

# Both ends ping a silent connection, so that a silently lost peer is detected within ten seconds: that is the lease of
# whatever a call holds. gRPC's own limit for a ping's answer, a minute, would override `keepalive_timeout_ms`.
KEEPALIVE_OPTIONS = (
    ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", _KEEPALIVE_MS),
    ("grpc.http2.ping_timeout_ms", _KEEPALIVE_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", _KEEPALIVE_MS // 2),  # the server rejects more frequent pings
)
CHANNEL_OPTIONS = (
    *KEEPALIVE_OPTIONS,
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),  # each channel has its own connection
)


class Peer:
    """Owns one channel to one address. Use as an async context manager, or `close` it.

    Each call carries the token of the `credential` for services of `server_role`; None: no token. On mutual TLS the
    service must have a certificate of that role; None: of any role.
    """

    def __init__(
        self, address: str, credential: Credential | None = None, server_role: ClusterRole | None = None
    ) -> None:
        self.address = address
        self._token = credential.metadata(server_role) if credential and server_role else ()
        tls = None if credential is None or address.startswith("unix:") else credential.tls
        self.channel: Any = (
            grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
            if tls is None
            else TlsChannel(address, tls, server_role, CHANNEL_OPTIONS)
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancels running calls and closes the channel."""
        await self.channel.close()

    async def call(self, method: Callable[..., Any], request: Any, *, deadline_s: float) -> Any:
        """Makes a unary call. Raises what the peer raised, DeadlineExceeded, Unavailable or DataLoss."""
        with in_our_tree(self.address):
            return _parsed(await method(request, timeout=bounded_deadline_s(deadline_s), metadata=self._metadata()))

    @asynccontextmanager
    async def stream(
        self, method: Callable[..., Any], request: Any, *, deadline_s: float
    ) -> AsyncIterator[AsyncIterator[Any]]:
        """Opens a response stream; leaving the context cancels the call. `request`: a message or an async iterator."""
        with in_our_tree(self.address):
            call = method(request, timeout=bounded_deadline_s(deadline_s), metadata=self._metadata())
        try:
            yield self._responses(call)
        finally:
            call.cancel()

    def raw_stream(self, method: str, *, deadline_s: float) -> grpc.aio.StreamStreamCall:
        """A bidirectional call of raw bytes. Its owner cancels it."""
        with in_our_tree(self.address):
            return self.channel.stream_stream(method)(timeout=bounded_deadline_s(deadline_s), metadata=self._metadata())

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        named = ((REQUEST_ID_KEY, request_id()),) if request_id() else ()
        return (*self._token, *named, *current_span().headers)

    async def _responses(self, call: Any) -> AsyncIterator[Any]:
        with in_our_tree(self.address):
            async for response in call:
                yield _parsed(response)


def _parsed(response: Any) -> Any:
    """The response. Raises DataLoss for grpc's stand-in for a message that cannot be parsed."""
    if response is None:
        raise DataLoss("a message of the peer cannot be parsed")
    return response
