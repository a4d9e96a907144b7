"""Keeps web pages of other sites away from a console on loopback, which is open to whoever reaches it."""

from __future__ import annotations

import streamlit as st
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from halfmoon.rpc.addresses.allowed_hosts import AllowedHosts, is_same_origin
from halfmoon.rpc.addresses.loopback import is_loopback

_FOREIGN_HOST = (
    "The console does not answer to this Host: call it localhost or 127.0.0.1, or name it in --server.allowedHosts.\n"
)
_FOREIGN_ORIGIN = "The page of this Origin may not use the console: name it in --server.corsAllowedOrigins.\n"


class HostGuard:
    """Middleware: refuses foreign `Host` headers (DNS rebinding) and WebSockets of foreign pages.

    Streamlit alone answers to every name unless its `server.allowedHosts` is set, and lets pages of every port of this
    machine open a WebSocket. Beyond loopback visitors sign in, and Streamlit's own checks stand.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one ASGI connection."""
        problem = _problem(scope) if scope["type"] in ("http", "websocket") else None
        if problem is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()  # websocket.connect
            await send({"type": "websocket.close", "code": 1008})  # before it is accepted: 403
        else:
            await PlainTextResponse(problem, status_code=421)(scope, receive, send)


def _problem(scope: Scope) -> str | None:
    address = st.get_option("server.address")
    if not is_loopback(address):
        return None
    headers = Headers(scope=scope)
    hosts, origins = headers.getlist("host"), headers.getlist("origin")
    allowed = AllowedHosts(address, st.get_option("server.allowedHosts"))
    if not all(allowed.allows(host) for host in hosts):
        return _FOREIGN_HOST
    foreign = [origin for origin in origins if origin not in st.get_option("server.corsAllowedOrigins")]
    if scope["type"] == "websocket" and not all(is_same_origin(origin, headers.get("host")) for origin in foreign):
        return _FOREIGN_ORIGIN
    return None
