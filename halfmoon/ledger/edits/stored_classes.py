"""QoS classes as stored in the ledger: one row per class, with a version that guards against lost edits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from sqlalchemy import delete, insert, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from halfmoon.errors import Incompatible
from halfmoon.ledger.connection.database import Database, in_transaction
from halfmoon.ledger.connection.polled_read import PolledRead
from halfmoon.ledger.edits.declared_classes import ClassHistory, Declaration
from halfmoon.ledger.models import ClassEditRow, ClassRevisionRow, DeclaredClassRow, QosClassRow


class VersionConflict(Incompatible):
    """The class was changed by another writer since it was read."""


class LaterRelease(Incompatible):
    """The ledger has what a later release wrote and this one does not know."""


class StoredClass(NamedTuple):
    """A class's definition, opaque here, and its version: 1 when it is created."""

    name: str
    version: int
    definition: dict[str, Any]


class ClassesAt(NamedTuple):
    """All classes by name at one revision, the number of edits to any of them."""

    revision: int
    classes: Sequence[StoredClass]


class ClassEdit(NamedTuple):
    """One edit. `before` and `definition` are None if the class did not exist."""

    revision: int
    edited_at: datetime
    name: str
    version: int  # of the class since this edit; for a removed class, its last
    definition: dict[str, Any] | None
    before: dict[str, Any] | None


Check = Callable[[Sequence[StoredClass]], object]


class StoredClasses:
    """Reads and writes the table of classes. Owns nothing.

    Everything here raises Unavailable when the database does not answer.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._revision = PolledRead(database, _revision)

    async def revision(self) -> int:
        """The current revision, which differs from an earlier one after any edit."""
        return await self._revision.result()

    @in_transaction
    async def all(self, session: AsyncSession) -> ClassesAt:
        """All classes."""
        revision = await _revision(session)  # first: a concurrent edit then makes it stale, never unseen
        return ClassesAt(revision, await _classes(session))

    @in_transaction
    async def edits(self, session: AsyncSession, limit: int) -> Sequence[ClassEdit]:
        """The newest edits, newest first."""
        newest = select(ClassEditRow).order_by(ClassEditRow.revision.desc()).limit(limit)
        rows = await session.scalars(newest)
        return [
            ClassEdit(row.revision, row.edited_at, row.name, row.version, row.definition, row.before) for row in rows
        ]

    @in_transaction
    async def put(
        self, session: AsyncSession, name: str, definition: dict[str, Any], version: int, check: Check
    ) -> ClassesAt:
        """Writes over `version`, 0 for a new class; returns all classes after it.

        Raises VersionConflict when the version is no longer current, and whatever `check` raises for the resulting
        classes; nothing has changed then.
        """
        return await _edited(session, name, version, StoredClass(name, version + 1, definition), check)

    @in_transaction
    async def remove(self, session: AsyncSession, name: str, version: int, check: Check) -> ClassesAt:
        """Removes `version` of a class; otherwise like `put`."""
        return await _edited(session, name, version, None, check)

    @in_transaction
    async def declare(self, session: AsyncSession, declarations: Mapping[str, Declaration], check: Check) -> ClassesAt:
        """Takes over the classes of a configuration, by the rules of `halfmoon.ledger.edits.declared_classes`.

        Raises what `check` raises of the classes as they would be; nothing has changed then.
        """
        return await _declared(session, declarations, check)


async def _declared(session: AsyncSession, declarations: Mapping[str, Declaration], check: Check) -> ClassesAt:
    history = await _history(session)
    if history.remembered(declarations) == history.declared:
        return ClassesAt(await _revision(session), await _classes(session))
    await _next_revision(session)
    history = await _history(session)  # no edits from here on
    versions = {one.name: one.version for one in await _classes(session)}
    for name, definition in history.changes(declarations):
        version = versions.get(name, 0)
        new = None if definition is None else StoredClass(name, version + 1, definition)
        await _edited(session, name, version, new, lambda classes: None)
    await session.execute(delete(DeclaredClassRow))
    rows = [{"name": name, "definition": text} for name, text in history.remembered(declarations).items()]
    if rows:
        await session.execute(insert(DeclaredClassRow), rows)
    after = await _classes(session)
    check(after)
    return ClassesAt(await _revision(session), after)


async def _history(session: AsyncSession) -> ClassHistory:
    declared = await session.scalars(select(DeclaredClassRow))
    names = await session.scalars(select(ClassEditRow.name).distinct())
    return ClassHistory(
        {row.name: row.definition for row in declared},
        {one.name: one.definition for one in await _classes(session)},
        frozenset(names),
    )


async def _edited(session: AsyncSession, name: str, version: int, new: StoredClass | None, check: Check) -> ClassesAt:
    revision = await _next_revision(session)
    before = await _classes(session)
    old = next((stored for stored in before if stored.name == name), None)
    _check_version(name, version, old.version if old else 0)
    after = sorted([stored for stored in before if stored.name != name] + ([new] if new else []))
    check(after)
    if new is None:
        await session.execute(delete(QosClassRow).where(QosClassRow.name == name))
    elif version == 0:
        await session.execute(insert(QosClassRow).values(new._asdict()))
    else:
        changed = update(QosClassRow).where(QosClassRow.name == name)
        await session.execute(changed.values(version=new.version, definition=new.definition))
    edit = ClassEdit(
        revision,
        datetime.now(UTC),
        name,
        new.version if new else version,
        new and new.definition,
        old and old.definition,
    )
    await session.execute(insert(ClassEditRow).values(edit._asdict()))
    return ClassesAt(revision, after)


async def _next_revision(session: AsyncSession) -> int:
    """Increments the revision and locks out other editors until the end of the transaction."""
    taken = update(ClassRevisionRow).values(revision=ClassRevisionRow.revision + 1).returning(ClassRevisionRow.revision)
    return (await session.execute(taken)).scalar_one()


async def _revision(session: AsyncSession) -> int:
    return (await session.execute(select(ClassRevisionRow.revision))).scalar_one()


async def _classes(session: AsyncSession) -> list[StoredClass]:
    rows = await session.scalars(select(QosClassRow).order_by(QosClassRow.name))
    return [StoredClass(row.name, row.version, row.definition) for row in rows]


def _check_version(name: str, version: int, present: int) -> None:
    if version == present:
        return
    if present == 0:
        raise VersionConflict(f"class {name} is not there any more, or never was: to make it, send version 0")
    raise VersionConflict(f"class {name} has version {present} by now, not {version}: read it again, and send that one")
