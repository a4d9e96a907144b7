"""Requests flow while the ledger is locked, stands still or is full; nothing that fits in its queue is lost."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from tests.ledger.postgresql import PostgresqlServer, installed_postgresql
from tests.services.gateway.fakes import Fleet, running_fleet
from tests.services.gateway.test_gateway_admission import complete


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresqlServer]:
    """These tests' own: they stop it."""
    yield from installed_postgresql()


@pytest.fixture
def postgresql(server: PostgresqlServer) -> PostgresqlServer:
    """A server that runs."""
    if server.process.poll() is not None:
        server.start()
    return server


async def answers(fleet: Fleet, num: int) -> list[int]:
    return [status for status, _, _ in await asyncio.gather(*(complete(fleet) for _ in range(num)))]


async def written(fleet: Fleet, num: int) -> str:
    """The metrics, once so many rows are written."""
    async with asyncio.timeout(30):
        while True:
            found = await fleet.metrics()
            if f'halfmoon_ledger_rows_total{{result="written"}} {num}.0' in found:
                return found
            await asyncio.sleep(0.01)  # the ledger has no event for it


async def test_a_locked_file(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        await fleet.pair()
        other = sqlite3.connect(tmp_path / "ledger.db", isolation_level=None, check_same_thread=False)
        await asyncio.to_thread(other.execute, "BEGIN IMMEDIATE")  # the gateway's own transactions end on this loop
        assert await answers(fleet, 5) == [200] * 5
        assert "halfmoon_ledger_rows_waiting 5.0" in await fleet.metrics()
        other.execute("ROLLBACK")
        other.close()
        assert 'halfmoon_ledger_rows_total{result="lost"} 0.0' in await written(fleet, 5)


async def test_a_file_that_is_gone_is_no_place_to_write_to(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        await fleet.pair()
        (tmp_path / "ledger.db").rename(tmp_path / "aside.db")
        assert await answers(fleet, 5) == [200] * 5
        assert await edited(fleet, 0, 5.0) == 503  # nobody would ever find it
        (tmp_path / "ledger.db").touch()
        assert await edited(fleet, 0, 5.0) == 503
        assert "halfmoon_ledger_rows_waiting 5.0" in await fleet.metrics()
        (tmp_path / "aside.db").replace(tmp_path / "ledger.db")
        assert 'halfmoon_ledger_rows_total{result="lost"} 0.0' in await written(fleet, 5)
        assert await edited(fleet, 0, 5.0) == 200


async def test_a_server_that_stands_still(tmp_path: Path, postgresql: PostgresqlServer) -> None:
    async with running_fleet(tmp_path, ledger_url=postgresql.new_database()) as fleet:
        await fleet.pair()
        assert await answers(fleet, 1) == [200]
        await written(fleet, 1)
        postgresql.signal(signal.SIGSTOP)
        try:
            assert await answers(fleet, 5) == [200] * 5
        finally:
            postgresql.signal(signal.SIGCONT)
        assert 'halfmoon_ledger_rows_total{result="lost"} 0.0' in await written(fleet, 6)


async def test_a_server_that_is_gone(tmp_path: Path, postgresql: PostgresqlServer) -> None:
    async with running_fleet(tmp_path, ledger_url=postgresql.new_database()) as fleet:
        await fleet.pair()
        postgresql.stop()
        assert await answers(fleet, 5) == [200] * 5
        assert "halfmoon_ledger_rows_waiting 5.0" in await fleet.metrics()
        for path, status in (("/halfmoon/v1/classes", 503), ("/halfmoon/v1/requests", 503), ("/health", 200)):
            assert await fleet_status(fleet, path) == status


async def test_a_gateway_starts_while_the_server_is_away_and_joins_it_later(
    tmp_path: Path, postgresql: PostgresqlServer
) -> None:
    """With the classes that it had last; what it serves meanwhile is written when the server is back."""
    url = postgresql.new_database()
    async with running_fleet(tmp_path, ledger_url=url) as fleet:
        await fleet.pair()
        assert await edited(fleet, 0, 5.0) == 200
    postgresql.stop()
    async with running_fleet(tmp_path, ledger_url=url, ledger_poll_s=0.01) as fleet:
        await fleet.pair()
        (strict,) = fleet.gateway.routing.admission.classes.classes
        assert (strict.name, strict.ttft_s) == ("strict", 5.0)
        assert await answers(fleet, 2) == [200] * 2
        assert await edited(fleet, 1, 6.0) == 503
        postgresql.start()
        await written(fleet, 2)
        assert await edited(fleet, 1, 6.0) == 200


async def test_a_gateway_that_never_saw_its_ledger_serves_without_classes(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, ledger_url=f"postgresql://nobody@/none?host={tmp_path}") as fleet:
        await fleet.pair()
        assert await answers(fleet, 2) == [200] * 2
        assert await fleet_status(fleet, "/halfmoon/v1/classes") == 503


async def edited(fleet: Fleet, version: int, ttft_s: float) -> int:
    url, body = f"{fleet.http}/halfmoon/v1/classes/strict", {"version": version, "ttft_s": ttft_s}
    async with aiohttp.ClientSession() as session, session.put(url, json=body) as response:
        return response.status


async def fleet_status(fleet: Fleet, path: str) -> int:
    async with aiohttp.ClientSession() as session, session.get(f"{fleet.http}{path}") as response:
        return response.status
