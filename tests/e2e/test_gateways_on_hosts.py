"""A gateway on each of two hosts over one ledger. Hosts are addresses of loopback, each with a `halfmoon up`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from halfmoon.rpc.credentials.issue import issue_all
from tests.e2e.system import System, running_system
from tests.e2e.test_joining_hosts import FIRST, PATIENCE_S, SECOND, free_port
from tests.ledger.postgresql import PostgresqlServer, installed_postgresql

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def postgresql() -> Iterator[PostgresqlServer]:
    yield from installed_postgresql()


async def asked(system: System, session: aiohttp.ClientSession) -> None:
    body = {"model": "demo", "prompt": "Once", "max_tokens": 40, "min_tokens": 40}
    async with session.post(f"{system.url}/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        assert (await response.json())["usage"]["completion_tokens"] == 40


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await holds():
            await asyncio.sleep(0.1)


async def test_workers_of_two_hosts_serve_both_gateways_and_one_goes_on_alone(
    postgresql: PostgresqlServer, tmp_path: Path
) -> None:
    cluster = tmp_path / "cluster"
    (cluster / "root").mkdir(parents=True)
    issue_all(cluster)
    ports = {host: free_port(host) for host in (FIRST, SECOND)}
    shared = ("--engine", "sim", "--ledger-url", postgresql.new_database())
    trust = ("--cluster-secret-file", str(cluster / "root" / "cluster_secret"))

    def on(host: str, other: str) -> tuple[str, ...]:
        where = ("--host-address", host, "--cluster-port", str(ports[host]))
        return *shared, *trust, *where, "--set", f"hosts.gateways={other}:{ports[other]}"

    async with aiohttp.ClientSession() as session:

        async def sees(system: System, number: int) -> bool:
            workers: list[dict[str, Any]] = await system.cluster(session)
            return len(workers) == number and all(
                worker["listening"] or worker["role"] == "prefill" for worker in workers
            )

        async with running_system(tmp_path / "first", *on(FIRST, SECOND)) as first:
            joins = f"halfmoon join {FIRST}:{ports[FIRST]},{SECOND}:{ports[SECOND]}"
            assert any(joins in line for line in first.printed)
            async with running_system(tmp_path / "second", *on(SECOND, FIRST)) as second:
                await until(lambda: sees(first, 4))
                await until(lambda: sees(second, 4))
                await asyncio.gather(*(asked(system, session) for system in (first, second) * 4))
            await until(lambda: sees(first, 2))  # the second host is gone
            await asyncio.gather(*(asked(first, session) for _ in range(4)))

            async def has_rows_of_both() -> bool:
                async with session.get(f"{first.url}/halfmoon/v1/requests") as response:
                    return len(await response.json()) == 12

            await until(has_rows_of_both)  # they are written behind the answers
