"""The control API's QoS classes: kept in the ledger, edited while the gateway runs, in force with the next request."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Annotated, Any

from aiohttp import web
from pydantic import Field

from halfmoon.errors import InvalidRequest
from halfmoon.ledger.classes import StoredClass, StoredClasses
from halfmoon.policy.classes import NO_PROMISES, ClassTable, Degradation, MatchKind, MatchRule, QosClass
from halfmoon.policy.gatekeeper import Gatekeeper
from services.gateway.received_body import receive_body
from services.gateway.request_body import parse_body
from services.gateway.strict_part import Items, Part

_MAX_VALUES = 2_000  # of a class's body
_MAX_RULES = 256
_MAX_DIGITS = 9


class RuleBody(Part):
    """`halfmoon.policy.classes.MatchRule`."""

    kind: MatchKind
    value: str
    header: str = ""


class ClassBody(Part):
    """`halfmoon.policy.classes.QosClass`, whose docstring is the law, and the version that it replaces."""

    version: int = Field(0, ge=0)  # 0: there is none
    priority: int = Field(0, ge=-1_000, le=1_000)
    reserved: float = 0.0
    ttft_s: float | None = None
    tbt_s: float | None = None
    attainment: float = 0.9
    rules: Annotated[Items[RuleBody], Field(max_length=_MAX_RULES)] = Field(default_factory=list)
    degradation: Items[Degradation] = Field(default_factory=list)
    capped_tokens: int = NO_PROMISES.capped_tokens


class ClassEndpoints:
    """Owns which of the ledger's classes are in force. One edit at a time."""

    def __init__(self, stored: StoredClasses, gatekeeper: Gatekeeper) -> None:
        self._stored = stored
        self._gatekeeper = gatekeeper
        self._edit = asyncio.Lock()

    async def load(self) -> None:
        """Puts the ledger's classes in force. Raises Unavailable when its database does not answer."""
        self._gatekeeper.classes = _table(await self._stored.all())

    async def list(self, request: web.Request) -> web.Response:
        """GET /halfmoon/v1/classes: every class with its version."""
        return web.json_response({"classes": [_shown(one) for one in await self._stored.all()]})

    async def put(self, request: web.Request) -> web.Response:
        """PUT /halfmoon/v1/classes/{name}: the whole class, and the version that it replaces.

        Raises InvalidRequest, VersionConflict or Unavailable; then nothing has changed.
        """
        name = request.match_info["name"]
        body = parse_body(ClassBody, await receive_body(request), _MAX_VALUES)
        definition = body.model_dump(mode="json", exclude={"version"})
        async with self._edit:
            others = [one for one in await self._stored.all() if one.name != name]
            new = StoredClass(name, body.version, definition)
            table = _table([*others, new])
            new = new._replace(version=await self._stored.put(name, definition, body.version))
            self._gatekeeper.classes = table
        return web.json_response(_shown(new))

    async def delete(self, request: web.Request) -> web.Response:
        """DELETE /halfmoon/v1/classes/{name}?version=3. Raises InvalidRequest, VersionConflict or Unavailable."""
        version = _version(request.query.get("version", ""))
        async with self._edit:
            await self._stored.remove(request.match_info["name"], version)
            await self.load()
        return web.Response(status=204)


def _table(stored: Iterable[StoredClass]) -> ClassTable:
    return ClassTable(_class_of(one) for one in stored)


def _class_of(stored: StoredClass) -> QosClass:
    body = ClassBody.model_validate(stored.definition)
    return QosClass(
        stored.name,
        body.priority,
        body.reserved,
        body.ttft_s,
        body.tbt_s,
        body.attainment,
        tuple(MatchRule(rule.kind, rule.value, rule.header) for rule in body.rules),
        tuple(body.degradation),
        body.capped_tokens,
    )


def _version(given: str) -> int:
    if not (given.isascii() and given.isdigit() and len(given) <= _MAX_DIGITS):
        raise InvalidRequest("version must be that of the class which is to go", param="version")
    return int(given)


def _shown(stored: StoredClass) -> dict[str, Any]:
    return {"name": stored.name, "version": stored.version, **stored.definition}
