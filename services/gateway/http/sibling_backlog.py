"""Accepts the connections that wait in the backlogs of other gateways of this host, which are dead or busy."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Iterator, Sequence
from contextlib import suppress

from aiohttp import web

log = logging.getLogger(__name__)

_POLL_S = 0.25  # a gateway that has not accepted a connection by then is dead, or too busy for it


class SiblingBacklog:
    """Owns the siblings' listening sockets in this process.

    Every gateway has a socket of its own, so that the kernel distributes connections evenly; if all shared one, the
    first to wake would get a whole burst.
    """

    def __init__(
        self,
        runner: web.AppRunner,
        descriptors: Sequence[int],
        tls: ssl.SSLContext | None = None,
        handshake_s: float | None = None,
    ) -> None:
        self._runner = runner
        self._tls = tls
        self._handshake_s = None if tls is None else handshake_s
        self._listeners = [socket.socket(fileno=descriptor) for descriptor in descriptors]
        for listener in self._listeners:
            listener.setblocking(False)
            listener.set_inheritable(False)

    async def accept(self) -> None:
        """Accepts as long as it runs."""
        try:
            async with asyncio.TaskGroup() as handshakes:
                while self._listeners:
                    await asyncio.sleep(_POLL_S)
                    for connection in self._waiting():
                        connection.setblocking(False)
                        handshakes.create_task(self._serve(connection))
        finally:
            for listener in self._listeners:
                listener.close()

    async def _serve(self, connection: socket.socket) -> None:
        """Hands a connection to the application. A TLS handshake takes its time, and may fail."""
        assert self._runner.server is not None
        with suppress(OSError):
            await asyncio.get_running_loop().connect_accepted_socket(
                self._runner.server, connection, ssl=self._tls, ssl_handshake_timeout=self._handshake_s
            )

    def _waiting(self) -> Iterator[socket.socket]:
        for listener in self._listeners:
            try:
                while True:
                    yield listener.accept()[0]
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                continue
            except OSError as error:
                log.warning("http.not_accepted", extra={"reason": error.strerror})
