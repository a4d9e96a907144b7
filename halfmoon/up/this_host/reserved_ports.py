"""Reserves ports that a child listens on, and listens on those that several children accept from."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from halfmoon.errors import InvalidRequest

LOOPBACK = "127.0.0.1"
HTTP_BACKLOG = 4_096  # connections that wait to be accepted: many clients may come at once


class ReservedPorts:
    """Owns a bound socket for each port, which never listens, and the listening sockets that children inherit.

    Linux never hands out a bound port as a free one. A server that names the port and sets SO_REUSEADDR may listen on
    it all the same. Other systems would refuse the second bind, so there the port has only been free once.
    """

    def __init__(self) -> None:
        self._held = ExitStack()

    def __enter__(self) -> ReservedPorts:
        return self

    def __exit__(self, *exc: object) -> None:
        self._held.close()

    def port(self, host: str = LOOPBACK) -> int:
        """Reserves one more port on `host`. Raises InvalidRequest if that is not an address of this host."""
        try:
            held = _bound(host)
        except OSError as err:
            raise InvalidRequest(
                f"cannot listen on {host}: {err}: give an address of this host (`ip address` lists them)", param="host"
            ) from err
        port = int(held.getsockname()[1])
        if sys.platform == "linux":
            self._held.enter_context(held)
        else:
            held.close()
        return port

    def address(self, host: str = LOOPBACK) -> str:
        """Reserves a port on `host` and returns its host:port. Raises InvalidRequest as `port` does."""
        return f"{host}:{self.port(host)}"

    def listening(self, host: str, port: int, num_acceptors: int) -> list[tuple[int, ...]]:
        """Listens on `port` at every address of `host`. Returns descriptors for each acceptor to inherit.

        The kernel distributes connections among acceptors. One that dies loses no connection: those that it has not
        accepted wait here for its successor. Raises InvalidRequest.
        """
        try:
            check_free(host, port, "port")  # another system would not notice that it shares its port
            addresses = _addresses(host, port)
            return [
                tuple([self._listening(family, address) for family, address in addresses]) for _ in range(num_acceptors)
            ]
        except OSError as err:
            raise _taken(host, port, err, "port") from err

    def _listening(self, family: socket.AddressFamily, address: Any) -> int:
        listener = socket.create_server(address, family=family, backlog=HTTP_BACKLOG, reuse_port=True)
        return self._held.enter_context(listener).fileno()


def check_free(host: str, port: int, setting: str) -> None:
    """Raises InvalidRequest, which names the option of the setting, if nobody can listen on the port."""
    try:
        for family, address in _addresses(host, port):
            socket.create_server(address, family=family).close()
    except OSError as err:
        raise _taken(host, port, err, setting) from err


def _taken(host: str, port: int, err: OSError, setting: str) -> InvalidRequest:
    reason = err.strerror if isinstance(err, socket.gaierror) else os.strerror(err.errno or 0)
    advice = f"give another port by --{setting.replace('_', '-')}"
    return InvalidRequest(f"cannot listen on {host}:{port}: {reason}: {advice}", param=setting)


def _addresses(host: str, port: int) -> Sequence[tuple[socket.AddressFamily, Any]]:
    found = socket.getaddrinfo(host.strip("[]") or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return [(family, address) for family, _, _, _, address in dict.fromkeys(found)]


def _bound(host: str) -> socket.socket:
    family, address = _addresses(host, 0)[0]
    bound = socket.socket(family)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound
