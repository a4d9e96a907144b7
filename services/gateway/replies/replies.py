"""The two ways a request is answered: one JSON object, or server-sent events."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from json.encoder import encode_basestring_ascii
from typing import Any, Protocol

from aiohttp import web

from halfmoon.errors import HalfmoonError
from halfmoon.pb.types_pb2 import Token
from services.gateway.http.error_responses import error_body
from services.gateway.replies.event_ids import EventIds
from services.gateway.replies.reply_format import Output, ReplyFormat, Usage, UsageNow, WholeFormat
from services.gateway.replies.sse_body import SSEBody, sse
from services.gateway.replies.text_stream import TextPiece, TextStream, joined

Keep = Callable[[dict[str, Any]], Awaitable[None]]
"""Keeps a finished response, in which it may say that it could not."""

_MARK = "\0"
_QUOTED_MARK = encode_basestring_ascii(_MARK).encode()
_NO_USAGE = Usage(0, 0, 0)


Begin = Callable[[], Awaitable[None]]
"""Begins a reply."""


class Reply(Protocol):
    """What the outputs of a request see of its reply."""

    async def begin(self) -> None:
        """Comes before the first piece. Idempotent."""

    def put(self, index: int, piece: TextPiece) -> None:
        """Takes the next piece of an output."""


class OutputSink:
    """A `TokenSink`: turns one output's tokens into text and puts that into the reply."""

    def __init__(
        self, index: int, text: TextStream, reply: Reply, *, singly: bool = False, only_prompt: bool = False
    ) -> None:
        """`singly`: the pieces do not depend on which tokens came together. `only_prompt`: tokens are dropped."""
        self._singly = singly
        self._only_prompt = only_prompt
        self._index = index
        self._text = text
        self._reply = reply

    async def begin(self) -> None:
        """Begins the reply."""
        await self._reply.begin()

    def push(self, tokens: Sequence[Token]) -> bool:
        """Takes tokens; True when the output is whole."""
        if self._only_prompt:
            self._reply.put(self._index, TextPiece("", (), "length"))
            return True
        if self._singly and len(tokens) > 1:
            return any(self.push([token]) for token in tokens)
        piece = self._text.push(tokens)
        self._reply.put(self._index, piece)
        return piece.finish_reason is not None


class WholeReply:
    """Owns the text of a response that is sent at once."""

    def __init__(
        self, reply_format: WholeFormat, num_outputs: int, usage: UsageNow, on_begin: Begin | None = None
    ) -> None:
        """`on_begin` is called when the first token is there, and must be idempotent."""
        self._format = reply_format
        self._usage = usage
        self._on_begin = on_begin
        self._pieces: list[list[TextPiece]] = [[] for _ in range(num_outputs)]

    async def begin(self) -> None:
        """Sends nothing before the end by itself."""
        if self._on_begin is not None:
            await self._on_begin()

    def put(self, index: int, piece: TextPiece) -> None:
        """Keeps the text."""
        self._pieces[index].append(piece)

    def body(self, num_choices: int, best_of: int) -> dict[str, Any]:
        """The response, with the best `num_choices` of each prompt's `best_of` outputs. Comes after the last token."""
        outputs = best_outputs([joined(pieces) for pieces in self._pieces], num_choices, best_of)
        return self._format.whole(outputs, self._usage())


class EventReply:
    """Owns the events of a response that nobody reads yet."""

    def __init__(self, reply_format: ReplyFormat, usage: UsageNow, on_events: Callable[[Sequence[Any]], None]) -> None:
        self._format = reply_format
        self._usage = usage
        self._on_events = on_events
        self._has_begun = False

    async def begin(self) -> None:
        """Gives the events that open the response, once."""
        if not self._has_begun:
            self._has_begun = True
            self._on_events(self._format.opening(0))

    def put(self, index: int, piece: TextPiece) -> None:
        """Gives the events of a piece of text."""
        events = self._format.chunks(index, piece)
        if events:
            self._on_events(events)

    def finish(self) -> dict[str, Any]:
        """Gives the last events; returns the response that the very last one carries."""
        closing = self._format.closing(self._usage())
        self._on_events(closing)
        response: dict[str, Any] = closing[-1]["response"]
        return response


