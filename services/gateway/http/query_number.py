"""Numbers in the query of a look at the control API."""

from __future__ import annotations

from aiohttp import web

from halfmoon.errors import InvalidRequest

_MAX_DIGITS = 9


def query_number(request: web.Request, name: str, default: int, most: int, least: int = 1) -> int:
    """The number of that name. Raises InvalidRequest for what is none, or not within least..most."""
    given = request.query.get(name, str(default))
    is_number = given.isascii() and given.isdigit() and len(given) <= _MAX_DIGITS
    if not is_number or not least <= int(given) <= most:
        raise InvalidRequest(f"{name} must be {least}..{most}", param=name)
    return int(given)
