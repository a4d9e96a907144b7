"""Which QoS classes are in force: those of the ledger, whichever gateway edited them."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

from pydantic import Field, ValidationError

from halfmoon.errors import Incompatible, InvalidRequest
from halfmoon.ledger.classes import ClassesAt, StoredClass, StoredClasses
from halfmoon.policy.admission.admission_controller import AdmissionController
from halfmoon.policy.admission.classes import NO_PROMISES, ClassTable, Degradation, MatchKind, MatchRule, QosClass
from halfmoon.policy.admission.feedback import AdmissionTargets
from services.gateway.control.known_classes import KnownClasses
from services.gateway.openai.strict_model import Items, Part

log = logging.getLogger(__name__)

_MAX_RULES = 256
_MAX_VALUE_CHARS = 1_024
_MAX_HEADER_CHARS = 256
_MAX_TARGET_S = 1e6
_HEADER_NAME = re.compile(r"[-!#$%&'*+.^_`|~0-9A-Za-z]+")  # a token of HTTP: RFC 9110, 5.6.2
_CONTROL = re.compile(r"[\0-\x08\x0a-\x1f\x7f]")
_PATH_STEPS = (".", "..")  # clients take them out of a URL


class RuleBody(Part):
    """`halfmoon.policy.admission.classes.MatchRule`."""

    kind: MatchKind
    value: str = Field(max_length=_MAX_VALUE_CHARS)
    header: str = Field("", max_length=_MAX_HEADER_CHARS)


class ClassBody(Part):
    """`halfmoon.policy.admission.classes.QosClass`, whose docstring is the law, and the version that it replaces."""

    version: int = Field(0, ge=0, lt=1 << 31)  # 0: there is none
    priority: int = Field(0, ge=-1_000, le=1_000)
    reserved: float = 0.0
    ttft_s: float | None = Field(None, le=_MAX_TARGET_S)
    tbt_s: float | None = Field(None, le=_MAX_TARGET_S)
    attainment: float = 0.9
    rules: Annotated[Items[RuleBody], Field(max_length=_MAX_RULES)] = Field(default_factory=list)
    degradation: Items[Degradation] = Field(default_factory=list)
    capped_tokens: int = Field(NO_PROMISES.capped_tokens, lt=1 << 31)


class ActiveClasses:
    """Owns which of the ledger's classes the gatekeeper has. One edit or look at the ledger at a time."""

    def __init__(self, stored: StoredClasses, gatekeeper: AdmissionController, known: KnownClasses) -> None:
        self._stored = stored
        self._known = known
        self._gatekeeper = gatekeeper
        self._turn = asyncio.Lock()
        self._revision: int | None = None

    async def refresh(self) -> None:
        """Takes over what others edited. Raises Unavailable, and Incompatible for classes of a later release."""
        async with self._turn:
            if self._revision is None or await self._stored.revision() != self._revision:
                self._show(await self._stored.all())

    def use_known(self) -> None:
        """Those that were in force on this host last, until the ledger answers. Raises Incompatible."""
        found = self._known.read()
        self._gatekeeper.classes = _table(found)
        log.warning("classes.known", extra={"num_classes": len(found)})

    async def all(self) -> Sequence[StoredClass]:
        """As the ledger has them. Raises Unavailable."""
        return (await self._stored.all()).classes

    async def put(self, name: str, body: ClassBody) -> StoredClass:
        """Raises InvalidRequest, VersionConflict or Unavailable; nothing has changed then."""
        _check_reachable(name, body)
        definition = body.model_dump(mode="json", exclude={"version"})
        async with self._turn:
            self._show(await self._stored.put(name, definition, body.version, _table))
        return StoredClass(name, body.version + 1, definition)

    async def check(self, name: str, body: ClassBody) -> AdmissionTargets:
        """The targets in force under that name. Raises InvalidRequest where `put` would refuse the class."""
        _check_reachable(name, body)
        definition = body.model_dump(mode="json", exclude={"version"})
        others = [one for one in await self.all() if one.name != name]
        _table([*others, StoredClass(name, body.version + 1, definition)])
        present = next((one for one in self._gatekeeper.classes.classes if one.name == name), NO_PROMISES)
        return AdmissionTargets(present.ttft_s, present.tbt_s)

    def applied(self, name: str) -> dict[str, float | None]:
        """The class's targets as admission applies them here now, and what was measured where it has tightened them."""
        qos = next((one for one in self._gatekeeper.classes.classes if one.name == name), NO_PROMISES)
        targets, why = self._gatekeeper.applied(qos), self._gatekeeper.tightenings(qos)
        ttft, tbt = why.get("ttft"), why.get("tbt")
        return {
            "applied_ttft_s": targets.ttft_s,
            "applied_tbt_s": targets.tbt_s,
            "measured_ttft_s": ttft and ttft.measured_s,
            "measured_tbt_s": tbt and tbt.measured_s,
        }

    async def remove(self, name: str, version: int) -> None:
        """Raises VersionConflict or Unavailable; nothing has changed then."""
        async with self._turn:
            self._show(await self._stored.remove(name, version, _table))

    def _show(self, found: ClassesAt) -> None:
        self._gatekeeper.classes = _table(found.classes)
        if self._revision != found.revision:
            self._known.write(found.classes)
            log.info("classes.changed", extra={"revision": found.revision, "num_classes": len(found.classes)})
        self._revision = found.revision


def _table(stored: Sequence[StoredClass]) -> ClassTable:
    return ClassTable(map(_class_of, stored))


def _class_of(stored: StoredClass) -> QosClass:
    body = _body_of(stored.name, stored.definition)
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


def _body_of(name: str, definition: dict[str, Any]) -> ClassBody:
    try:
        return ClassBody.model_validate(definition)
    except ValidationError as error:
        raise Incompatible(
            f"class {name} of the ledger is of a release that this one does not know: {error}"
        ) from error


def _check_reachable(name: str, body: ClassBody) -> None:
    """Raises InvalidRequest for a name that no URL says well, and for rules that hold of no request.

    Only edits are held to it: what the ledger has of an earlier release stays in force.
    """
    if name != name.strip() or name in _PATH_STEPS:
        raise InvalidRequest("a class's name must not begin or end with a space, nor be . or ..", param="name")
    for index, rule in enumerate(body.rules):
        if rule.kind == "header" and rule.header and not _HEADER_NAME.fullmatch(rule.header):
            _refuse_rule(index, "header", "is not the name of an HTTP header")
        if rule.kind != "model" and (rule.value != rule.value.strip() or _CONTROL.search(rule.value)):
            _refuse_rule(index, "value", "holds of no request: HTTP strips spaces, and knows no control characters")


def _refuse_rule(index: int, part: str, problem: str) -> NoReturn:
    param = f"rules[{index}].{part}"
    raise InvalidRequest(f"{param} {problem}", param=param)
