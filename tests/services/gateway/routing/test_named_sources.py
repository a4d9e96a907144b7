"""Whom a gateway names as sources of a prompt, whom it tells of them, and what it counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import pytest

from halfmoon.pb.gateway_pb2 import BlockEvents, LinkSpeed, WorkerLoad
from halfmoon.pb.prefill_pb2 import KVSource
from tests.services.gateway.cluster.test_store_watch import KEYS, MODELLED
from tests.services.gateway.fakes import FakeWorker, Fleet, running_fleet
from tests.services.gateway.test_gateway_admission import complete

HELD = b"".join(key[:8] for key in KEYS[:6])


async def holding(fleet: Fleet, name: str, **changes: Any) -> FakeWorker:
    """A worker whose prefix cache has the prompt's first six blocks."""
    worker = await fleet.add(name, "prefill", step_tokens=64, profile=MODELLED, **changes)
    worker.loads.put_nowait(BlockEvents(sequence=1, is_snapshot=True, stored=HELD))
    return worker


def load(waiting: int = 0, *links: LinkSpeed) -> WorkerLoad:
    return WorkerLoad(sequence=1, free_blocks=100, waiting_prefill_tokens=waiting, links=links)


async def counted(fleet: Fleet) -> str:
    """The metric of decisions, as Prometheus reads it."""
    async with aiohttp.ClientSession() as session, session.get(f"{fleet.http}/metrics") as response:
        lines = (await response.text()).splitlines()
    found = [line for line in lines if line.startswith('halfmoon_gateway_pool_decisions_total{decision="prefix"')]
    return "\n".join(line for line in found if not line.endswith(" 0.0"))


@pytest.mark.parametrize("can_fetch", [True, False])
async def test_a_worker_is_told_who_has_the_prefix_and_may_be_asked(tmp_path: Path, can_fetch: bool) -> None:
    async with running_fleet(tmp_path) as fleet:
        holder = await holding(fleet, "p0", can_fetch=can_fetch)
        near = await fleet.add("p1", "prefill", step_tokens=64, profile=MODELLED, can_fetch=can_fetch)
        await fleet.add("d0", "decode")
        if can_fetch:
            await near.until_caches({holder.address, near.address})
        holder.loads.put_nowait(load(waiting=1000))  # busy for far longer than the whole prompt takes
        near.loads.put_nowait(load())
        membership = fleet.cluster.membership
        await fleet.until_told(lambda: membership.index.num_pairs == 6)
        await fleet.until_told(lambda: any(one.load.waiting_prefill_tokens for one in membership.members()))
        assert (await complete(fleet))[0] == 200
        (request,) = near.calls.prefills
        named = KVSource(address=holder.address, kind=KVSource.WORKER, num_blocks=6)
        assert list(request.sources) == ([named] if can_fetch else [])
        reason = "worker" if can_fetch else "unknown"
        assert (
            await counted(fleet) == f'halfmoon_gateway_pool_decisions_total{{decision="prefix",reason="{reason}"}} 1.0'
        )


async def test_a_worker_that_leaves_may_no_longer_be_asked(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        first, second = [await fleet.add(name, "prefill", can_fetch=True) for name in ("p0", "p1")]
        await first.until_caches({first.address, second.address})
        second.end_registration.set()
        await first.until_caches({first.address})
