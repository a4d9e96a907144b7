"""Whether only this machine can reach a listening address."""

from __future__ import annotations

from ipaddress import ip_address
from urllib.parse import urlsplit


def is_loopback(host: str | None) -> bool:
    """Whether a host name or address, with brackets or without, is loopback; None and "" listen everywhere."""
    try:
        return host is not None and ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def is_loopback_url(url: str) -> bool:
    """Whether a URL's host is loopback; what is no URL has none."""
    try:
        host = urlsplit(url).hostname
    except ValueError:  # such as a bracket that is not closed
        return False
    return is_loopback(host)
