"""Ports that are chosen here and listened on by a child, now and whenever it is started again."""

from __future__ import annotations

import socket
import sys
from contextlib import ExitStack
from types import TracebackType

from halfmoon.errors import InvalidRequest


class ReservedPorts:
    """Owns a bound socket for each port, which never listens.

    Linux gives a bound port to nobody who asks for any, and lets one who names it and sets SO_REUSEADDR, as servers do,
    listen on it. Elsewhere the second bind would be refused, so there the port is only one that was free.
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
        """One more, on an address of this host. Raises InvalidRequest if it is none."""
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
        """host:port on loopback."""
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
