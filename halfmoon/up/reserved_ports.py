"""Reserves ports that a child listens on, now and after every restart."""

from __future__ import annotations

import socket
import sys
from contextlib import ExitStack
from types import TracebackType

from halfmoon.errors import InvalidRequest


class ReservedPorts:
    """Owns a bound socket for each port. The sockets never listen.

    Linux never hands out a bound port as a free one. A server that names the port and sets SO_REUSEADDR may listen on
    it all the same. Other systems would refuse the second bind, so there the port has only been free once.
    """

    def __init__(self) -> None:
        self._held = ExitStack()

    def __enter__(self) -> ReservedPorts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._held.close()

    def port(self, host: str = "127.0.0.1") -> int:
        """Reserves one more port on `host`. Raises InvalidRequest if that is not an address of this host."""
        try:
            held = _bound(host)
        except OSError as err:
            raise InvalidRequest(f"cannot listen on {host}: {err}", param="host") from err
        port = int(held.getsockname()[1])
        if sys.platform == "linux":
            self._held.enter_context(held)
        else:
            held.close()
        return port

    def address(self) -> str:
        """Reserves a port on loopback and returns its host:port."""
        return f"127.0.0.1:{self.port()}"


def _bound(host: str) -> socket.socket:
    addresses = socket.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = addresses[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound
