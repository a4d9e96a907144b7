"""Tenants and their API keys as stored in the ledger. Keys are there by digest only."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import delete, insert, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from halfmoon.errors import InvalidRequest, NotFound
from halfmoon.ledger.connection.database import Database, in_transaction
from halfmoon.ledger.connection.polled_read import PolledRead
from halfmoon.ledger.edits.stored_classes import VersionConflict
from halfmoon.ledger.models import ApiKeyRow, TenantRevisionRow, TenantRow


class StoredTenant(NamedTuple):
    """A tenant's limits, opaque here, and their version: 1 when they are first written."""

    name: str
    version: int
    definition: dict[str, Any]


class StoredKey(NamedTuple):
    """One API key."""

    digest: str
    tenant: str
    label: str
    created_at: datetime
    expires_at: datetime | None = None
    revoked_at: datetime | None = None


class TenantsAt(NamedTuple):
    """Everything at one revision, the number of edits. A tenant may have keys and no definition."""

    revision: int
    tenants: Sequence[StoredTenant]
    keys: Sequence[StoredKey]


class StoredTenants:
    """Reads and writes tenants and keys. Owns nothing.

    Everything here raises Unavailable when the database does not answer.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._revision = PolledRead(database, _revision)

    async def revision(self) -> int:
        """The current revision, which differs from an earlier one after any edit."""
        return await self._revision.result()

    @in_transaction
    async def all(self, session: AsyncSession) -> TenantsAt:
        """All tenants and all keys, revoked ones too."""
        revision = await _revision(session)  # first: a concurrent edit then makes it stale, never unseen
        tenants = await session.scalars(select(TenantRow).order_by(TenantRow.name))
        keys = await session.scalars(select(ApiKeyRow).order_by(ApiKeyRow.created_at))
        return TenantsAt(
            revision,
            [StoredTenant(row.name, row.version, row.definition) for row in tenants],
            [_key(row) for row in keys],
        )

    async def put(self, name: str, definition: dict[str, Any], version: int) -> StoredTenant:
        """Writes a tenant over `version`, 0 for a new one. Raises VersionConflict if that is no longer current."""
        new = StoredTenant(name, version + 1, definition)

        async def work(session: AsyncSession) -> None:
            await _next_revision(session)
            await _check_version(session, name, version)
            if version:
                await session.execute(update(TenantRow).where(TenantRow.name == name).values(new._asdict()))
            else:
                await session.execute(insert(TenantRow).values(new._asdict()))

        await self._database.run(work)
        return new

    @in_transaction
    async def remove(self, session: AsyncSession, name: str, version: int, now: datetime) -> None:
        """Removes a tenant's limits and revokes its keys. Raises VersionConflict if `version` is no longer current."""
        its_keys = update(ApiKeyRow).where(ApiKeyRow.tenant == name, ApiKeyRow.revoked_at.is_(None))
        await _next_revision(session)
        await _check_version(session, name, version)
        await session.execute(delete(TenantRow).where(TenantRow.name == name))
        await session.execute(its_keys.values(revoked_at=now))

    async def add_key(self, key: StoredKey) -> None:
        """Adds a key. Raises InvalidRequest if it exists."""

        async def work(session: AsyncSession) -> None:
            await _next_revision(session)
            await session.execute(insert(ApiKeyRow).values(key._asdict()))

        try:
            await self._database.run(work)
        except IntegrityError as error:
            raise InvalidRequest("this key exists already: make another one", param="key") from error

    @in_transaction
    async def revoke(self, session: AsyncSession, key_id: str, now: datetime, tenant: str | None = None) -> StoredKey:
        """Revokes the key, of that tenant if one is given, whose digest begins with `key_id`.

        Raises NotFound unless there is exactly one.
        """
        await _next_revision(session)
        found = select(ApiKeyRow).where(ApiKeyRow.digest.startswith(key_id))
        if tenant is not None:
            found = found.where(ApiKeyRow.tenant == tenant)
        rows = list(await session.scalars(found.limit(2)))
        if len(rows) != 1 or not key_id.isalnum():
            of_whom = "" if tenant is None else f" of tenant {tenant}"
            raise NotFound(f"there is no key {key_id!r}{of_whom} in the ledger: `halfmoon keys list` shows their ids")
        row = rows[0]
        row.revoked_at = row.revoked_at or now
        return _key(row)


def _key(row: ApiKeyRow) -> StoredKey:
    return StoredKey(row.digest, row.tenant, row.label, row.created_at, row.expires_at, row.revoked_at)


async def _revision(session: AsyncSession) -> int:
    return (await session.execute(select(TenantRevisionRow.revision))).scalar_one()


async def _next_revision(session: AsyncSession) -> None:
    """Increments the revision and locks out other editors until the end of the transaction."""
    await session.execute(update(TenantRevisionRow).values(revision=TenantRevisionRow.revision + 1))


async def _check_version(session: AsyncSession, name: str, version: int) -> None:
    present = await session.scalar(select(TenantRow.version).where(TenantRow.name == name)) or 0
    if version != present:
        raise VersionConflict(
            f"tenant {name} has version {present} by now, not {version}: read it again, and send that one"
        )
