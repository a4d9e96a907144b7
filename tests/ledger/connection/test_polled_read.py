"""A repeated read costs nothing while nobody commits, and misses no commit of anybody."""

from __future__ import annotations

import random
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from halfmoon.errors import Unavailable
from halfmoon.ledger.connection.database import open_database
from halfmoon.ledger.connection.polled_read import PolledRead
from halfmoon.ledger.edits.stored_classes import StoredClasses, VersionConflict
from halfmoon.ledger.edits.stored_tenants import StoredTenants
from halfmoon.ledger.ledger import open_ledger
from tests.ledger.kept.test_stored_responses import NOW, stored


async def test_no_commit_is_missed_and_sqlite_reads_only_after_one(ledger_url: str) -> None:
    drawn = random.Random(1)
    num_reads = 0
    async with open_database(ledger_url) as own, open_database(ledger_url) as other:
        tenants = [StoredTenants(own), StoredTenants(other)]
        writers: list[StoredTenants | StoredClasses] = [*tenants, StoredClasses(own), StoredClasses(other)]

        async def read(session: AsyncSession) -> int:
            nonlocal num_reads
            num_reads += 1
            return num_reads

        polled, of_tenants, of_classes = PolledRead(own, read), StoredTenants(own), StoredClasses(own)
        num_edits = {StoredTenants: await of_tenants.revision(), StoredClasses: await of_classes.revision()}
        await polled.result()
        for number in range(40):
            has_changed = drawn.random() < 0.5
            if has_changed:
                writer = drawn.choice(writers)
                if isinstance(writer, StoredTenants):
                    await writer.put(f"t{number}", {}, 0)
                else:
                    await writer.put(f"c{number}", {}, 0, lambda _: None)
                num_edits[type(writer)] += 1
            elif drawn.random() < 0.5:
                with pytest.raises(VersionConflict):
                    await drawn.choice(tenants).put("nobody", {}, 7)  # rolled back
            before = num_reads
            await polled.result()
            assert num_reads - before == (1 if has_changed or not own.is_file else 0)
            assert await of_tenants.revision() == num_edits[StoredTenants]
            assert await of_classes.revision() == num_edits[StoredClasses]


async def test_leases_end_with_time_though_nobody_commits(ledger_url: str) -> None:
    async with open_ledger(ledger_url) as first, open_ledger(ledger_url) as second:
        one, two = first.responses.leases, second.responses.leases
        assert not await two.claim("two", NOW, 9)
        await first.responses.put(stored(0, status="queued"))
        assert await one.claim("one", NOW, 9) == ["r0"]
        assert not await two.claim("two", NOW, 9)
        assert await two.claim("two", NOW + timedelta(minutes=1), 9) == ["r0"]


async def test_a_file_that_was_replaced_is_not_taken_for_an_unchanged_one(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    async with open_database(f"sqlite:///{path}") as database:
        tenants = StoredTenants(database)
        await tenants.revision()
        path.rename(tmp_path / "elsewhere.db")
        with pytest.raises(Unavailable, match="not there any more"):
            await tenants.revision()


async def test_a_database_in_memory_is_read_each_time() -> None:
    async with open_database("sqlite:///:memory:") as database:
        assert database.commit_mark() is None
        assert await StoredTenants(database).revision() == await StoredTenants(database).revision()