class StreamReply:
    """Owns an event stream. It begins with the first token: an error before that is an ordinary response.

    With `ids`, its events have ids, and those that the client has are left out.
    """

    def __init__(self, body: SSEBody, reply_format: ReplyFormat, usage: UsageNow, ids: EventIds | None = None) -> None:
        self._format = reply_format
        self._usage = usage
        self._opened: set[int] = set()
        self._body = body
        self._ids = ids
        self._texts = TextEvents(reply_format)

    @property
    def has_begun(self) -> bool:
        """Whether the response's head is out."""
        return self._body.has_begun

    async def begin(self) -> None:
        """Sends the head, once. Raises ClientGone."""
        await self._body.begin()

    def put(self, index: int, piece: TextPiece) -> None:
        """Sends what became certain. Raises ClientGone."""
        if index in self._opened and self._format.repeats and piece.text and piece.finish_reason is None:
            self._write(index, [self._texts.of(index, piece.text)])
            return
        events = []
        if index not in self._opened:
            self._opened.add(index)
            before = partial(_usage_before, self._usage, len(piece.tokens))
            events += [sse(self._format.frame(chunk, before)) for chunk in self._format.opening(index)]
        events += [sse(self._format.frame(chunk, self._usage)) for chunk in self._format.chunks(index, piece)]
        self._write(index, events)

    async def finish(self, keep: Keep | None = None, after: bytes = b"") -> web.StreamResponse:
        """Sends the usage, if requested, and the end, once `keep` has the response. Raises ClientGone.

        `after` is written behind the end.
        """
        closing = self._format.closing(self._usage())
        if keep is not None:
            await keep(closing[-1]["response"])
        self._write(0, [sse(chunk) for chunk in closing])
        if last := (self._format.end or b"") + after:
            self._body.write(last)
        return await self._body.end()

    async def fail(self, error: HalfmoonError, *, waits: bool) -> web.StreamResponse:
        """Ends a stream that has begun with an error event.

        Raises ClientGone, if it does not wait also for a client that has much unread.
        """
        self._body.write(sse(self._format.failed(error_body(error))))
        return await self._body.end(waits=waits)

    def _write(self, index: int, events: Sequence[bytes]) -> None:
        data = b"".join(events if self._ids is None else self._ids.new(index, events))
        if data:
            self._body.write(data)


def _usage_before(usage: UsageNow, num_tokens: int) -> Usage:
    """The usage so far, without the latest tokens."""
    now = usage()
    return now._replace(completion_tokens=now.completion_tokens - num_tokens)


class TextEvents:
    """Writes events that carry nothing but text, without encoding again what is the same in all of them.

    Owns, for each output, the bytes before and after the text.
    """

    def __init__(self, reply_format: ReplyFormat) -> None:
        self._format = reply_format
        self._around: dict[int, tuple[bytes, bytes]] = {}

    def of(self, index: int, text: str) -> bytes:
        """The event for a text of output `index`, in a format that `repeats`."""
        around = self._around.get(index)
        if around is None:
            around = self._around[index] = self._split(index)
        return b"%b%b%b" % (around[0], encode_basestring_ascii(text).encode(), around[1])

    def _split(self, index: int) -> tuple[bytes, bytes]:
        """Splits an example event at its text, which comes after everything that a client or a model may name."""
        (chunk,) = self._format.chunks(index, TextPiece(_MARK, (), None))
        before, mark, after = sse(self._format.frame(chunk, lambda: _NO_USAGE)).rpartition(_QUOTED_MARK)
        assert mark
        return before, after


def best_outputs(pieces: Sequence[TextPiece], num_choices: int, best_of: int) -> list[Output]:
    """For each prompt, the `num_choices` of its `best_of` outputs with the highest mean logprob, best first."""
    if num_choices == best_of:
        return [Output(index, piece) for index, piece in enumerate(pieces)]
    kept: list[TextPiece] = []
    for start in range(0, len(pieces), best_of):
        kept += sorted(pieces[start : start + best_of], key=_mean_logprob, reverse=True)[:num_choices]
    return [Output(index, piece) for index, piece in enumerate(kept)]


def _mean_logprob(piece: TextPiece) -> float:
    return sum(token.logprob for token in piece.tokens) / max(len(piece.tokens), 1)
