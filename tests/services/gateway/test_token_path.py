"""A token on its way: from an event to the sink, and from a text to the bytes on the connection."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import HttpVersion11, web
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.errors import HalfmoonError, Unavailable
from halfmoon.pb.types_pb2 import LENGTH, NOT_FINISHED, Token
from services.gateway.cluster.token_streams import Event, TokenArrived, WorkerLost
from services.gateway.replies.chat_format import ChatFormat
from services.gateway.replies.completion_format import CompletionFormat
from services.gateway.replies.event_body import ClientGone, EventBody, sse
from services.gateway.replies.replies import TextEvents
from services.gateway.replies.reply_format import ReplyFormat, ReplyOptions, Usage
from services.gateway.replies.text_stream import TextPiece
from services.gateway.routing.token_flow import TokenFlow
from tests.services.gateway.fakes import MODEL, ByteTokenizer, Script, running_fleet, soon

MIB = 1 << 20
HI: list[Any] = [{"role": "user", "content": "hi"}]


def shape_of(kind: type[ChatFormat] | type[CompletionFormat], wanted: ReplyOptions, model: str = "m") -> ReplyFormat:
    return kind("id", model, 7, ByteTokenizer(), wanted, [])


@pytest.mark.parametrize("kind", [ChatFormat, CompletionFormat])
@pytest.mark.parametrize("usage", ["none", "last"])
@given(text=st.text(min_size=1), index=st.integers(0, 3), model=st.text())
def test_a_prepared_event_is_the_event(kind: Any, usage: Any, text: str, index: int, model: str) -> None:
    shape = shape_of(kind, ReplyOptions(usage=usage), model)
    assert shape.repeats
    events = TextEvents(shape)
    for one in (text, text[::-1]):
        (chunk,) = shape.chunks(index, TextPiece(one, (), (5,), None))
        assert events.of(index, one) == sse(shape.frame(chunk, lambda: Usage(1, 2, 3)))


@pytest.mark.parametrize(
    "wanted", [ReplyOptions(logprobs=True), ReplyOptions(token_ids=True), ReplyOptions(usage="running")]
)
@pytest.mark.parametrize("kind", [ChatFormat, CompletionFormat])
def test_what_changes_is_not_prepared(kind: Any, wanted: ReplyOptions) -> None:
    assert not shape_of(kind, wanted).repeats


class Sink:
    """Begins when a test says so."""

    def __init__(self, enough: int = 100) -> None:
        self.may_begin = asyncio.Event()
        self.has_tokens = asyncio.Event()
        self.pushed: list[int] = []
        self._enough = enough

    async def begin(self) -> None:
        await self.may_begin.wait()

    def push(self, tokens: Sequence[Token]) -> bool:
        self.pushed += [one.position for one in tokens]
        self.has_tokens.set()
        return len(self.pushed) >= self._enough


def token(position: int, finish_reason: Any = NOT_FINISHED) -> Event:
    return TokenArrived(Token(position=position, finish_reason=finish_reason), 0.0)


def handle(event: Event) -> list[Token]:
    if isinstance(event, TokenArrived):
        return [event.token]
    assert isinstance(event, WorkerLost)
    raise event.error


LOST = WorkerLost("d0", Unavailable("gone"))


async def test_tokens_wait_for_the_sink_and_then_go_straight_through() -> None:
    flow, sink = TokenFlow(handle), Sink()
    running = asyncio.ensure_future(flow.run(sink))
    flow.put(token(0))
    await asyncio.sleep(0)
    flow.put(token(1))
    assert sink.pushed == []
    sink.may_begin.set()
    await soon(sink.has_tokens.wait())
    assert sink.pushed == [0, 1]
    flow.put(token(2))
    assert sink.pushed == [0, 1, 2]  # in that very call
    flow.put(token(3, LENGTH))
    flow.put(LOST)  # too late
    assert await soon(running) is True


@pytest.mark.parametrize("late", [False, True])
async def test_a_failure_comes_after_the_tokens_that_were_due(late: bool) -> None:
    flow, sink = TokenFlow(handle), Sink()
    running = asyncio.ensure_future(flow.run(sink))
    flow.put(token(0))
    if not late:
        flow.put(LOST)
    flow.put(token(1))
    sink.may_begin.set()
    if late:
        await soon(sink.has_tokens.wait())
        flow.put(LOST)
    with pytest.raises(Unavailable):
        await soon(running)
    assert sink.pushed == ([0, 1] if late else [0])


async def test_without_a_token_the_sink_never_begins() -> None:
    flow = TokenFlow(handle)
    flow.put(LOST)
    with pytest.raises(HalfmoonError):
        await soon(flow.run(Sink()))


async def test_a_sink_that_has_enough_ends_the_flow() -> None:
    flow, sink = TokenFlow(handle), Sink(enough=2)
    sink.may_begin.set()
    for position in range(3):
        flow.put(token(position))
    assert await soon(flow.run(sink)) is False


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


def body_over(connection: Connection | None) -> EventBody:
    return EventBody(cast(web.Request, SimpleNamespace(version=HttpVersion11, transport=connection)))


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
