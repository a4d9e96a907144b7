"""The application that `streamlit run` serves: the pages, and an index that contains the server's address.

At an address like /planner, Streamlit's front end would first request /planner/_stcore and log that it is missing.
"""

from __future__ import annotations

from pathlib import Path

import streamlit as st
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import RedirectResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from console.host_guard import HostGuard

_BEFORE = b"<script"
_BACKEND = b"<script>window.__streamlit = { BACKEND_BASE_URL: window.location.origin }</script>"


class BackendIndex:
    """Middleware: adds the server's address to each HTML page, before its first script."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one ASGI connection."""
        if scope["type"] != "http" or scope["method"] != "GET" or "." in scope["path"]:
            await self._app(scope, receive, send)
            return
        headers = [(name, value) for name, value in scope["headers"] if name != b"accept-encoding"]
        await self._app({**scope, "headers": headers}, receive, _with_backend(send))


def _with_backend(send: Send) -> Send:
    """Wraps `send`; an HTML response is held until it is complete."""
    held: list[Message] = []

    async def pass_on(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(raw=message["headers"])
            if message["status"] == 200 and headers.get("content-type", "").startswith("text/html"):
                held.append(message)
                return
        if not held:
            await send(message)
            return
        held.append(message)
        if not message.get("more_body"):
            await _send_with_backend(held, send)

    return pass_on


async def _send_with_backend(held: list[Message], send: Send) -> None:
    start, *parts = held
    body = b"".join(part.get("body", b"") for part in parts).replace(_BEFORE, _BACKEND + _BEFORE, 1)
    MutableHeaders(raw=start["headers"])["content-length"] = str(len(body))
    await send(start)
    await send({"type": "http.response.body", "body": body})


async def _first_page(request: Request) -> RedirectResponse:
    """Redirects /overview, since Streamlit gives its first page no name."""
    return RedirectResponse("/")


app = st.App(
    Path(__file__).with_name("app.py"),
    routes=[Route("/overview", _first_page)],
    middleware=[Middleware(HostGuard), Middleware(BackendIndex)],
)
