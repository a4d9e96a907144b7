"""A console on loopback answers no page of another site: neither one that rebinds its name nor one that writes."""

from __future__ import annotations

import pytest

pytest.importorskip("streamlit")

import streamlit as st
from starlette.types import Message, Receive, Scope, Send

from console.host_guard import HostGuard

OPTIONS = {"server.address": "127.0.0.1", "server.allowedHosts": [], "server.corsAllowedOrigins": []}


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Streamlit's options, which a test may change."""
    chosen: dict[str, object] = dict(OPTIONS)
    monkeypatch.setattr(st, "get_option", chosen.__getitem__)
    return chosen


async def status(kind: str, **headers: str) -> int:
    """The status of a request, 0 if the application behind the guard got it, 403 for a WebSocket that is closed."""
    passed: list[Scope] = []
    sent: list[Message] = []

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        passed.append(scope)

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": f"{kind}.connect"}

    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": kind, "method": "GET", "path": "/_stcore/stream", "headers": pairs}
    await HostGuard(application)(scope, receive, send)
    if passed:
        return 0
    return 403 if sent[0]["type"] == "websocket.close" else int(sent[0]["status"])


async def test_a_rebound_name_reaches_nothing(options: dict[str, object]) -> None:
    assert await status("http", host="evil.example:8501") == 421
    assert await status("websocket", host="evil.example:8501", origin="http://evil.example:8501") == 403
    for own in ("localhost:8501", "127.0.0.1:8501", "[::1]:8501"):
        assert await status("http", host=own) == 0
        assert await status("websocket", host=own, origin=f"http://{own}") == 0
        assert await status("websocket", host=own) == 0


async def test_pages_of_other_ports_open_no_websocket(options: dict[str, object]) -> None:
    for origin in ("http://localhost:3000", "http://evil.example", "null"):
        assert await status("websocket", host="localhost:8501", origin=origin) == 403


async def test_names_and_origins_of_its_settings(options: dict[str, object]) -> None:
    options.update({"server.allowedHosts": ["ops.example"], "server.corsAllowedOrigins": ["https://ops.example"]})
    assert await status("websocket", host="localhost:8501", origin="https://ops.example") == 0
    assert await status("http", host="ops.example") == 0
    assert await status("http", host="evil.example") == 421


async def test_beyond_loopback_visitors_sign_in_instead(options: dict[str, object]) -> None:
    options["server.address"] = "0.0.0.0"
    assert await status("websocket", host="console.example", origin="http://other.example") == 0
