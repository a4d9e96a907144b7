"""The body of an event stream, or of another response that begins before its end, as bytes on the connection."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from aiohttp import HttpVersion11, web

_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
_MAX_UNREAD_BYTES = 16 << 20  # a client that leaves more unread is disconnected
_LAST_READ_S = 60.0  # for a client to read the rest once all is written


class ClientGone(Exception):
    """The connection broke while a response was being written, or the client stopped reading."""


def sse(event: dict[str, Any]) -> bytes:
    """The bytes of one event, which is named by its type if it has one."""
    name = b"event: %b\n" % event["type"].encode() if "type" in event else b""
    return b"%bdata: %b\n\n" % (name, json.dumps(event, separators=(",", ":")).encode())


class SSEBody:
    """Owns a streamed response from its head to its last byte.

    In between it writes to the connection directly and never waits: aiohttp's own way takes five calls and as many
    coroutines, more than everything else that is done for a token.
    """

    def __init__(
        self, request: web.Request, headers: Mapping[str, str] = _HEADERS, *, outlives_client: bool = False
    ) -> None:
        """`outlives_client`: what is written after the client has gone is dropped, and only `end` notices."""
        self._request = request
        self._outlives_client = outlives_client
        self._response = web.StreamResponse(headers=headers)
        self._is_chunked = request.version >= HttpVersion11
        if self._is_chunked:
            self._response.enable_chunked_encoding()
        else:
            self._response.force_close()  # such a client finds the end of the body in no other way
        self._begin_lock = asyncio.Lock()  # several outputs begin

    @property
    def has_begun(self) -> bool:
        """Whether the response's head is out."""
        return self._response.prepared

    async def begin(self) -> None:
        """Sends the head, once. Raises ClientGone."""
        async with self._begin_lock:
            if self.has_begun:
                return
            try:
                await self._response.prepare(self._request)
            except ConnectionError as error:
                raise ClientGone from error

    def write(self, data: bytes) -> None:
        """Sends data that is not empty, as fast as the client reads, and buffers the rest. Raises ClientGone."""
        transport = self._request.transport
        is_gone = transport is None or transport.is_closing()
        if transport is not None and not is_gone and transport.get_write_buffer_size() > _MAX_UNREAD_BYTES:
            transport.abort()
            is_gone = True
        if transport is not None and not is_gone:
            transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)
        elif not self._outlives_client:
            raise ClientGone

    async def end(self, *, waits: bool = True) -> web.StreamResponse:
        """Waits until the client has read nearly everything, or cuts it off if it has not. Raises ClientGone."""
        try:
            async with asyncio.timeout(_LAST_READ_S if waits else 0.0):
                await self._response.write_eof()
        except (ConnectionError, TimeoutError) as error:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ClientGone from error
        return self._response
