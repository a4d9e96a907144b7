"""Clients that go away at any moment leave nothing behind: no block, no request, no task, in gateway and workers."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from benchmarks.disconnects import disconnect, random_case
from halfmoon.policy.latency import PrefillModel, StepModel
from tests.services.gateway.fakes import MODEL
from tests.services.simulation.test_simulated_fleet import INSTANTLY, running_fleet

TIMES = 150
MOST_S = 0.15
MOST_TOKENS = 3_900  # most answers would take longer than the test waits: they end because their clients went
BUSY = replace(INSTANTLY, name="busy", prefill=PrefillModel(a=0.004), step=StepModel(d=0.03), max_running=8)


async def test_clients_that_go_away_leave_nothing_behind(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, BUSY) as fleet:
        await fleet.add(2, 2)
        await fleet.text(5)  # every connection between services is there
        await disconnect(fleet.gateway.http, lambda rng: random_case(rng, MODEL, 3), 30, MOST_S)
        await fleet.until_idle()
        tasks = asyncio.all_tasks()
        kinds = await disconnect(fleet.gateway.http, lambda rng: random_case(rng, MODEL, MOST_TOKENS), TIMES, MOST_S, 1)
        assert len(kinds) > 10
        await fleet.until_idle()
        await fleet.until(lambda: not len(fleet.gateway.cluster.router))
        await fleet.until(lambda: len(asyncio.all_tasks()) <= len(tasks))
        assert await fleet.text(5) == "the m"
