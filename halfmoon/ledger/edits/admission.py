"""The admission mode that operators set for all gateways of a ledger: every edit is kept, the newest one counts."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from sqlalchemy import insert, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from halfmoon.ledger.connection.database import Database
from halfmoon.ledger.edits.stored_classes import VersionConflict
from halfmoon.ledger.models import AdmissionEditRow


class AdmissionEdit(NamedTuple):
    """One edit; `mode` is an opaque word here, or None: the mode in each gateway's own settings."""

    version: int  # 1 is the first
    edited_at: datetime
    mode: str | None


class AdmissionEdits:
    """Reads and writes the table of edits. Owns nothing. Raises Unavailable when the database does not answer."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def newest(self, limit: int) -> Sequence[AdmissionEdit]:
        """The newest edits, newest first; empty without edits."""
        rows = select(AdmissionEditRow).order_by(AdmissionEditRow.version.desc()).limit(limit)

        async def work(session: AsyncSession) -> list[AdmissionEdit]:
            return [AdmissionEdit(row.version, row.edited_at, row.mode) for row in await session.scalars(rows)]

        return await self._database.run(work)

    async def put(self, mode: str | None, version: int) -> AdmissionEdit:
        """Adds an edit after `version`, 0 for the first. Raises VersionConflict when that is no longer the newest."""
        edit = AdmissionEdit(version + 1, datetime.now(UTC), mode)
        replaced = select(AdmissionEditRow.version).where(AdmissionEditRow.version == version)

        async def work(session: AsyncSession) -> None:
            await session.execute(insert(AdmissionEditRow).values(edit._asdict()))  # first: locks out other writers
            if version and await session.scalar(replaced) is None:
                raise _conflict(version)

        try:
            await self._database.run(work)
        except IntegrityError as error:  # such an edit already exists
            raise _conflict(version) from error
        return edit


def _conflict(version: int) -> VersionConflict:
    return VersionConflict(f"the admission mode has another version by now than {version}: read it again")
