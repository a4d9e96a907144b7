"""What is read from an HTTP request: the uncompressed bytes of its body, and numbers of its query."""

from __future__ import annotations

import asyncio
import zlib

from aiohttp import web

from halfmoon.errors import InvalidRequest
from services.gateway.http.error_responses import shortened

_MOST_RECEIVING_S = 120.0  # aiohttp waits forever
_MAX_DIGITS = 9  # of a number in a query
_GZIP_OR_ZLIB = zlib.MAX_WBITS | 32  # zlib looks at the header


async def receive_body(request: web.Request, within_s: float = _MOST_RECEIVING_S) -> bytes:
    """The whole body. Raises InvalidRequest for one that breaks off or is not encoded as its header says.

    Raises HTTPRequestTimeout for a body that takes longer than `within_s`, HTTPUnsupportedMediaType for an unknown
    encoding, and HTTPRequestEntityTooLarge for too many bytes, compressed or not. The application must be set not to
    decompress by itself: aiohttp's errors have another shape.
    """
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ("identity", "gzip", "x-gzip", "deflate"):
        reason = f"the Content-Encoding {shortened(encoding)!r} is not supported; gzip, deflate and identity are"
        raise web.HTTPUnsupportedMediaType(text=reason)
    try:
        async with asyncio.timeout(within_s):
            raw = await request.read()
    except TimeoutError as error:
        raise web.HTTPRequestTimeout(text=f"the body was not whole within {within_s:g} s") from error
    except web.HTTPRequestEntityTooLarge as error:
        raise _too_large(request.client_max_size) from error
    except (web.RequestPayloadError, ConnectionError) as error:
        raise InvalidRequest("the body could not be read") from error
    if encoding == "identity":
        return raw
    return await asyncio.to_thread(_decompressed, raw, encoding, request.client_max_size)


def _decompressed(raw: bytes, encoding: str, max_bytes: int) -> bytes:
    """Unpacks at most one byte more than allowed."""
    is_bare = encoding == "deflate" and raw[:1] and raw[0] & 0xF != zlib.DEFLATED  # many clients omit the header
    unpacker = zlib.decompressobj(-zlib.MAX_WBITS if is_bare else _GZIP_OR_ZLIB)
    try:
        body = unpacker.decompress(raw, max_bytes + 1)
    except zlib.error as error:
        raise InvalidRequest(f"the body is not {encoding} as its Content-Encoding says: {error}") from error
    if len(body) > max_bytes:
        raise _too_large(max_bytes)
    if not unpacker.eof or unpacker.unused_data:
        raise InvalidRequest(f"the body is not one whole {encoding} stream as its Content-Encoding says")
    return body


def _too_large(max_bytes: int) -> web.HTTPRequestEntityTooLarge:
    return web.HTTPRequestEntityTooLarge(max_bytes, text=f"the body is larger than {max_bytes} bytes")


def query_number(request: web.Request, name: str, default: int, most: int, least: int = 1) -> int:
    """The number of this name in the query. Raises InvalidRequest unless it is a number within least..most."""
    given = request.query.get(name, str(default))
    is_number = given.isascii() and given.isdigit() and len(given) <= _MAX_DIGITS
    if not is_number or not least <= int(given) <= most:
        raise InvalidRequest(f"{name} must be {least}..{most}", param=name)
    return int(given)
