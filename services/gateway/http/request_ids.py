"""The request id: the client may choose it, and it travels to every worker and log line."""

from __future__ import annotations

import re
import secrets

from aiohttp import web

HEADER = "X-Request-Id"

_REQUEST_ID = web.RequestKey("request_id", str)
_OUTSIDE = re.compile(r"[^A-Za-z0-9._-]+")
_MAX_CHARS = 64


def request_id_of(request: web.Request) -> str:
    """The request's id; of one that was refused before the application saw it, a new one."""
    return request[_REQUEST_ID] if _REQUEST_ID in request else assign_request_id(request)


def assign_request_id(request: web.Request) -> str:
    """Assigns the client's id, reduced to safe characters, or a random one."""
    given = _OUTSIDE.sub("", request.headers.get(HEADER, ""))[:_MAX_CHARS]
    request[_REQUEST_ID] = given or secrets.token_hex(12)
    return request[_REQUEST_ID]
