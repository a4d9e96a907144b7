"""Responses that clients have kept here, each with its own input: a conversation is a chain of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, NamedTuple

from sqlalchemy import Integer, and_, delete, exists, func, insert, literal, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from halfmoon.errors import NotFound
from halfmoon.ledger.connection.database import Database, in_transaction
from halfmoon.ledger.connection.transaction import quietly
from halfmoon.ledger.history.retention import forever
from halfmoon.ledger.kept.leases import Leases
from halfmoon.ledger.models import ResponseEventsRow, StoredResponseRow

ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]

UNFINISHED: tuple[ResponseStatus, ...] = ("queued", "in_progress")
_LEASE_S = 20.0
_PUT_S = 2.0
_EXPIRE_EVERY_S = 60.0
_EVENTS_KEPT = timedelta(days=1)
_EVICTED_ROWS = 200  # in one transaction
_ROW_BYTES = 512  # of a row beside its content


class StoredResponse(NamedTuple):
    """One response, opaque here."""

    id: str
    tenant: str
    previous_id: str | None
    status: str
    created_at: datetime
    expires_at: datetime
    num_bytes: int
    input: Sequence[Any]
    response: Mapping[str, Any]
    job: Mapping[str, Any] | None = None  # of a background response
    num_claims: int = 0

    @property
    def is_finished(self) -> bool:
        """Whether nobody works on it any more."""
        return self.status not in UNFINISHED


class StoredResponses:
    """Reads and writes responses. Owns nothing. Time is an argument.

    What has expired is not there. Everything here raises Unavailable when the database does not answer.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self.leases = Leases(database, StoredResponseRow, StoredResponseRow.status.in_(UNFINISHED), _LEASE_S)

    async def put(self, new: StoredResponse, renewed: Sequence[str] = ()) -> None:
        """Adds a response, unless it is there already; the turns before it are kept as long as it is.

        A client waits for it, so the deadline is short.
        """
        values = {**new._asdict(), "num_bytes": new.num_bytes + _ROW_BYTES}
        table = StoredResponseRow
        before = update(table).where(table.id.in_(renewed), table.expires_at < new.expires_at)

        async def work(session: AsyncSession) -> None:
            await session.execute(insert(StoredResponseRow).values(values))
            if renewed:
                await session.execute(quietly(before.values(expires_at=new.expires_at)))

        try:
            await self._database.run(work, deadline_s=_PUT_S)
        except IntegrityError:  # of a request that was repeated
            return

    @in_transaction
    async def get(self, session: AsyncSession, response_id: str, tenant: str, now: datetime) -> StoredResponse:
        """A tenant's response. Raises NotFound."""
        return _response(await _row(session, response_id, tenant, now))

    @in_transaction
    async def claimed(self, session: AsyncSession, response_id: str, holder: str) -> StoredResponse | None:
        """A response that this gateway works on; None if it does not any more."""
        table = StoredResponseRow
        row = await session.scalar(select(table).where(table.id == response_id, table.holder == holder))
        return None if row is None else _response(row)

    @in_transaction
    async def chain(
        self, session: AsyncSession, response_id: str, tenant: str, now: datetime, most: int
    ) -> Sequence[StoredResponse]:
        """A conversation up to this response, oldest turn first; the latest `most` turns of a longer one.

        The first has a `previous_id` if that turn is gone, or beyond `most`.
        """
        table = StoredResponseRow
        is_here = and_(table.tenant == tenant, table.expires_at > now)
        turns = (
            select(table.id, table.previous_id, literal(1, Integer).label("depth"))
            .where(table.id == response_id, is_here)
            .cte("turns", recursive=True)
        )
        before = select(table.id, table.previous_id, turns.c.depth + 1).join(turns, table.id == turns.c.previous_id)
        turns = turns.union_all(before.where(is_here, turns.c.depth < most))
        rows = select(table).join(turns, table.id == turns.c.id).order_by(turns.c.depth.desc())
        return [_response(row) for row in await session.scalars(rows)]

    @in_transaction
    async def delete(self, session: AsyncSession, response_id: str, tenant: str, now: datetime) -> None:
        """Removes a tenant's response; whoever works on it ends. Raises NotFound."""
        gone = delete(StoredResponseRow).where(*_own(response_id, tenant, now)).returning(StoredResponseRow.id)
        if not (await session.execute(quietly(gone))).all():
            raise _absent(response_id)
        await session.execute(quietly(delete(ResponseEventsRow).where(_events_of(response_id))))

    @in_transaction
    async def change(
        self,
        session: AsyncSession,
        response_id: str,
        status: ResponseStatus,
        response: Mapping[str, Any],
        *,
        holder: str | None = None,
        num_bytes: int = 0,
    ) -> bool:
        """Writes what became of an unfinished response. False if it is finished, gone, or not held by `holder`.

        `num_bytes` come on top of those that it had.
        """
        table = StoredResponseRow
        open_row = [table.id == response_id, table.status.in_(UNFINISHED)]
        if holder is not None:
            open_row.append(table.holder == holder)
        changed = update(table).where(*open_row)
        values = {"status": status, "response": dict(response), "num_bytes": table.num_bytes + num_bytes}
        written = changed.values(values).returning(table.id)
        return bool((await session.execute(quietly(written))).all())

    @in_transaction
    async def unfinished(self, session: AsyncSession, tenant: str) -> tuple[int, int]:
        """How many responses of a tenant wait or run in the background, and their bytes."""
        table = StoredResponseRow
        sums = select(func.count(), func.sum(table.num_bytes))
        mine = sums.where(table.tenant == tenant, table.status.in_(UNFINISHED))
        num, num_bytes = (await session.execute(mine)).one()
        return num, int(num_bytes or 0)

    @in_transaction
    async def add_events(self, session: AsyncSession, response_id: str, first: int, events: Sequence[Any]) -> bool:
        """Adds events to a response that is there; False if it is gone. Those that are there already stay."""
        table = StoredResponseRow
        locked = update(table).where(table.id == response_id).values(status=table.status).returning(table.id)
        if not (await session.execute(quietly(locked))).all():  # first: SQLite's reader may not become a writer
            return False
        num = await _num_events(session, response_id)
        new = events[max(0, num - first) :]
        if new:
            values = {"response_id": response_id, "first": max(first, num), "events": list(new)}
            await session.execute(insert(ResponseEventsRow).values(values))
        return True

    @in_transaction
    async def num_events(self, session: AsyncSession, response_id: str) -> int:
        """The number after the last event that was added."""
        return await _num_events(session, response_id)

    @in_transaction
    async def events(self, session: AsyncSession, response_id: str, start: int, most: int = 50) -> Sequence[Any]:
        """The next events from number `start` on, in up to `most` groups; empty if there are none yet."""
        table = ResponseEventsRow
        of_response = _events_of(response_id)
        group = select(func.max(table.first)).where(of_response, table.first <= start).scalar_subquery()
        rows = select(table).where(of_response, table.first >= func.coalesce(group, 0)).order_by(table.first)
        found = [event for row in await session.scalars(rows.limit(most)) for event in row.events]
        return [event for event in found if event["sequence_number"] >= start]

    async def keep(self, max_bytes: int) -> None:
        """Runs forever, removing what has expired, and what is too much."""

        async def forget() -> int:
            num, now = 0, datetime.now(UTC)
            while more := await self.expire(now, max_bytes):
                num += more
            await self.forget_events(now - _EVENTS_KEPT)
            return num

        await forever(forget, "responses", _EXPIRE_EVERY_S)

    async def expire(self, now: datetime, max_bytes: int) -> int:
        """Removes what has expired and, beyond `max_bytes`, the oldest finished of the tenant that has most.

        Returns how many responses went. To be called again until it returns 0.
        """
        table = StoredResponseRow
        expired = select(table.id).where(table.expires_at <= now).limit(_EVICTED_ROWS)
        by_tenant = select(table.tenant, func.sum(table.num_bytes)).group_by(table.tenant)

        async def read(session: AsyncSession) -> list[str]:
            ids = list(await session.scalars(expired))
            if ids:
                return ids
            used: dict[str, int] = {tenant: int(num) for tenant, num in (await session.execute(by_tenant)).all()}
            excess = sum(used.values()) - max_bytes
            if excess <= 0:
                return []
            most = max(used, key=used.__getitem__)
            oldest = select(table.id, table.num_bytes).where(table.tenant == most, table.status.not_in(UNFINISHED))
            rows = (await session.execute(oldest.order_by(table.expires_at).limit(_EVICTED_ROWS))).all()
            for response_id, num_bytes in rows:
                if excess > 0:
                    ids.append(response_id)
                    excess -= num_bytes
            return ids

        async def remove(session: AsyncSession) -> None:
            await session.execute(quietly(delete(table).where(table.id.in_(ids))))
            await session.execute(quietly(delete(ResponseEventsRow).where(ResponseEventsRow.response_id.in_(ids))))

        ids = await self._database.run(read)
        if ids:
            await self._database.run(remove)
        return len(ids)

    @in_transaction
    async def forget_events(self, session: AsyncSession, before: datetime) -> None:
        """Removes the events of responses that were created before this moment, and of those that are gone."""
        table = StoredResponseRow
        recent = exists().where(table.id == ResponseEventsRow.response_id, table.created_at >= before)
        running = exists().where(table.id == ResponseEventsRow.response_id, table.status.in_(UNFINISHED))
        gone = delete(ResponseEventsRow).where(~recent, ~running)
        await session.execute(quietly(gone))


def expiry(now: datetime, days: float) -> datetime:
    """When something that is kept for so many days expires."""
    return now + timedelta(days=days)


def _own(response_id: str, tenant: str, now: datetime) -> tuple[Any, ...]:
    table = StoredResponseRow
    return (table.id == response_id, table.tenant == tenant, table.expires_at > now)


def _events_of(response_id: str) -> Any:
    return ResponseEventsRow.response_id == response_id


async def _row(session: AsyncSession, response_id: str, tenant: str, now: datetime) -> StoredResponseRow:
    row = await session.scalar(select(StoredResponseRow).where(*_own(response_id, tenant, now)))
    if row is None:
        raise _absent(response_id)
    return row


async def _num_events(session: AsyncSession, response_id: str) -> int:
    newest = select(ResponseEventsRow).where(_events_of(response_id)).order_by(ResponseEventsRow.first.desc())
    last = await session.scalar(newest.limit(1))
    return 0 if last is None else last.first + len(last.events)


def _absent(response_id: str) -> NotFound:
    return NotFound(f"Response with id '{response_id[:80]}' not found.")


def _response(row: StoredResponseRow) -> StoredResponse:
    return StoredResponse(*(getattr(row, name) for name in StoredResponse._fields))
