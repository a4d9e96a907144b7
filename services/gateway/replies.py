"""The two ways a request is answered: one JSON object, or server-sent events. Both are `TokenSink`s."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from halfmoon.errors import HalfmoonError
from halfmoon.pb.types_pb2 import Token
from services.gateway.errors_http import error_body
from services.gateway.progress import Progress
from services.gateway.responses import Shape, usage_of
from services.gateway.text_stream import TextPiece, TextStream, joined

_SSE_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}


class ClientGone(Exception):
    """The connection broke while a response was being written."""


class WholeReply:
    """Owns the text of a response that is sent at once."""

    def __init__(self, shape: Shape, text_stream: TextStream) -> None:
        self._shape = shape
        self._text_stream = text_stream
        self._pieces: list[TextPiece] = []

    async def push(self, tokens: Sequence[Token]) -> bool:
        """Keeps the text."""
        piece = self._text_stream.push(tokens)
        self._pieces.append(piece)
        return piece.finish_reason is not None

    async def finish(self, progress: Progress) -> web.Response:
        """The response, after the last token."""
        usage = usage_of(progress.prompt_tokens, progress.cached_tokens, self._text_stream.num_tokens)
        return web.json_response(self._shape.whole(joined(self._pieces), usage))


class StreamReply:
    """Owns an event stream. It begins with the first token: an error before that is an ordinary response."""

    def __init__(self, request: web.Request, shape: Shape, text_stream: TextStream, with_usage: bool) -> None:
        self._request = request
        self._shape = shape
        self._text_stream = text_stream
        self._with_usage = with_usage
        self._response = web.StreamResponse(headers=_SSE_HEADERS)

    @property
    def has_begun(self) -> bool:
        """Whether the response's head is out."""
        return self._response.prepared

    async def push(self, tokens: Sequence[Token]) -> bool:
        """Sends what became certain. Raises ClientGone."""
        chunks = [] if self.has_begun else [self._shape.opening()]
        piece = self._text_stream.push(tokens)
        chunks += self._shape.chunks(piece)
        await self._send([self._with_null_usage(chunk) for chunk in chunks if chunk is not None])
        return piece.finish_reason is not None

    async def finish(self, progress: Progress) -> web.StreamResponse:
        """Sends the usage, if asked for, and the end."""
        usage = usage_of(progress.prompt_tokens, progress.cached_tokens, self._text_stream.num_tokens)
        await self._send([self._shape.usage_chunk(usage)] if self._with_usage else [], end=b"data: [DONE]\n\n")
        return self._response

    async def fail(self, error: HalfmoonError) -> web.StreamResponse:
        """Ends a stream that has begun with an error event."""
        await self._send([error_body(error)])
        return self._response

    def _with_null_usage(self, chunk: dict[str, Any]) -> dict[str, Any]:
        return {**chunk, "usage": None} if self._with_usage else chunk

    async def _send(self, events: Sequence[dict[str, Any]], end: bytes = b"") -> None:
        try:
            if not self.has_begun:
                await self._response.prepare(self._request)
            data = b"".join(b"data: %b\n\n" % json.dumps(one, separators=(",", ":")).encode() for one in events) + end
            if data:
                await self._response.write(data)
        except ConnectionError as error:
            raise ClientGone from error
