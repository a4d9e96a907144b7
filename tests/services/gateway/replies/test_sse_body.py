"""An event stream on the client's connection."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import HttpVersion11, web

from services.gateway.replies.sse_body import ClientGone, SSEBody
from tests.services.gateway.fakes import MODEL, Script, running_fleet, soon

MIB = 1 << 20


HI: list[Any] = [{"role": "user", "content": "hi"}]


class Connection:
    """As much of a transport as a body writes to."""

    def __init__(self, unread_bytes: int, closing: bool = False) -> None:
        self.written: list[bytes] = []
        self.aborted = False
        self._unread_bytes = unread_bytes
        self._closing = closing

    def get_write_buffer_size(self) -> int:
        return self._unread_bytes

    def is_closing(self) -> bool:
        return self._closing

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def abort(self) -> None:
        self.aborted = True


def body_over(connection: Connection | None) -> SSEBody:
    return SSEBody(cast(web.Request, SimpleNamespace(version=HttpVersion11, transport=connection)))


def test_a_client_that_does_not_read_is_cut_off() -> None:
    patient, silent = Connection(16 * MIB), Connection(16 * MIB + 1)
    body_over(patient).write(b"data")
    assert patient.written == [b"4\r\ndata\r\n"]
    with pytest.raises(ClientGone):
        body_over(silent).write(b"data")
    assert (silent.aborted, silent.written) == (True, [])


@pytest.mark.parametrize("connection", [None, Connection(0, closing=True)])
def test_a_connection_that_is_gone_is_not_written_to(connection: Connection | None) -> None:
    with pytest.raises(ClientGone):
        body_over(connection).write(b"data")
    assert connection is None or not connection.written


@pytest.mark.parametrize("header", ["", "Connection: keep-alive\r\n"])
async def test_a_client_of_http_1_0_gets_a_plain_stream(tmp_path: Path, header: str) -> None:
    async with running_fleet(tmp_path) as fleet:
        await fleet.pair(Script("héllo"))
        host, _, port = fleet.http.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        sent = json.dumps({"model": MODEL, "messages": HI, "stream": True}).encode()
        head = f"POST /v1/chat/completions HTTP/1.0\r\n{header}Content-Length: {len(sent)}\r\n\r\n"
        writer.write(head.encode() + sent)
        told, _, body = (await soon(reader.read())).partition(b"\r\n\r\n")  # until the connection is closed
        writer.close()
    assert b"chunked" not in told
    *events, done, rest = body.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    deltas = [json.loads(one.removeprefix(b"data: "))["choices"][0]["delta"] for one in events]
    assert "".join(one.get("content", "") for one in deltas) == "héllo"
