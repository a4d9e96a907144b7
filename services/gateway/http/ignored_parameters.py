"""Tells a client which of its parameters did nothing: a header of the response names them."""

from __future__ import annotations

from aiohttp import web

HEADER = "Warning"

_IGNORED = web.RequestKey("ignored_parameters", tuple)


def note_ignored(request: web.Request, names: tuple[str, ...]) -> None:
    """Remembers parameters of a request that do nothing here."""
    request[_IGNORED] = names


async def mark_ignored(request: web.Request, response: web.StreamResponse) -> None:
    """Names them in the response's header."""
    if names := request.get(_IGNORED):
        response.headers[HEADER] = f'299 halfmoon "ignored: {", ".join(names)}"'
