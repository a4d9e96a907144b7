"""CORS (the Fetch standard): the origins whose pages a browser lets use the gateway."""

from __future__ import annotations

from collections.abc import Sequence

from aiohttp import hdrs, web

from services.gateway.http.operator_access import CONTROL_PREFIX
from services.gateway.http.rate_limits import LIMIT_HEADERS
from services.gateway.http.request_ids import HEADER

_METHODS = "GET, POST, DELETE, OPTIONS"
_MAX_AGE_S = "600"
_EXPOSED = ", ".join((HEADER, hdrs.RETRY_AFTER, *LIMIT_HEADERS))


class Cors:
    """Owns the allowed origins; "*" allows all, but not to the control API. Credentials (cookies) are never used."""

    def __init__(self, allowed_origins: Sequence[str]) -> None:
        self._origins = frozenset(allowed_origins)

    def preflight(self, request: web.Request) -> web.Response | None:
        """The response to a browser's preflight request; None if it is not one, or not from an allowed origin."""
        is_preflight = hdrs.ACCESS_CONTROL_REQUEST_METHOD in request.headers
        if request.method != "OPTIONS" or not is_preflight or self._allowed(request) is None:
            return None
        headers = {hdrs.ACCESS_CONTROL_ALLOW_METHODS: _METHODS, hdrs.ACCESS_CONTROL_MAX_AGE: _MAX_AGE_S}
        requested = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS)
        if requested:
            headers[hdrs.ACCESS_CONTROL_ALLOW_HEADERS] = requested
        return web.Response(status=204, headers=headers)

    async def mark(self, request: web.Request, response: web.StreamResponse) -> None:
        """Adds the headers that let the page read `response`, if its origin is allowed."""
        if not self._origins:
            return
        response.headers.add(hdrs.VARY, hdrs.ORIGIN)
        allowed = self._allowed(request)
        if allowed is not None:
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = allowed
            response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = _EXPOSED

    def _allowed(self, request: web.Request) -> str | None:
        origins = request.headers.getall(hdrs.ORIGIN, ())
        if len(origins) != 1:
            return None
        origin = origins[0]
        if "*" in self._origins and not request.path.startswith(CONTROL_PREFIX):
            return "*"
        return origin if origin in self._origins else None
