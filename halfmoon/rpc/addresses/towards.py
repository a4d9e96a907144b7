"""This host's own address, as seen by another one or by itself."""

from __future__ import annotations

import socket

from halfmoon.rpc.addresses.resolved import MAX_PORT, is_port

ALL_ADDRESSES = ("0.0.0.0", "[::]", "")  # hosts of listeners on every address


def own_host(listen: str, others: str) -> str:
    """Returns the address for those who reach a listener on all addresses; empty if it listens on one.

    `others`: host:port of some of them, separated by commas. Without a way to the first, the hostname's address counts.
    """
    if listen.rpartition(":")[0] not in ALL_ADDRESSES:
        return ""
    try:
        return address_towards(others.split(",")[0].strip())
    except (OSError, ValueError):
        pass
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""


def address_towards(other: str) -> str:
    """Returns the address from which this host reaches host:port, with brackets around IPv6. Sends nothing.

    Raises OSError if the name is unknown or there is no way there, and ValueError without a port from 1 to 65535.
    """
    host, _, port = other.rpartition(":")
    if not (host and is_port(port, least=1)):
        raise ValueError(f"{other!r} has no port from 1 to {MAX_PORT}")
    family, kind, _, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as towards:
        towards.connect(address)
        found: str = towards.getsockname()[0]
    return bracketed(found)


def reachable(host: str) -> str:
    """Returns an address of this host at which a service that listens on `host` answers."""
    return {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # on `::` nothing listens to IPv4


def bracketed(host: str) -> str:
    """Returns a host as it stands before a port: with brackets around IPv6."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
