"""Clients that go away at any moment leave nothing behind: no block, no request, no task, in gateway and workers."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path

from benchmarks.gateway.disconnects import disconnect, random_case
from halfmoon.policy.models.latency import PrefillModel, StepModel
from halfmoon.sim.latency_sources.worker_profile import coefficients
from tests.services.gateway.fakes import MODEL
from tests.services.simulation.test_simulated_fleet import INSTANTLY, SimulatedFleet, running_fleet

TIMES = 100
MOST_S = 0.15
MOST_TOKENS = 3_900  # most answers would take longer than the test waits: they end because their clients went
LATENCY = coefficients("busy", PrefillModel(a=0.004), StepModel(d=0.03), 16_000_000, 1)
BUSY = replace(INSTANTLY, name="busy", latency=LATENCY, max_running=8)


def tasks() -> Counter[str]:
    """All that run, by what they do."""
    return Counter(getattr(one.get_coro(), "__qualname__", "?") for one in asyncio.all_tasks())


async def clients_come_and_go(fleet: SimulatedFleet, seed: int) -> Counter[str]:
    """The tasks that are there when all is over; those of connections between workers stay."""
    kinds = await disconnect(fleet.gateway.http, lambda rng: random_case(rng, MODEL, MOST_TOKENS), TIMES, MOST_S, seed)
    assert len(kinds) > 10
    await fleet.until_idle()
    await fleet.until(lambda: not len(fleet.gateway.cluster.router))
    return tasks()


async def test_clients_that_go_away_leave_nothing_behind(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, BUSY) as fleet:
        await fleet.add(2, 2)
        before = await clients_come_and_go(fleet, 0)  # every worker has met every other one
        await clients_come_and_go(fleet, 1)
        try:
            await fleet.until(lambda: tasks() <= before)
        except TimeoutError:
            assert tasks() - before == Counter()
        assert await fleet.text(5) == "the m"
