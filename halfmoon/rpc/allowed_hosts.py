"""The HTTP `Host` and `Origin` headers that browsers send: what protects listeners on loopback from web pages.

A page may point its own name at 127.0.0.1 (DNS rebinding). Its browser then takes the service here for the page's own
server, but still sends the page's name as `Host`.
"""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from halfmoon.rpc.loopback import is_loopback

_EVERY_INTERFACE = ("", "0.0.0.0", "::")
_DEFAULT_PORTS = {"http": 80, "https": 443}


class AllowedHosts:
    """Owns the names under which one HTTP service answers. Ports are not compared."""

    def __init__(self, listen_host: str | None, further: Sequence[str] = ()) -> None:
        """Beyond loopback every name is allowed, unless `further` names some; "*" allows all."""
        is_open = "*" in further or (not further and not is_loopback(listen_host))
        own = () if listen_host is None or listen_host in _EVERY_INTERFACE else (listen_host,)
        self._names = None if is_open else frozenset(name.lower().strip("[]") for name in (*own, *further))

    def allows(self, host: str | None) -> bool:
        """Whether to answer a request with this `Host` header. Without one it is not a browser's."""
        if self._names is None or host is None:
            return True
        name = host_name(host)
        return name is not None and (is_loopback(name) or name in self._names)


def host_name(host: str) -> str | None:
    """The name or address of a `Host` header in lower case, without port and brackets; None if it is not valid."""
    try:
        parts = urlsplit(f"//{host.strip()}")
        is_bare = parts.netloc == host.strip() and "@" not in parts.netloc and parts.port != 0
    except ValueError:
        return None
    return parts.hostname.removesuffix(".") if is_bare and parts.hostname else None


def is_same_origin(origin: str, host: str | None) -> bool:
    """Whether a page of `origin` came from the server that its browser addresses as `host`.

    The schemes are not compared: a proxy in front may speak https.
    """
    try:
        page = urlsplit(origin)
        here = urlsplit(f"{page.scheme}://{host or ''}")
        ports = [parts.port or _DEFAULT_PORTS.get(parts.scheme) for parts in (page, here)]
    except ValueError:
        return False
    return page.hostname is not None and page.hostname == here.hostname and ports[0] == ports[1]
