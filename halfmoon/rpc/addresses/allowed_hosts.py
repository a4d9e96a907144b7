"""The HTTP `Host` and `Origin` headers that browsers send: what protects listeners on loopback from web pages.

A page may point its own name at 127.0.0.1 (DNS rebinding). Its browser then takes the service here for the page's own
server, but still sends the page's name as `Host`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from halfmoon.rpc.addresses.loopback import is_loopback

_EVERY_INTERFACE = ("", "0.0.0.0", "::")
_DEFAULT_PORTS = {"http": 80, "https": 443}
_MOST_PORT = 65_535
# RFC 9110, 7.2: nothing may follow the bracket of an address but a port
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._~!$&'()*+;=%-]+))(?::([0-9]{0,5}))?")
_ORIGIN = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)


class _Address(NamedTuple):
    name: str  # in lower case, without brackets
    port: int | None


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
    address = _address(host)
    return address and address.name


def is_same_origin(origin: str, host: str | None) -> bool:
    """Whether a page of `origin` came from the server that its browser addresses as `host`.

    The schemes are not compared: a proxy in front may speak https.
    """
    parts = _ORIGIN.fullmatch(origin)
    page, here = _address(parts[2] if parts else ""), _address(host or "")
    if parts is None or page is None or here is None or page.name != here.name:
        return False
    default = _DEFAULT_PORTS.get(parts[1].lower())
    return (page.port or default) == (here.port or default)


def _address(text: str) -> _Address | None:
    parts = _HOST.fullmatch(text.strip())
    if parts is None:
        return None
    port = int(parts[3]) if parts[3] else None
    name = (parts[1] or parts[2].removesuffix(".")).lower()
    return _Address(name, port) if name and port != 0 and (port or 0) <= _MOST_PORT else None
