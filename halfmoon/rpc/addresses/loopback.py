"""Whether only this machine can reach a listening address."""

from __future__ import annotations

from ipaddress import ip_address


def is_loopback(host: str | None) -> bool:
    """Whether a host name or address is loopback; None and "" listen everywhere."""
    try:
        return host is not None and ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
