"""The QoS classes in force: those of the ledger, which every gateway may edit."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field, ValidationError

from halfmoon.config.qos_classes import DEFAULT_TARGETS, ClassConfig, check_classes, check_reachable
from halfmoon.ledger.edits.declared_classes import Declaration
from halfmoon.ledger.edits.stored_classes import ClassesAt, LaterRelease, StoredClass, StoredClasses
from halfmoon.policy.admission.admission_controller import AdmissionController
from halfmoon.policy.admission.qos_classes import (
    DEFAULT_CLASS,
    NO_PROMISES,
    ClassTable,
    QosClass,
)
from halfmoon.policy.values import AdmissionTargets
from services.gateway.control.known_rows import KnownRows
from services.gateway.openai.bodies.strict_model import Part
from services.gateway.settings import GatewaySettings

log = logging.getLogger(__name__)


class ClassBody(Part, ClassConfig):
    """The fields of `policy.admission.qos_classes.QosClass`, which documents them, and the version replaced."""

    version: int = Field(0, ge=0, lt=1 << 31)  # 0: the class is new


class ActiveClasses:
    """Owns which of the ledger's classes the admission controller uses. Edits and reads of the ledger take turns."""

    def __init__(
        self,
        stored: StoredClasses,
        admission: AdmissionController,
        known: KnownRows,
        declarations: Mapping[str, Declaration] | None = None,
    ) -> None:
        """`declarations` are written to the ledger at the first read of it."""
        self._stored = stored
        self._declarations: Mapping[str, Declaration] | None = declarations or {}  # None: written
        self._known = known
        self._admission = admission
        self._turn = asyncio.Lock()
        self._revision: int | None = None

    async def refresh(self) -> None:
        """Applies other gateways' edits. Raises Unavailable, and LaterRelease for classes of a later release."""
        async with self._turn:
            if self._declarations is not None:
                self._apply(await self._stored.declare(self._declarations, _table))
                self._declarations = None
            elif await self._stored.revision() != self._revision:
                self._apply(await self._stored.all())

    def use_known(self) -> None:
        """Applies the classes last in force on this host, or else the declared ones, until the ledger answers.

        Does nothing if it has answered here. Raises LaterRelease, and InvalidRequest for a damaged file.
        """
        if self._revision is not None:
            return
        declared = [
            StoredClass(name, 0, declaration.definition) for name, declaration in (self._declarations or {}).items()
        ]
        known = self._known.read(lambda fields: StoredClass(*fields)) or declared
        self._admission.classes = _table(known)
        log.warning("classes.known", extra={"num_classes": len(known)})

    async def all(self) -> Sequence[StoredClass]:
        """The classes in the ledger. Raises Unavailable."""
        return (await self._stored.all()).classes

    async def put(self, name: str, body: ClassBody) -> StoredClass:
        """Adds or replaces a class. Raises InvalidRequest, VersionConflict or Unavailable; nothing has changed then."""
        check_reachable(name, body)
        definition = body.model_dump(mode="json", exclude={"version"})
        async with self._turn:
            self._apply(await self._stored.put(name, definition, body.version, _table))
        return StoredClass(name, body.version + 1, definition)

    async def check(self, name: str, body: ClassBody) -> AdmissionTargets:
        """The targets in force under this name. Raises InvalidRequest if `put` would refuse the class."""
        check_reachable(name, body)
        definition = body.model_dump(mode="json", exclude={"version"})
        others = [stored for stored in await self.all() if stored.name != name]
        _table([*others, StoredClass(name, body.version + 1, definition)])
        present = next((qos for qos in self._admission.classes.classes if qos.name == name), NO_PROMISES)
        return AdmissionTargets(present.ttft_s, present.tbt_s)

    def applied(self, name: str) -> dict[str, float | None]:
        """The class's targets as admission applies them here now, and the measured latency behind tightened ones."""
        qos = next((qos for qos in self._admission.classes.classes if qos.name == name), NO_PROMISES)
        targets, tightenings = self._admission.applied(qos), self._admission.tightenings(qos)
        ttft, tbt = tightenings.get("ttft"), tightenings.get("tbt")
        return {
            "applied_ttft_s": targets.ttft_s,
            "applied_tbt_s": targets.tbt_s,
            "measured_ttft_s": ttft and ttft.measured_s,
            "measured_tbt_s": tbt and tbt.measured_s,
        }

    async def remove(self, name: str, version: int) -> None:
        """Removes a class. Raises VersionConflict or Unavailable; nothing has changed then."""
        async with self._turn:
            self._apply(await self._stored.remove(name, version, _table))

    def _apply(self, stored: ClassesAt) -> None:
        self._admission.classes = _table(stored.classes)
        if self._revision != stored.revision:
            self._known.write(stored.classes)
            log.info("classes.changed", extra={"revision": stored.revision, "num_classes": len(stored.classes)})
        self._revision = stored.revision


def declarations_of(settings: GatewaySettings) -> dict[str, Declaration]:
    """The classes of a gateway's settings, and the built-in one. Raises InvalidRequest."""
    check_classes(settings.classes)
    built_in = {DEFAULT_CLASS: DEFAULT_TARGETS} if settings.slo == "default" else {}
    return {
        name: Declaration(written.model_dump(mode="json"), name not in settings.classes)
        for name, written in (built_in | settings.classes).items()
    }


def _table(stored: Sequence[StoredClass]) -> ClassTable:
    return ClassTable(map(_class_of, stored))


def _class_of(stored: StoredClass) -> QosClass:
    return _body_of(stored.name, stored.definition).as_class(stored.name)


def _body_of(name: str, definition: dict[str, Any]) -> ClassBody:
    try:
        return ClassBody.model_validate(definition)
    except ValidationError as error:
        first = error.errors()[0]
        raise LaterRelease(
            f"class {name} of the ledger is of a release that this one does not know "
            f"({'.'.join(map(str, first['loc']))}: {first['msg']}): edit classes at a gateway of that release"
        ) from error
