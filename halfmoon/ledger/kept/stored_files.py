"""Files of clients, in the ledger so that every gateway has them. Their names are text and never paths."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from sqlalchemy import and_, delete, exists, func, insert, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from halfmoon.errors import InvalidRequest, NotFound
from halfmoon.ledger.connection.database import Database, in_transaction
from halfmoon.ledger.connection.transaction import quietly
from halfmoon.ledger.history.retention import forever
from halfmoon.ledger.kept.batches import UNFINISHED
from halfmoon.ledger.kept.pages import Page, read_page
from halfmoon.ledger.models import BatchRow, FileChunkRow, FileRow

CHUNK_BYTES = 1 << 20
_UPLOAD = timedelta(days=1)  # longest
_EXPIRED_FILES = 20  # looked up at once; each is removed in a transaction of its own


class StoredFile(NamedTuple):
    """One file, without its bytes."""

    id: str
    tenant: str
    filename: str
    purpose: str
    num_bytes: int
    created_at: datetime
    expires_at: datetime


class StorageFull(InvalidRequest):
    """The tenant's files have as many bytes as they may."""


class StoredFiles:
    """Reads and writes files. Owns nothing. Everything here raises Unavailable when the database does not answer."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @in_transaction
    async def begin(self, session: AsyncSession, new: StoredFile) -> None:
        """Adds a file without bytes, that nobody sees before `finish`."""
        await session.execute(insert(FileRow).values({**new._asdict(), "is_whole": False}))

    @in_transaction
    async def append(
        self, session: AsyncSession, file_id: str, number: int, data: bytes, max_bytes: int | None = None
    ) -> None:
        """Adds the next chunk. Raises StorageFull if all files of its tenant then have more than `max_bytes`."""
        grown = update(FileRow).where(FileRow.id == file_id).values(num_bytes=FileRow.num_bytes + len(data))
        tenants = (await session.execute(quietly(grown.returning(FileRow.tenant)))).scalars().all()
        if not tenants:
            raise NotFound("this file was removed while it was written")
        used = select(func.sum(FileRow.num_bytes)).where(FileRow.tenant == tenants[0])
        if max_bytes is not None and (await session.scalar(used) or 0) > max_bytes:
            message = f"your files would have more than {max_bytes} bytes (gateway.files_max_bytes): delete some"
            raise StorageFull(message, param="file")
        await session.execute(insert(FileChunkRow).values(file_id=file_id, number=number, data=data))

    @in_transaction
    async def finish(self, session: AsyncSession, file_id: str, filename: str, expires_at: datetime) -> StoredFile:
        """Makes a file visible. Raises NotFound if it is gone."""
        whole = update(FileRow).where(FileRow.id == file_id)
        whole = whole.values(is_whole=True, filename=filename, expires_at=expires_at)
        await session.execute(quietly(whole))
        return _file(await session.scalar(select(FileRow).where(FileRow.id == file_id)), file_id)

    @in_transaction
    async def get(self, session: AsyncSession, file_id: str, tenant: str, now: datetime) -> StoredFile:
        """A tenant's file. Raises NotFound."""
        return _file(await session.scalar(select(FileRow).where(FileRow.id == file_id, *_own(tenant, now))), file_id)

    @in_transaction
    async def page(
        self, session: AsyncSession, tenant: str, now: datetime, page: Page, purpose: str | None = None
    ) -> Sequence[StoredFile]:
        """A tenant's files, all or those with a purpose: what `read_page` returns."""
        mine = [*_own(tenant, now), *([] if purpose is None else [FileRow.purpose == purpose])]
        return [_file(row, "") for row in await read_page(session, FileRow, mine, page)]

    async def chunks(self, file_id: str) -> AsyncIterator[bytes]:
        """The bytes of a file, in pieces."""
        number = 0
        while (data := await self._chunk(file_id, number)) is not None:
            yield data
            number += 1

    @in_transaction
    async def delete(self, session: AsyncSession, file_id: str, tenant: str, now: datetime) -> None:
        """Removes a tenant's file. Raises NotFound, and InvalidRequest if a batch still reads it."""
        gone = delete(FileRow).where(FileRow.id == file_id, *_own(tenant, now)).returning(FileRow.id)
        reading = select(BatchRow.id).where(BatchRow.input_file_id == file_id, BatchRow.status.in_(UNFINISHED))
        if not (await session.execute(quietly(gone))).all():
            raise absent_file(file_id)
        batch_id = await session.scalar(reading.limit(1))
        if batch_id is not None:
            raise InvalidRequest(f"the batch {batch_id} reads this file: wait for it, or cancel it", param="file_id")
        await session.execute(quietly(delete(FileChunkRow).where(FileChunkRow.file_id == file_id)))

    @in_transaction
    async def discard(self, session: AsyncSession, file_id: str) -> None:
        """Removes a file that will not be finished."""
        await session.execute(quietly(delete(FileRow).where(FileRow.id == file_id)))
        await session.execute(quietly(delete(FileChunkRow).where(FileChunkRow.file_id == file_id)))

    async def keep(self) -> None:
        """Runs forever, removing files that have expired, or were never finished."""

        async def forget() -> int:
            num = 0
            while ids := await self._expired(datetime.now(UTC)):
                for file_id in ids:
                    await self.discard(file_id)
                num += len(ids)
            return num

        await forever(forget, "files")

    @in_transaction
    async def _expired(self, session: AsyncSession, now: datetime) -> Sequence[str]:
        is_read = exists().where(BatchRow.input_file_id == FileRow.id, BatchRow.status.in_(UNFINISHED))
        is_left = and_(~FileRow.is_whole, FileRow.created_at < now - _UPLOAD)
        rows = select(FileRow.id).where(or_(FileRow.expires_at <= now, is_left), ~is_read).limit(_EXPIRED_FILES)
        return list(await session.scalars(rows))

    @in_transaction
    async def _chunk(self, session: AsyncSession, file_id: str, number: int) -> bytes | None:
        wanted = select(FileChunkRow.data).where(FileChunkRow.file_id == file_id, FileChunkRow.number == number)
        return await session.scalar(wanted)


def absent_file(file_id: str) -> NotFound:
    """The error for a file that is not there."""
    return NotFound(f"No such File object: {file_id[:80]}", param="file_id")


def _own(tenant: str, now: datetime) -> tuple[Any, ...]:
    return (FileRow.tenant == tenant, FileRow.is_whole, FileRow.expires_at > now)


def _file(row: FileRow | None, file_id: str) -> StoredFile:
    if row is None:
        raise absent_file(file_id)
    return StoredFile(*(getattr(row, name) for name in StoredFile._fields))
