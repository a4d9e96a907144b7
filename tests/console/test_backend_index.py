"""The index page says where the server is; everything else passes as it is."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("streamlit")

from starlette.types import Receive, Scope, Send

from console.asgi import BackendIndex

PARTS = [b"<html><script>one()</script>", b"<script>two()</script>"]


async def answer(path: str, content_type: str, status: int = 200) -> tuple[dict[str, str], bytes, Any]:
    """Headers and body of a response in two parts, and the headers of the request as the application saw them."""
    seen: dict[str, Any] = {}

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        seen["headers"] = scope["headers"]
        length = str(sum(map(len, PARTS))).encode()
        headers = [(b"content-type", content_type.encode()), (b"content-length", length)]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": PARTS[0], "more_body": True})
        await send({"type": "http.response.body", "body": PARTS[1]})

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise NotImplementedError

    scope = {"type": "http", "method": "GET", "path": path, "headers": [(b"accept-encoding", b"gzip")]}
    await BackendIndex(application)(scope, receive, send)
    start, *parts = sent
    headers = {name.decode(): value.decode() for name, value in start["headers"]}
    return headers, b"".join(part["body"] for part in parts), seen["headers"]


async def test_a_page_is_told_before_its_first_script() -> None:
    headers, body, asked = await answer("/planner", "text/html; charset=utf-8")
    assert body.startswith(b"<html><script>window.__streamlit = {")
    assert body.count(b"window.__streamlit") == 1
    assert body.endswith(b"<script>one()</script><script>two()</script>")
    assert headers["content-length"] == str(len(body))
    assert asked == []  # what is compressed could not be added to


@pytest.mark.parametrize(
    ("path", "content_type", "status"),
    [("/static/js/a.js", "text/html", 200), ("/_stcore/health", "text/plain", 200), ("/planner", "text/html", 500)],
)
async def test_what_is_no_page_stays(path: str, content_type: str, status: int) -> None:
    headers, body, _ = await answer(path, content_type, status)
    assert body == b"".join(PARTS)
    assert headers["content-length"] == str(len(body))
