"""Rows are written behind the requests; a failing database fails nobody."""

from __future__ import annotations

import asyncio
import sqlite3
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
from sqlalchemy import create_engine

from halfmoon.errors import InvalidRequest, Unavailable
from halfmoon.ledger.ledger import Ledger, mask_password, open_ledger
from halfmoon.ledger.models import Base, RequestRow

WHEN = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone(timedelta(hours=2)))


def row(number: int) -> RequestRow:
    return RequestRow(
        request_id=f"r{number}",
        created_at=WHEN,
        model="m",
        endpoint="completions",
        status="ok",
        http_status=200,
        error=None,
        prompt_tokens=5,
        cached_tokens=1,
        output_tokens=number,
        finish_reason="stop",
        prefill_worker="p",
        decode_worker="d",
        queue_s=0.1,
        ttft_s=0.2,
        mean_tbt_s=None,
        max_tbt_s=None,
        e2e_s=0.3,
        num_retries=0,
    )


async def test_everything_accepted_is_there_afterwards(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'deep' / 'ledger.db'}"
    async with open_ledger(url) as ledger:
        for number in range(1200):
            assert ledger.record(row(number))
    assert (ledger.num_written, ledger.num_lost) == (1200, 0)
    async with open_ledger(url) as again:
        newest = await again.recent(3)
        assert len(await again.recent(5000)) == 1200
    assert [one.request_id for one in newest] == ["r1199", "r1198", "r1197"]
    assert newest[0].created_at == WHEN
    assert newest[0].created_at.tzinfo is UTC
    assert newest[0].mean_tbt_s is None
    with sqlite3.connect(tmp_path / "deep" / "ledger.db") as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    connection.close()


async def test_rows_survive_a_block_that_fails(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'ledger.db'}"

    async def fail() -> None:
        async with open_ledger(url) as ledger:
            ledger.record(row(1))
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        await fail()
    async with open_ledger(url) as again:
        assert [one.request_id for one in await again.recent(9)] == ["r1"]


async def test_a_failing_database_is_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'ledger.db'}")  # no tables
    ledger = Ledger(engine, retry_wait_s=0)
    ledger.record(row(1))
    ledger.close()
    await ledger.write_behind()
    assert (ledger.num_written, ledger.num_lost) == (0, 1)
    assert [record.message for record in caplog.records] == ["ledger.failed"] * 3
    with pytest.raises(Unavailable):
        await ledger.recent(1)
    engine.dispose()


async def test_a_short_failure_loses_nothing(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'ledger.db'}")

    class MendedLedger(Ledger):
        def _insert(self, values: list[dict[str, object]]) -> None:
            try:
                super()._insert(values)
            finally:
                Base.metadata.create_all(engine)

    ledger = MendedLedger(engine, retry_wait_s=0)
    ledger.record(row(1))
    ledger.close()
    await ledger.write_behind()
    assert (ledger.num_written, ledger.num_lost) == (1, 0)
    engine.dispose()


async def test_any_failure_is_counted_and_the_writer_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'ledger.db'}")
    Base.metadata.create_all(engine)

    class OddLedger(Ledger):
        def _insert(self, values: list[dict[str, object]]) -> None:
            if values[0]["request_id"] == "r1":
                raise RuntimeError("the driver's own error")
            super()._insert(values)

    ledger = OddLedger(engine, retry_wait_s=0)
    writer = asyncio.create_task(ledger.write_behind())
    ledger.record(row(1))
    async with asyncio.timeout(20):
        while not ledger.num_lost:  # noqa: ASYNC110 (the ledger has no event for it)
            await asyncio.sleep(0.001)
    ledger.record(row(2))
    ledger.close()
    await asyncio.wait_for(writer, 20)
    assert (ledger.num_written, ledger.num_lost) == (1, 1)
    assert [record.message for record in caplog.records] == ["ledger.failed"] * 3
    engine.dispose()


async def test_closing_a_full_ledger_waits_for_nobody(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'ledger.db'}")
    Base.metadata.create_all(engine)
    ledger = Ledger(engine, max_queued=2)
    assert [ledger.record(row(number)) for number in range(3)] == [True, True, False]
    ledger.close()
    await asyncio.wait_for(ledger.write_behind(), 20)
    assert (ledger.num_written, ledger.num_lost) == (2, 1)
    engine.dispose()


def test_a_full_queue_refuses_and_counts(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'ledger.db'}")
    ledger = Ledger(engine, max_queued=2)
    assert [ledger.record(row(number)) for number in range(3)] == [True, True, False]
    assert ledger.num_lost == 1
    engine.dispose()


@pytest.mark.parametrize("url", ["no url", "nodb://x"])
async def test_a_wrong_url_is_a_clear_error(url: str) -> None:
    with pytest.raises(InvalidRequest):
        async with open_ledger(url):
            pass


async def test_a_database_that_is_not_there_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="cannot be opened"):
        async with open_ledger(f"sqlite:///{tmp_path}"):
            pass


def test_passwords_are_masked() -> None:
    assert "secret" not in mask_password("postgresql://me:secret@host/db")
    assert mask_password("::") == "not a URL"


async def test_a_ledger_of_an_earlier_version_gets_the_new_columns(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    async with open_ledger(url) as ledger:
        ledger.record(row(1))
    with sqlite3.connect(tmp_path / "ledger.db") as connection:
        for name in ("qos_class", "predicted_ttft_s"):
            connection.execute(f"alter table requests drop column {name}")
    connection.close()
    async with open_ledger(url) as ledger:
        ledger.record(row(2))
    async with open_ledger(url) as again:
        assert [one.request_id for one in await again.recent(9)] == ["r2", "r1"]
        assert [one.qos_class for one in await again.recent(9)] == [None, None]
