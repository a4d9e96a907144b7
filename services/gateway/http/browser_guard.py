"""Refuses what only a web page of a foreign site can cause: browsers tell by the headers `Host` and `Origin`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from aiohttp import hdrs, web

from halfmoon.errors import InvalidRequest
from halfmoon.rpc.addresses.allowed_hosts import AllowedHosts, is_same_origin
from services.gateway.http.operator_access import CONTROL_PREFIX

_READS = frozenset(("GET", "HEAD", "OPTIONS"))
_WITH_BODY = frozenset(("POST", "PUT", "PATCH"))
_JSON = "application/json"
_ABSOLUTE = re.compile(r"https?://([^/?#]*)", re.IGNORECASE)
_MAX_SHOWN = 100  # characters


class ForeignHost(InvalidRequest):
    """The request is addressed to a name that this gateway does not answer to."""


class ForeignOrigin(InvalidRequest):
    """A page of another site sent the request, and is not allowed to."""


class NotJson(InvalidRequest):
    """The body of a write of the control API is not called JSON, as a browser's form would send it."""


class BrowserGuard:
    """Owns the hosts that are answered and the origins that may write."""

    def __init__(self, listen_host: str, allowed_hosts: Sequence[str], allowed_origins: Sequence[str]) -> None:
        self._hosts = AllowedHosts(listen_host, allowed_hosts)
        self._origins = frozenset(allowed_origins)

    def check_host(self, request: web.Request) -> None:
        """Raises ForeignHost, which ends DNS rebinding: a rebound page sends its own name.

        A target in absolute form, as proxies get it, has a host, too. Raises InvalidRequest for one that is no path.
        """
        for host in _hosts(request):
            if not self._hosts.allows(host):
                raise ForeignHost(
                    f"this gateway does not answer to the Host {host[:_MAX_SHOWN]!r}: call it localhost or 127.0.0.1, "
                    "or name it in gateway.allowed_hosts (--allowed-hosts of a gateway that is started alone)"
                )

    def check_write(self, request: web.Request) -> None:
        """Raises ForeignOrigin, or NotJson in the control API.

        The control API takes no write of a foreign page; "*" does not allow them either. Elsewhere a foreign page may
        send JSON, since its browser asks in a preflight first. What it sends unasked (text/plain, forms) is refused.
        """
        if request.method in _READS:
            return
        is_json = request.content_type == _JSON
        is_control = request.path.startswith(CONTROL_PREFIX)
        for origin in request.headers.getall(hdrs.ORIGIN, ()) if is_control or not is_json else ():
            if not self._may_write(origin, request, is_control):
                raise ForeignOrigin(
                    f"the page of {origin[:_MAX_SHOWN]!r} may not send this: name its origin in "
                    "gateway.allowed_origins (--allowed-origins of a gateway that is started alone)"
                )
        if is_control and request.method in _WITH_BODY and not is_json:
            raise NotJson(f"the control API takes JSON only: send the header 'Content-Type: {_JSON}'")

    def _may_write(self, origin: str, request: web.Request, is_control: bool) -> bool:
        if origin in self._origins or ("*" in self._origins and not is_control):
            return True
        return is_same_origin(origin, next(iter(_hosts(request)), None))


def _hosts(request: web.Request) -> list[str]:
    """The hosts that a request is addressed to: that of a target in absolute form goes first (RFC 9112, 3.2.2)."""
    target, named = request.raw_path, request.headers.getall(hdrs.HOST, ())
    if target.startswith("/") or (target == "*" and request.method == "OPTIONS"):
        return [*named]
    absolute = _ABSOLUTE.match(target)
    if absolute is None:
        raise InvalidRequest("the request's target must be a path, such as /v1/models")
    return [absolute[1], *named]
