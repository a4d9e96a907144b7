"""Modes that operators set for all services of a ledger: every edit is kept, the newest one counts."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from sqlalchemy import insert, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from halfmoon.ledger.connection.database import Database
from halfmoon.ledger.connection.polled_read import PolledRead
from halfmoon.ledger.connection.transaction import Work
from halfmoon.ledger.edits.stored_classes import VersionConflict
from halfmoon.ledger.models import ModeEditRow


class ModeEdit(NamedTuple):
    """One edit; `mode` is an opaque word here, or None: the mode in each service's own settings."""

    version: int  # 1 is the first
    edited_at: datetime
    mode: str | None


class ModeEdits:
    """Reads and writes one table of edits. Owns nothing. Raises Unavailable when the database does not answer."""

    def __init__(self, database: Database, rows: type[ModeEditRow], what: str) -> None:
        """what: whose mode it is, for errors."""
        self._database = database
        self._rows = rows
        self._what = what
        self._present = PolledRead(database, self._reading(1))

    async def present(self) -> ModeEdit | None:
        """The newest edit; None without edits."""
        return next(iter(await self._present.result()), None)

    async def newest(self, limit: int) -> Sequence[ModeEdit]:
        """The newest edits, newest first; empty without edits."""
        return await self._database.run(self._reading(limit))

    def _reading(self, limit: int) -> Work[Sequence[ModeEdit]]:
        rows = select(self._rows).order_by(self._rows.version.desc()).limit(limit)

        async def work(session: AsyncSession) -> Sequence[ModeEdit]:
            return [ModeEdit(row.version, row.edited_at, row.mode) for row in await session.scalars(rows)]

        return work

    async def put(self, mode: str | None, version: int) -> ModeEdit:
        """Adds an edit after `version`, 0 for the first. Raises VersionConflict when that is no longer the newest."""
        edit = ModeEdit(version + 1, datetime.now(UTC), mode)
        replaced = select(self._rows.version).where(self._rows.version == version)

        async def work(session: AsyncSession) -> None:
            await session.execute(insert(self._rows).values(edit._asdict()))  # first: locks out other writers
            if version and await session.scalar(replaced) is None:
                raise self._conflict(version)

        try:
            await self._database.run(work)
        except IntegrityError as error:  # such an edit already exists
            raise self._conflict(version) from error
        return edit

    def _conflict(self, version: int) -> VersionConflict:
        return VersionConflict(f"the {self._what} mode has another version by now than {version}: read it again")
