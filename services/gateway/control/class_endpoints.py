"""The control API's QoS classes: kept in the ledger, editable at any time, in force from the next request on."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from halfmoon.errors import InvalidRequest
from halfmoon.ledger.edits.stored_classes import StoredClass
from services.gateway.control.active_classes import ActiveClasses, ClassBody
from services.gateway.http.received_request import receive_body
from services.gateway.openai.bodies.parse_body import parse_body

_MAX_VALUES = 2_000  # of a class's body
_MAX_DIGITS = 9
_MAX_NAME_CHARS = 64


class ClassEndpoints:
    """Serves the classes. Owns nothing."""

    def __init__(self, classes: ActiveClasses) -> None:
        self._classes = classes

    async def list(self, request: web.Request) -> web.Response:
        """GET /halfmoon/v1/classes: every class with its version, and its targets as this gateway applies them."""
        classes = await self._classes.all()
        shown = [{**_shown(stored), **self._classes.applied(stored.name)} for stored in classes]
        return web.json_response({"classes": shown})

    async def put(self, request: web.Request) -> web.Response:
        """PUT /halfmoon/v1/classes/{name}: the whole class, and the version that it replaces.

        Raises InvalidRequest, VersionConflict or Unavailable; nothing has changed then.
        """
        name = _name(request)
        body = parse_body(ClassBody, await receive_body(request), _MAX_VALUES)
        return web.json_response(_shown(await self._classes.put(name, body)))

    async def delete(self, request: web.Request) -> web.Response:
        """DELETE /halfmoon/v1/classes/{name}?version=3. Raises InvalidRequest, VersionConflict or Unavailable."""
        await self._classes.remove(_name(request), version_of(request.query.get("version", "")))
        return web.Response(status=204)


def _name(request: web.Request) -> str:
    name = request.match_info["name"]
    if not (name.isprintable() and len(name) <= _MAX_NAME_CHARS):
        raise InvalidRequest(f"a class's name has at most {_MAX_NAME_CHARS} characters, all printable", param="name")
    return name


def version_of(given: str) -> int:
    """The version in a query. Raises InvalidRequest."""
    if not (given.isascii() and given.isdigit() and len(given) <= _MAX_DIGITS):
        raise InvalidRequest("version must be that of what is to be deleted", param="version")
    return int(given)


def _shown(stored: StoredClass) -> dict[str, Any]:
    return {"name": stored.name, "version": stored.version, **stored.definition}
