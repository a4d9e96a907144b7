"""Mutual TLS on the client's side: a channel that is made anew when the certificate's files have changed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from halfmoon.rpc.tls.identity_files import IdentityFiles, TlsIdentity
from halfmoon.rpc.tls.names import server_name

Options = Sequence[tuple[str, Any]]


def client_credentials(identity: TlsIdentity) -> grpc.ChannelCredentials:
    """Credentials of a channel: our certificate, and whom we trust."""
    return grpc.ssl_channel_credentials(identity.ca, identity.key, identity.cert)


def server_option(server_role: str | None) -> tuple[str, str]:
    """Channel option by which only a server with a certificate of this role (None: of any) is spoken to."""
    return "grpc.ssl_target_name_override", server_name(server_role)


class TlsChannel:
    """Owns the connection with the newest certificate, and older ones until their calls have ended.

    Has the four methods that stubs use. `server_role` is the role that the server's certificate must have; None: any.
    """

    def __init__(self, address: str, files: IdentityFiles, server_role: str | None, options: Options) -> None:
        self._address = address
        self._files = files
        self._options = (*options, server_option(server_role))
        self._newest = self._connection(files.current)
        self._retired: set[_Connection] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def unary_unary(self, *args: Any, **named: Any) -> Any:
        """As grpc.aio.Channel's."""
        return _Method(self, lambda channel: channel.unary_unary(*args, **named))

    def unary_stream(self, *args: Any, **named: Any) -> Any:
        """As grpc.aio.Channel's."""
        return _Method(self, lambda channel: channel.unary_stream(*args, **named))

    def stream_unary(self, *args: Any, **named: Any) -> Any:
        """As grpc.aio.Channel's."""
        return _Method(self, lambda channel: channel.stream_unary(*args, **named))

    def stream_stream(self, *args: Any, **named: Any) -> Any:
        """As grpc.aio.Channel's."""
        return _Method(self, lambda channel: channel.stream_stream(*args, **named))

    def newest(self) -> _Connection:
        """The connection for the next call."""
        identity = self._files.current
        if identity is not self._newest.identity and not self._is_closed:
            self._retired.add(self._newest)
            self._close_if_unused(self._newest)
            self._newest = self._connection(identity)
        return self._newest

    async def close(self) -> None:
        """Cancels running calls and closes every connection."""
        self._is_closed = True
        for connection in (self._newest, *self._retired):
            await connection.channel.close()
        await asyncio.gather(*self._closing)

    def _connection(self, identity: TlsIdentity) -> _Connection:
        channel = grpc.aio.secure_channel(self._address, client_credentials(identity), options=self._options)
        return _Connection(channel, identity, self._close_if_unused)

    def _close_if_unused(self, connection: _Connection) -> None:
        if connection.num_calls or connection not in self._retired:
            return
        self._retired.remove(connection)
        closing = asyncio.ensure_future(connection.channel.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)


class _Connection:
    """One channel with one certificate, and how many calls run on it."""

    def __init__(
        self, channel: grpc.aio.Channel, identity: TlsIdentity, on_call_end: Callable[[_Connection], None]
    ) -> None:
        self.channel = channel
        self.identity = identity
        self.num_calls = 0
        self._on_call_end = on_call_end

    def add(self, call: Any) -> None:
        """Counts a call that has begun, until it ends."""
        self.num_calls += 1
        call.add_done_callback(self._remove)

    def _remove(self, call: Any) -> None:
        self.num_calls -= 1
        self._on_call_end(self)


class _Method:
    """One method of a stub: each call is made on the newest connection."""

    def __init__(self, owner: TlsChannel, on: Callable[[grpc.aio.Channel], Any]) -> None:
        self._owner = owner
        self._on = on
        self._known: tuple[_Connection, Any] | None = None

    def __call__(self, *args: Any, **named: Any) -> Any:
        connection = self._owner.newest()
        if self._known is None or self._known[0] is not connection:
            self._known = connection, self._on(connection.channel)
        call = self._known[1](*args, **named)
        connection.add(call)
        return call
