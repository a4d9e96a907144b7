"""The ids that a client may give its request: for the log, and so that a repeat of it goes on where it was."""

from __future__ import annotations

import re
import secrets
from hashlib import blake2b

from aiohttp import hdrs, web

from halfmoon.errors import InvalidRequest

HEADER = "X-Request-Id"
LAST_EVENT_HEADER = "Last-Event-ID"
IDEMPOTENCY_HEADER = "Idempotency-Key"
OFFERED_ID_HEADER = "X-Halfmoon-Request-Id"  # of another gateway's request: for the log, not for repeats

_REQUEST_ID = web.RequestKey("request_id", str)
_OUTSIDE = re.compile(r"[^A-Za-z0-9._-]+")
_MAX_CHARS = 64
_DIGEST_BYTES = 16


class ReusedKey(InvalidRequest):
    """The idempotency key came with another body a moment ago."""

    def __init__(self) -> None:
        super().__init__(
            f"this {IDEMPOTENCY_HEADER} came with another body a moment ago; choose a new key for a new request",
            param=IDEMPOTENCY_HEADER,
        )


def request_id_of(request: web.Request) -> str:
    """The request's id; of one that was refused before the application saw it, a new one."""
    return request[_REQUEST_ID] if _REQUEST_ID in request else assign_request_id(request)


def assign_request_id(request: web.Request) -> str:
    """Assigns the client's id, reduced to safe characters, or a random one."""
    names = (HEADER, IDEMPOTENCY_HEADER, OFFERED_ID_HEADER)
    given = next((text for name in names if (text := request.headers.get(name))), "")
    request[_REQUEST_ID] = _OUTSIDE.sub("", given)[:_MAX_CHARS] or secrets.token_hex(12)
    return request[_REQUEST_ID]


def is_repeatable(request: web.Request) -> bool:
    """Whether the client gave an id."""
    return bool(request.headers.get(IDEMPOTENCY_HEADER) or request.headers.get(HEADER))


def is_meant_for_repeats(request: web.Request) -> bool:
    """Whether the client asks for repeats, or its id may be one that a proxy gives to each request."""
    return IDEMPOTENCY_HEADER in request.headers or LAST_EVENT_HEADER in request.headers


def repeat_key(request: web.Request, body_digest: bytes) -> bytes:
    """The digest by which a repeat of this request is recognized: of the client's id and its API key.

    `X-Request-Id` often names a whole trace, so with that alone the body is a part of the key.
    """
    idempotency_key = request.headers.get(IDEMPOTENCY_HEADER)
    own = ("key", idempotency_key) if idempotency_key else (body_digest.hex(), request.headers.get(HEADER, ""))
    return digest(request.headers.get(hdrs.AUTHORIZATION, ""), *own)


def digest(*texts: str) -> bytes:
    """A short digest of several texts."""
    state = blake2b(digest_size=_DIGEST_BYTES)
    for text in texts:
        encoded = text.encode(errors="surrogateescape")
        state.update(len(encoded).to_bytes(8, "little") + encoded)
    return state.digest()
