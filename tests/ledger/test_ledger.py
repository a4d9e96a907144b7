"""Rows are written behind the requests, in both databases; a failing one fails nobody."""

from __future__ import annotations

import asyncio
import signal
import socket
import sqlite3
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
from sqlalchemy import text

from halfmoon.errors import InvalidRequest, NotFound, Unavailable
from halfmoon.ledger.connection.database import open_database
from halfmoon.ledger.history.output_samples import OutputSample
from halfmoon.ledger.ledger import Ledger, open_ledger
from halfmoon.ledger.measured_profiles import NamedProfile
from halfmoon.ledger.plans import NewPlan
from halfmoon.ledger.profiles import StoredProfile
from tests.ledger.postgresql import PostgresqlServer
from tests.ledger.rows import WHEN, row


async def until_written(ledger: Ledger) -> None:
    async with asyncio.timeout(20):
        while len(ledger.rows):  # noqa: ASYNC110 (the ledger has no event for it)
            await asyncio.sleep(0.001)


async def test_everything_accepted_is_there_afterwards(ledger_url: str) -> None:
    async with open_ledger(ledger_url, "g1") as ledger:
        for number in range(1200):
            assert ledger.record(row(number))
    assert (ledger.rows.num_written, ledger.rows.num_lost) == (1200, 0)
    async with open_ledger(ledger_url) as again:
        newest = await again.recent(3)
        assert len(await again.recent(5000)) == 1200
    assert [one.request_id for one in newest] == ["r1199", "r1198", "r1197"]
    assert newest[0].created_at == WHEN
    assert newest[0].created_at.tzinfo is UTC
    assert (newest[0].mean_tbt_s, newest[0].gateway_id) == (None, "g1")


async def test_a_row_that_the_database_refuses_is_lost_alone(ledger_url: str) -> None:
    async with open_ledger(ledger_url) as ledger:
        for number in range(5):
            ledger.record(row(number, endpoint=None) if number == 2 else row(number))
        await until_written(ledger)
        ledger.record(row(7))
    assert (ledger.rows.num_written, ledger.rows.num_lost) == (5, 1)
    async with open_ledger(ledger_url) as again:
        assert [one.request_id for one in await again.recent(9)] == ["r7", "r4", "r3", "r1", "r0"]


async def test_what_no_database_takes_is_replaced(ledger_url: str) -> None:
    async with open_ledger(ledger_url) as ledger:
        ledger.record(row(1, error="a\0b \ud800"))
    async with open_ledger(ledger_url) as again:
        assert [one.error for one in await again.recent(9)] == ["a\N{REPLACEMENT CHARACTER}b ?"]


async def test_no_row_has_a_name_that_no_database_takes(ledger_url: str) -> None:
    async with open_ledger(ledger_url) as ledger:
        assert await ledger.outcomes.of("a\0") is None
        assert await ledger.responses.chain("a\0", "tenant", WHEN, 9) == []
        with pytest.raises(NotFound):
            await ledger.files.get("a\0", "tenant", WHEN)


async def test_rows_survive_a_block_that_fails(ledger_url: str) -> None:
    async def fail() -> None:
        async with open_ledger(ledger_url) as ledger:
            ledger.record(row(1))
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        await fail()
    async with open_ledger(ledger_url) as again:
        assert [one.request_id for one in await again.recent(9)] == ["r1"]


async def test_a_locked_database_loses_nothing_and_holds_nobody_up(tmp_path: Path) -> None:
    async with open_ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
        other = sqlite3.connect(tmp_path / "ledger.db")
        other.execute("BEGIN IMMEDIATE")
        slowest_s = 0.0
        for number in range(50):
            began_s = time.perf_counter()
            ledger.record(row(number))
            slowest_s = max(slowest_s, time.perf_counter() - began_s)
            await asyncio.sleep(0)
        assert len(ledger.rows) == 50
        assert await ledger.recent(9) == []  # readers see the ledger of before
        other.rollback()
        other.close()
        await until_written(ledger)
        assert len(await ledger.recent(99)) == 50
    assert slowest_s < 1.0, "a locked database has it wait two seconds"


async def test_a_server_that_stands_still_holds_nobody_up(postgresql: PostgresqlServer) -> None:
    url = postgresql.new_database()
    async with open_ledger(url) as ledger, open_database(url) as database:
        ledger.record(row(0))
        await until_written(ledger)
        postgresql.signal(signal.SIGSTOP)
        try:
            for number in range(1, 4):
                ledger.record(row(number))
            with pytest.raises(Unavailable, match="did not answer"):
                await database.run(lambda session: session.execute(text("SELECT 1")), deadline_s=0.2)
            assert len(ledger.rows) == 3
        finally:
            postgresql.signal(signal.SIGCONT)
        await until_written(ledger)
        assert len(await ledger.recent(9)) == 4


