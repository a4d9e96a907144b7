"""QoS classes as the ledger keeps them: one row a class, with a version that guards against lost edits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import Engine, delete, insert, select, update
from sqlalchemy.exc import IntegrityError, SQLAlchemyError
from sqlalchemy.orm import Session

from halfmoon.errors import Incompatible, Unavailable
from halfmoon.ledger.models import QosClassRow

Result = TypeVar("Result")


class VersionConflict(Incompatible):
    """Somebody else changed the class since it was read."""


class StoredClass(NamedTuple):
    """A class's definition, which this room does not read, and its version: 1 when it was made."""

    name: str
    version: int
    definition: dict[str, Any]


class StoredClasses:
    """Reads and writes the table of classes. Owns nothing."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def all(self) -> Sequence[StoredClass]:
        """Every class, by name. Raises Unavailable when the database does not answer."""
        return await self._run(self._select)

    async def put(self, name: str, definition: dict[str, Any], version: int) -> int:
        """Writes over `version`, 0 for a class that is not there yet; the new version.

        Raises VersionConflict when it is another one by now, Unavailable when the database does not answer.
        """
        return await self._run(lambda session: self._write(session, name, definition, version))

    async def remove(self, name: str, version: int) -> None:
        """Removes `version` of a class. Raises VersionConflict when it is another one or gone, or Unavailable."""
        await self._run(lambda session: self._delete(session, name, version))

    async def _run(self, work: Callable[[Session], Result]) -> Result:
        try:
            return await asyncio.to_thread(self._in_session, work)
        except IntegrityError as error:
            raise VersionConflict("the class was made by somebody else meanwhile") from error
        except SQLAlchemyError as error:
            raise Unavailable("the ledger's database does not answer") from error

    def _in_session(self, work: Callable[[Session], Result]) -> Result:
        with Session(self._engine) as session, session.begin():
            return work(session)

    def _select(self, session: Session) -> list[StoredClass]:
        rows = session.scalars(select(QosClassRow).order_by(QosClassRow.name))
        return [StoredClass(row.name, row.version, row.definition) for row in rows]

    def _write(self, session: Session, name: str, definition: dict[str, Any], version: int) -> int:
        if version == 0:
            session.execute(insert(QosClassRow).values(name=name, version=1, definition=definition))
            return 1
        changed = update(QosClassRow).where(QosClassRow.name == name, QosClassRow.version == version)
        result = session.execute(changed.values(version=version + 1, definition=definition).returning(QosClassRow.name))
        _check_found(result.first() is not None, name, version)
        return version + 1

    def _delete(self, session: Session, name: str, version: int) -> None:
        gone = delete(QosClassRow).where(QosClassRow.name == name, QosClassRow.version == version)
        result = session.execute(gone.returning(QosClassRow.name))
        _check_found(result.first() is not None, name, version)


def _check_found(found: bool, name: str, version: int) -> None:
    if not found:
        raise VersionConflict(f"class {name} has no version {version} any more: read it again")
