"""The two ways a request is answered: one JSON object, or server-sent events."""

from __future__ import annotations

from collections.abc import Sequence
from json.encoder import encode_basestring_ascii
from typing import Any, Protocol

from aiohttp import web

from halfmoon.errors import HalfmoonError
from halfmoon.pb.types_pb2 import Token
from services.gateway.http.error_responses import error_body
from services.gateway.replies.event_body import EventBody, sse
from services.gateway.replies.reply_format import ReplyFormat, Usage
from services.gateway.replies.text_stream import TextPiece, joined
from services.gateway.routing.choices import Choice, Choices, best_outputs

_MARK = "\0"
_QUOTED_MARK = encode_basestring_ascii(_MARK).encode()
_NO_USAGE = Usage(0, 0, 0)


class TakesPieces(Protocol):
    """What both replies are to a choice."""

    async def begin(self) -> None:
        """Comes before the first piece; again, it does nothing."""
        ...

    def put(self, index: int, piece: TextPiece) -> None:
        """Takes the next piece of a choice."""
        ...


class ChoiceSink:
    """A `TokenSink`: one choice's tokens become text and go into the reply."""

    def __init__(self, choice: Choice, reply: TakesPieces) -> None:
        self._choice = choice
        self._reply = reply

    async def begin(self) -> None:
        """The reply begins."""
        await self._reply.begin()

    def push(self, tokens: Sequence[Token]) -> bool:
        """True when the choice is whole."""
        piece = self._choice.text.push(tokens)
        self._reply.put(self._choice.index, piece)
        return piece.finish_reason is not None


class WholeReply:
    """Owns the text of a response that is sent at once."""

    def __init__(self, shape: ReplyFormat, choices: Choices) -> None:
        self._shape = shape
        self._choices = choices
        self._pieces: list[list[TextPiece]] = [[] for _ in choices.all]

    async def begin(self) -> None:
        """Nothing is sent before the end."""

    def put(self, index: int, piece: TextPiece) -> None:
        """Keeps the text."""
        self._pieces[index].append(piece)

    async def finish(self, num_choices: int, best_of: int) -> web.Response:
        """The response, after the last token: of each prompt's `best_of` outputs the best `num_choices`."""
        outputs = best_outputs([joined(pieces) for pieces in self._pieces], num_choices, best_of)
        return web.json_response(self._shape.whole(outputs, self._choices.usage))


class StreamReply:
    """Owns an event stream. It begins with the first token: an error before that is an ordinary response."""

    def __init__(self, request: web.Request, shape: ReplyFormat, choices: Choices) -> None:
        self._shape = shape
        self._choices = choices
        self._opened: set[int] = set()
        self._body = EventBody(request)
        self._texts = TextEvents(shape)

    @property
    def has_begun(self) -> bool:
        """Whether the response's head is out."""
        return self._body.has_begun

    async def begin(self) -> None:
        """Sends the head, once. Raises ClientGone."""
        await self._body.begin()

    def put(self, index: int, piece: TextPiece) -> None:
        """Sends what became certain. Raises ClientGone."""
        if index in self._opened and self._shape.repeats and piece.text and piece.finish_reason is None:
            self._body.write(self._texts.of(index, piece.text))
            return
        opening = [] if index in self._opened else self._shape.opening(index)
        self._opened.add(index)
        chunks = [*opening, *self._shape.chunks(index, piece)]
        self._write([self._shape.frame(chunk, lambda: self._choices.usage) for chunk in chunks])

    async def finish(self) -> web.StreamResponse:
        """Sends the usage, if asked for, and the end. Raises ClientGone."""
        self._write(self._shape.closing(self._choices.usage), self._shape.end)
        return await self._body.end()

    async def fail(self, error: HalfmoonError) -> web.StreamResponse:
        """Ends a stream that has begun with an error event. Raises ClientGone."""
        self._write([self._shape.failed(error_body(error))])
        return await self._body.end()

    def _write(self, events: Sequence[dict[str, Any]], end: bytes = b"") -> None:
        data = b"".join(map(sse, events)) + end
        if data:
            self._body.write(data)


class TextEvents:
    """Owns, for each choice, what comes before and after the text in its events."""

    def __init__(self, shape: ReplyFormat) -> None:
        self._shape = shape
        self._around: dict[int, tuple[bytes, bytes]] = {}

    def of(self, index: int, text: str) -> bytes:
        """The event of a text of choice `index`, for a shape that `repeats`."""
        around = self._around.get(index)
        if around is None:
            around = self._around[index] = self._split(index)
        return b"%b%b%b" % (around[0], encode_basestring_ascii(text).encode(), around[1])

    def _split(self, index: int) -> tuple[bytes, bytes]:
        """By an example: the text comes after all else that a client or a model may have named."""
        (chunk,) = self._shape.chunks(index, TextPiece(_MARK, (), (), None))
        before, mark, after = sse(self._shape.frame(chunk, lambda: _NO_USAGE)).rpartition(_QUOTED_MARK)
        assert mark
        return before, after
