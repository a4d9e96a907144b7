"""Simulated workers share one pool of KV: stores and each other's caches, by the real calls, in modelled time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import pytest

from halfmoon.catalog.entry import Tier
from halfmoon.kv.kv_layout import KVLayout
from halfmoon.pb import prefill_pb2, prefill_pb2_grpc, types_pb2
from halfmoon.policy.models.latency import PrefillModel, StepModel
from halfmoon.rpc.peer import Peer
from halfmoon.sim.latency_sources.worker_profile import WorkerProfile, coefficients
from halfmoon.worker.simulated.simulated_links import SimulatedLinks
from halfmoon.worker.simulated.simulation import SimulatedWorker
from services.kvstore.assembly import Store
from tests.rpc.store.test_kvstore_client import served
from tests.services.gateway.fakes import FINGERPRINT
from tests.services.simulation.test_simulated_fleet import INSTANTLY, SimulatedFleet, running_fleet

BLOCK = 8
PROMPT = [(7 * at + 3) % 125 for at in range(83)]
KNOWN = 80  # tokens in whole blocks
LATENCY = coefficients("slow", PrefillModel(b=0.02), StepModel(), 16_000_000, 1)
COMPUTES_SLOWLY = replace(INSTANTLY, name="slow", latency=LATENCY, max_batch_tokens=4096)


@asynccontextmanager
async def pooled(
    tmp_path: Path, num_stores: int, profile: WorkerProfile = COMPUTES_SLOWLY
) -> AsyncIterator[tuple[SimulatedFleet, list[Store]]]:
    """A fleet whose workers use so many stores."""
    async with AsyncExitStack() as stack:
        stores = [await stack.enter_async_context(served()) for _ in range(num_stores)]
        addresses = tuple(address for _, address in stores)
        fleet = await stack.enter_async_context(running_fleet(tmp_path, profile, addresses))
        yield fleet, [store for store, _ in stores]


async def prefilled(
    worker: SimulatedWorker, name: str, *holders: SimulatedWorker, prompt: list[int] = PROMPT, salt: bytes = b""
) -> prefill_pb2.FirstToken:
    """The first token's event of a prompt, with these workers as its sources."""
    generation = types_pb2.Generation(
        request_id=name,
        model_fingerprint=FINGERPRINT,
        prompt_token_ids=prompt,
        tenant_salt=salt,
        sampling=types_pb2.SamplingParams(max_tokens=1, top_p=1, repetition_penalty=1, ignore_eos=True),
    )
    request = prefill_pb2.PrefillRequest(generation=generation, decode_address="unused:1")
    for holder in holders:
        address = await holder.address
        request.sources.add(address=address, kind=prefill_pb2.KVSource.WORKER, num_blocks=KNOWN // BLOCK)
    async with Peer(await worker.address) as peer:
        call = prefill_pb2_grpc.PrefillStub(peer.channel).Prefill
        async with peer.stream(call, request, deadline_s=60) as events:
            return cast(prefill_pb2.FirstToken, (await anext(events)).first_token)


def restored(worker: SimulatedWorker) -> dict[str, float]:
    """Prompt tokens by where their KV came from, other than computing."""
    sample = partial(worker.metrics.registry.get_sample_value, "halfmoon_restored_tokens_total")
    counts = {source: sample({"source": source}) or 0 for source in ("cache", "store", "worker")}
    return {source: count for source, count in counts.items() if count}


def num_stored(*stores: Store) -> int:
    return sum(store.pool.catalog.num_blocks(Tier.DRAM) for store in stores)


async def test_a_prompt_is_restored_from_whichever_store_has_it(tmp_path: Path) -> None:
    async with pooled(tmp_path, 2) as (fleet, stores):
        await fleet.add(3, 0)
        first, second, third = fleet.simulation.workers()
        assert (await prefilled(first, "first")).num_cached_tokens == 0
        await fleet.until(lambda: num_stored(*stores) == KNOWN // BLOCK)
        assert [num_stored(store) for store in stores] == [KNOWN // BLOCK, 0], "its own store has it, once"
        for worker in (third, second):  # with the same store, and with the other one
            found = await prefilled(worker, worker.worker_id)
            assert found.num_cached_tokens == found.num_loaded_tokens > 0  # on a busy machine it computes some
            assert restored(worker) == {"store": found.num_loaded_tokens}
        assert (await prefilled(second, "again")).num_loaded_tokens == 0
        assert restored(second)["cache"] == KNOWN
        assert (await prefilled(second, "salted", salt=b"other")).num_cached_tokens == 0
        assert num_stored(*stores) in (KNOWN // BLOCK, 2 * KNOWN // BLOCK)  # the salted one may be written by now


async def test_a_prompt_is_restored_from_another_worker(tmp_path: Path) -> None:
    async with pooled(tmp_path, 0) as (fleet, _):
        await fleet.add(2, 0)
        holder, worker = fleet.simulation.workers()
        await prefilled(holder, "first")
        found = await prefilled(worker, "second", holder)
        assert found.num_cached_tokens == found.num_loaded_tokens > 0
        assert restored(worker) == {"worker": found.num_loaded_tokens}
        assert holder.metrics.registry.get_sample_value("halfmoon_cache_reads_total", {"outcome": "served"})


async def test_what_a_lost_holder_had_is_computed(tmp_path: Path) -> None:
    async with pooled(tmp_path, 0) as (fleet, _):
        await fleet.add(2, 0)
        holder, worker = fleet.simulation.workers()
        await prefilled(holder, "first")
        await fleet.simulation.kill(holder)
        assert (await prefilled(worker, "second", holder)).num_cached_tokens == 0
        assert restored(worker) == {}


async def test_a_holder_that_is_lost_in_the_middle_costs_no_request(tmp_path: Path) -> None:
    block_s = 0.05
    slow_link = replace(COMPUTES_SLOWLY, link_bytes_per_s=BLOCK / block_s)  # of one byte a token
    async with pooled(tmp_path, 0, slow_link) as (fleet, _):
        await fleet.add(2, 0)
        holder, worker = fleet.simulation.workers()
        await prefilled(holder, "first")
        loading = asyncio.create_task(prefilled(worker, "second", holder))
        sample = partial(worker.metrics.registry.get_sample_value, "halfmoon_store_loaded_bytes_total")
        await fleet.until(lambda: sample({"tier": "worker"}))
        await fleet.simulation.kill(holder)
        assert 0 < (await loading).num_loaded_tokens < KNOWN


async def test_a_load_takes_as_long_as_the_profiles_kv() -> None:
    profile = replace(COMPUTES_SLOWLY, link_bytes_per_s=1e3, link_latency_s=0.5)
    links = SimulatedLinks(profile, lambda: 100.0)
    layout = KVLayout(1, 1, 1, "float16", BLOCK)
    estimate = links.estimate(layout)
    assert estimate is not None
    assert estimate.bandwidth_bytes_per_s == pytest.approx(1e3 * layout.token_bytes), "in the bytes that gateways count"
    assert links.crossing_s(2000) == pytest.approx(2.5)
    assert links.crossing_s(1000) == pytest.approx(3.5), "after what is on its way"
    assert SimulatedLinks(INSTANTLY, lambda: 100.0).estimate(layout) is None
