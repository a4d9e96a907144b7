"""The two ways a request is answered: one JSON object, or server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any, Protocol

from aiohttp import web

from halfmoon.errors import HalfmoonError
from halfmoon.pb.types_pb2 import Token
from services.gateway.choices import Choice, Choices, best_outputs
from services.gateway.errors_http import error_body
from services.gateway.shape import Shape
from services.gateway.text_stream import TextPiece, joined

_SSE_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}


class ClientGone(Exception):
    """The connection broke while a response was being written."""


class TakesPieces(Protocol):
    """What both replies are to a choice."""

    async def put(self, index: int, piece: TextPiece) -> None:
        """Takes the next piece of a choice."""
        ...


class ChoiceSink:
    """A `TokenSink`: one choice's tokens become text and go into the reply."""

    def __init__(self, choice: Choice, reply: TakesPieces) -> None:
        self._choice = choice
        self._reply = reply

    async def push(self, tokens: Sequence[Token]) -> bool:
        """True when the choice is whole."""
        piece = self._choice.text.push(tokens)
        await self._reply.put(self._choice.index, piece)
        return piece.finish_reason is not None


class WholeReply:
    """Owns the text of a response that is sent at once."""

    def __init__(self, shape: Shape, choices: Choices) -> None:
        self._shape = shape
        self._choices = choices
        self._pieces: list[list[TextPiece]] = [[] for _ in choices.all]

    async def put(self, index: int, piece: TextPiece) -> None:
        """Keeps the text."""
        self._pieces[index].append(piece)

    async def finish(self, num_choices: int, best_of: int) -> web.Response:
        """The response, after the last token: of each prompt's `best_of` outputs the best `num_choices`."""
        outputs = best_outputs([joined(pieces) for pieces in self._pieces], num_choices, best_of)
        return web.json_response(self._shape.whole(outputs, self._choices.usage))


class StreamReply:
    """Owns an event stream. It begins with the first token: an error before that is an ordinary response."""

    def __init__(self, request: web.Request, shape: Shape, choices: Choices) -> None:
        self._request = request
        self._shape = shape
        self._choices = choices
        self._opened: set[int] = set()
        self._response = web.StreamResponse(headers=_SSE_HEADERS)
        self._writing = asyncio.Lock()  # several choices write

    @property
    def has_begun(self) -> bool:
        """Whether the response's head is out."""
        return self._response.prepared

    async def put(self, index: int, piece: TextPiece) -> None:
        """Sends what became certain. Raises ClientGone."""
        chunks = []
        if index not in self._opened:
            self._opened.add(index)
            chunks += self._shape.opening(index)
        chunks += self._shape.chunks(index, piece)
        await self._send([self._shape.frame(chunk, lambda: self._choices.usage) for chunk in chunks])

    async def finish(self) -> web.StreamResponse:
        """Sends the usage, if asked for, and the end."""
        await self._send(self._shape.closing(self._choices.usage), end=self._shape.end)
        return self._response

    async def fail(self, error: HalfmoonError) -> web.StreamResponse:
        """Ends a stream that has begun with an error event."""
        await self._send([self._shape.failed(error_body(error))])
        return self._response

    async def _send(self, events: Sequence[dict[str, Any]], end: bytes = b"") -> None:
        data = b"".join(map(_sse, events)) + end
        try:
            async with self._writing:
                if not self.has_begun:
                    await self._response.prepare(self._request)
                if data:
                    await self._response.write(data)
        except ConnectionError as error:
            raise ClientGone from error


def _sse(event: dict[str, Any]) -> bytes:
    """An event that has a type is named by it."""
    name = b"event: %b\n" % event["type"].encode() if "type" in event else b""
    return b"%bdata: %b\n\n" % (name, json.dumps(event, separators=(",", ":")).encode())
