"""What host:port is, and what a name in it stands for: host:port of each of its addresses."""

from __future__ import annotations

import asyncio
import ipaddress
import socket

MAX_PORT = 65_535


def is_port(text: str, least: int = 0) -> bool:
    """Whether the text is a port, from `least` on."""
    return text.isascii() and text.isdigit() and len(text) <= len(str(MAX_PORT)) and least <= int(text) <= MAX_PORT


def check_address(address: str, least_port: int = 0) -> str:
    """Returns host:port or unix:PATH as it is. Raises ValueError, which says what to give, if it is neither."""
    host, colon, port = address.rpartition(":")
    is_one_host = ":" not in host or host.startswith("[")
    if address.startswith("unix:") or (colon and is_one_host and is_port(port, least_port)):
        return address
    raise ValueError(f"{address!r} is not an address: give HOST:PORT, such as 127.0.0.1:7001, or [::1]:7001 with IPv6")


def check_dialled(addresses: str) -> str:
    """Like `check_address`, of several separated by commas that others listen on."""
    for address in addresses.split(","):
        check_address(address.strip(), least_port=1)
    return addresses


async def resolved(address: str) -> frozenset[str]:
    """Returns host:port of every address of the name in host:port. An IP address or a socket's path is itself.

    IPv6 addresses count only where there is no IPv4 address: both may be those of one service. Raises OSError if the
    name has no address now, or nobody answers for it.
    """
    host, _, port = address.rpartition(":")
    if address.startswith("unix:") or not port.isdigit() or _is_ip(host):
        return frozenset({address})
    found = await asyncio.get_running_loop().getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    by_family: dict[int, set[str]] = {}
    for family, _, _, _, (ip, *_) in found:
        by_family.setdefault(family, set()).add(f"[{ip}]:{port}" if family == socket.AF_INET6 else f"{ip}:{port}")
    return frozenset(by_family.get(socket.AF_INET) or by_family.get(socket.AF_INET6) or {address})


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True