async def test_a_database_that_was_never_reached_says_why() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]  # nobody listens there afterwards
    async with open_ledger(f"postgresql://me@127.0.0.1:{port}/ledger", may_be_away=True) as ledger:
        for _ in range(2):
            with pytest.raises(Unavailable, match="refused"):
                await ledger.recent(1)
            with pytest.raises(Unavailable, match="refused"):
                await ledger.join()


async def test_a_database_that_went_away_and_came_back(tmp_path: Path) -> None:
    file = tmp_path / "ledger.db"
    async with open_ledger(f"sqlite:///{file}") as ledger:
        with sqlite3.connect(file) as connection:
            connection.execute("alter table requests rename to elsewhere")
        connection.close()
        ledger.record(row(1))
        with pytest.raises(Unavailable):
            await ledger.recent(1)
        with sqlite3.connect(file) as connection:
            connection.execute("alter table elsewhere rename to requests")
        connection.close()
        await until_written(ledger)
    assert (ledger.rows.num_written, ledger.rows.num_lost) == (1, 0)


async def test_outputs_of_others_after_a_row(ledger_url: str) -> None:
    async with open_ledger(ledger_url, "mine") as ledger:
        ledger.record(row(11))
        await until_written(ledger)
        assert await ledger.outputs.after(0, 9, but_of="mine") == (1, [])  # nobody reads row 1 again
    async with open_ledger(ledger_url, "theirs") as ledger:
        ledger.record(row(12))
        ledger.record(row(13, status="cancelled"))
        ledger.record(row(14, num_outputs=2))
        ledger.record(row(15, qos_class="gold", prompt_tokens=6))
        ledger.record(row(16, status="cancelled"))
        await until_written(ledger)
        assert await ledger.outputs.after(0, 9, but_of="mine") == (
            6,
            [OutputSample(2, "default", 5, 12), OutputSample(5, "gold", 6, 15)],
        )
        assert await ledger.outputs.after(0, 1, but_of="mine") == (6, [OutputSample(5, "gold", 6, 15)])
        assert await ledger.outputs.after(6, 9, but_of="mine") == (6, [])


async def test_profiles_and_plans_are_kept(ledger_url: str) -> None:
    now = datetime.now(UTC)
    async with open_ledger(ledger_url) as ledger:
        for b in (0.5, 0.25):
            await ledger.profiles.put(StoredProfile("prefill cpu", now, (0.0, b, 0.0), (0.0, 0.0, 0.0)))
        assert await ledger.plans.newest(9) == []
        made = [
            await ledger.plans.add(NewPlan("m", {"rate": rate}, {"prefill": 1}, {"goodput": 3.5})) for rate in (1, 2)
        ]
    async with open_ledger(ledger_url) as again:
        assert await again.profiles.all() == [StoredProfile("prefill cpu", now, (0.0, 0.25, 0.0), (0.0, 0.0, 0.0))]
        assert await again.plans.newest(9) == made[::-1]
        assert [one.plan.goal for one in await again.plans.newest(1)] == [{"rate": 2}]


@pytest.mark.parametrize("url", ["no url", "nodb://x", "mysql://x/y", "postgresql://h:port/x"])
async def test_a_wrong_url_is_a_clear_error(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidRequest, match="ledger's URL cannot be used") as caught:
        async with open_ledger(url):
            pass
    assert caught.value.param == "ledger_url"


async def test_a_file_that_is_no_database_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("no database, but a text")
    with pytest.raises(InvalidRequest, match=r"cannot be used: file is not a database \(the ledger is .*notes"):
        async with open_ledger(f"sqlite:///{tmp_path / 'notes'}"):
            pass


async def test_a_database_that_is_not_there_is_a_clear_error(tmp_path: Path) -> None:
    for url in (f"sqlite:///{tmp_path}", f"postgresql://me@/x?host={tmp_path}"):
        with pytest.raises(Unavailable, match="ledger's database does not answer"):
            async with open_ledger(url):
                pass


async def test_a_measured_profile_replaces_the_one_of_its_name(ledger_url: str) -> None:
    now = datetime.now(UTC)
    async with open_ledger(ledger_url) as ledger:
        for name, speed in (("b", 1), ("a", 2), ("b", 3)):
            await ledger.measured_profiles.put(NamedProfile(name, now, {"speed": speed}))
    async with open_ledger(ledger_url) as again:
        found = await again.measured_profiles.all()
    assert found == [NamedProfile("a", now, {"speed": 2}), NamedProfile("b", now, {"speed": 3})]


async def test_only_the_owner_may_read_a_new_file_and_its_directory(tmp_path: Path) -> None:
    file = tmp_path / "state" / "ledger.db"
    async with open_ledger(f"sqlite:///{file}"):
        made = [path.stat().st_mode & 0o777 for path in (file.parent, *file.parent.glob("ledger.db*"))]
    assert made == [0o700, *(0o600 for _ in made[1:])]
    assert len(made) > 1
