"""Whether only this machine reaches what listens at an address."""

from __future__ import annotations

from ipaddress import ip_address


def is_loopback(host: str | None) -> bool:
    """Of a name or an address; None and the empty one listen everywhere."""
    try:
        return host is not None and ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
