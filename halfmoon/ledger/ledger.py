"""The ledger as services use it: requests are written behind, everything else is read and written on demand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from sqlalchemy import insert, select
from sqlalchemy.ext.asyncio import AsyncSession

from halfmoon.ledger.connection.database import Database, in_transaction, open_database
from halfmoon.ledger.edits.mode_edits import ModeEdits
from halfmoon.ledger.edits.stored_classes import StoredClasses
from halfmoon.ledger.edits.stored_tenants import StoredTenants
from halfmoon.ledger.history.autopilot_decisions import AutopilotDecisions
from halfmoon.ledger.history.outcomes import Outcomes
from halfmoon.ledger.history.output_samples import OutputSamples
from halfmoon.ledger.history.retention import Retention
from halfmoon.ledger.history.row_queue import RowQueue
from halfmoon.ledger.history.tenant_usage import TenantUsage
from halfmoon.ledger.history.traffic import Traffic
from halfmoon.ledger.history.worker_changes import WorkerChanges
from halfmoon.ledger.kept.batches import Batches
from halfmoon.ledger.kept.stored_files import StoredFiles
from halfmoon.ledger.kept.stored_responses import StoredResponses
from halfmoon.ledger.measured_profiles import MeasuredProfiles
from halfmoon.ledger.models import AdmissionEditRow, AutopilotEditRow, RequestRow
from halfmoon.ledger.plans import Plans
from halfmoon.ledger.profiles import Profiles

_FLUSH_S = 5.0  # at the end, for queued rows


class Ledger:
    """Owns the queue of requests. A failing database is logged and counted; it never fails or delays a request."""

    def __init__(self, database: Database, gateway_id: str = "") -> None:
        """`gateway_id` names the gateway whose requests are recorded."""
        self.classes = StoredClasses(database)
        self.tenants = StoredTenants(database)
        self.tenant_usage = TenantUsage(database)
        self.admission = ModeEdits(database, AdmissionEditRow, "admission")
        self.autopilot = ModeEdits(database, AutopilotEditRow, "autopilot's")
        self.autopilot_decisions = AutopilotDecisions(database)
        self.profiles = Profiles(database)
        self.measured_profiles = MeasuredProfiles(database)
        self.plans = Plans(database)
        self.outputs = OutputSamples(database)
        self.outcomes = Outcomes(database)
        self.retention = Retention(database)
        self.responses = StoredResponses(database)
        self.files = StoredFiles(database)
        self.batches = Batches(database)
        self.traffic = Traffic(database)
        self.worker_changes = WorkerChanges(database)
        self.rows = RowQueue[dict[str, Any]](self._insert)
        self._database = database
        self._gateway_id = gateway_id

    async def join(self) -> None:
        """Brings a ledger that was away when opened into use. Raises Unavailable while it is still away."""
        await self._database.upgrade()

    def record(self, row: RequestRow) -> bool:
        """Queues a row for writing. False, and counted as lost, when too many are waiting."""
        values = {name: _storable(value) for name, value in row.as_dict().items() if name != "id"}
        return self.rows.put(values | {"gateway_id": self._gateway_id})

    @in_transaction
    async def recent(self, session: AsyncSession, limit: int) -> list[RequestRow]:
        """The newest written rows, newest first. Raises Unavailable when the database does not answer."""
        newest = select(RequestRow).order_by(RequestRow.id.desc()).limit(limit)
        return list(await session.scalars(newest))

    async def _insert(self, rows: Sequence[dict[str, Any]]) -> None:
        """Inserts without a deadline: a cancelled commit may or may not have been applied."""

        async def work(session: AsyncSession) -> None:
            await session.execute(insert(RequestRow), list(rows))

        await self._database.run(work, deadline_s=None)


def _storable(value: Any) -> Any:
    """The value without what a client may send and no database accepts: zero bytes, halves of surrogate pairs."""
    if not isinstance(value, str):
        return value
    return value.encode("utf-8", "replace").decode().replace("\0", "\N{REPLACEMENT CHARACTER}")


@asynccontextmanager
async def open_ledger(url: str, gateway_id: str = "", *, may_be_away: bool = False) -> AsyncIterator[Ledger]:
    """The ledger at `url`, created or upgraded if needed; accepted rows are written when the context ends.

    Raises what `open_database` raises. With `may_be_away`, `join` must be called from time to time.
    """
    async with open_database(url, may_be_away=may_be_away) as database:
        ledger = Ledger(database, gateway_id)
        writer = asyncio.create_task(ledger.rows.write_behind())  # a group would cancel it on a failure
        try:
            yield ledger
        finally:
            ledger.rows.close()
            await asyncio.wait({writer}, timeout=_FLUSH_S)
            if not writer.done():
                writer.cancel()
                ledger.rows.give_up()
            else:
                writer.result()
