"""Where the gateway listens for HTTP: sockets of its own or inherited ones, with or without TLS."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Sequence

from aiohttp import web

from halfmoon.errors import InvalidRequest
from services.gateway.settings import GatewaySettings

_BACKLOG = 4_096  # connections that wait to be accepted: many clients may come at once


async def listen(runner: web.AppRunner, settings: GatewaySettings, tls: ssl.SSLContext | None) -> int:
    """Listens, and returns the port. Raises InvalidRequest if the address cannot be used."""
    try:
        for site in _sites(runner, settings, tls):
            await site.start()
    except OSError as error:
        raise InvalidRequest(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror}", param="port"
        ) from error
    return int(runner.addresses[0][1])


def _sites(runner: web.AppRunner, settings: GatewaySettings, tls: ssl.SSLContext | None) -> Sequence[web.BaseSite]:
    shares, host, port = settings.reuse_port, settings.host, settings.port
    listeners = [socket.socket(fileno=descriptor) for descriptor in settings.http_descriptors]
    for listener in listeners:
        listener.set_inheritable(False)  # to the processes that check constraints
    if tls is not None:
        listeners = listeners or _listening_sockets(host, port, reuse_port=shares)
        return [_HttpsSite(runner, listener, tls, settings.header_timeout_s, _BACKLOG) for listener in listeners]
    if listeners:
        return [web.SockSite(runner, listener, backlog=_BACKLOG) for listener in listeners]
    return [web.TCPSite(runner, host, port, backlog=_BACKLOG, reuse_port=shares)]


class _HttpsSite(web.SockSite):
    """A listening socket under TLS that gives a handshake no more time than the head of a request.

    aiohttp's own lets a stranger's connection be silent for a minute before the server knows of it.
    """

    __slots__ = ("_handshake_s",)

    def __init__(
        self, runner: web.AppRunner, listener: socket.socket, tls: ssl.SSLContext, handshake_s: float, backlog: int
    ) -> None:
        super().__init__(runner, listener, ssl_context=tls, backlog=backlog)
        self._handshake_s = handshake_s

    async def start(self) -> None:
        """Listens."""
        await web.BaseSite.start(self)
        assert self._runner.server is not None
        self._server = await asyncio.get_running_loop().create_server(
            self._runner.server,
            sock=self._sock,
            ssl=self._ssl_context,
            backlog=self._backlog,
            ssl_handshake_timeout=self._handshake_s,
        )


def _listening_sockets(host: str, port: int, *, reuse_port: bool) -> list[socket.socket]:
    """Binds a socket for each address of `host`. Raises OSError."""
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    places = dict.fromkeys((family, address) for family, _, _, _, address in found)
    return [socket.create_server(address, family=family, reuse_port=reuse_port) for family, address in places]
