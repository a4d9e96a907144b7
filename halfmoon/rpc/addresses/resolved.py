"""What a name stands for: host:port of each of its addresses."""

from __future__ import annotations

import asyncio
import ipaddress
import socket


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
