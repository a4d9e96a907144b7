"""A listening socket under TLS that gives a handshake no more time than the head of a request."""

from __future__ import annotations

import asyncio
import socket
import ssl

from aiohttp import web


class HttpsSite(web.SockSite):
    """aiohttp's own lets a stranger's connection be silent for a minute before the server knows of it."""

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


def listening_sockets(host: str, port: int, *, reuse_port: bool) -> list[socket.socket]:
    """Binds a socket for each address of `host`. Raises OSError."""
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    places = dict.fromkeys((family, address) for family, _, _, _, address in found)
    return [socket.create_server(address, family=family, reuse_port=reuse_port) for family, address in places]
