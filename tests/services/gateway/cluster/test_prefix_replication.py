"""A prefix that is asked for again is copied: to the store near by, or without stores to a worker that is less busy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from halfmoon.background import cancelled
from halfmoon.errors import NoCapacity, Unavailable
from halfmoon.kv.keys import block_keys, root_key
from halfmoon.kv.kv_layout import KVLayout
from halfmoon.pb.gateway_pb2 import BlockEvents
from halfmoon.pb.kvstore_pb2 import (
    DRAM,
    BlockPlace,
    ReplicateRequest,
    ReplicateResponse,
    WatchRequest,
    WatchResponse,
)
from halfmoon.pb.kvstore_pb2_grpc import KVStoreServicer, add_KVStoreServicer_to_server
from halfmoon.pb.prefill_pb2 import KVSource, PrefillEvent, PrefillRequest
from halfmoon.pb.prefill_pb2_grpc import PrefillServicer, add_PrefillServicer_to_server
from halfmoon.rpc.server import running_server
from halfmoon.rpc.telemetry.rpc_metrics import RpcMetrics
from services.gateway.cluster.membership import Membership
from services.gateway.cluster.prefix_replication import PrefixCopies, _WorkerCopy
from tests.services.gateway.fakes import FINGERPRINT, LAYOUT, running_fleet
from tests.services.gateway.test_gateway_admission import PROMPT, complete, measured

KV = KVLayout(LAYOUT.num_layers, LAYOUT.num_kv_heads, LAYOUT.head_dim, "float32", LAYOUT.block_tokens)


def keys_of(salt: str) -> list[bytes]:
    return block_keys(root_key(FINGERPRINT, KV, salt.encode()), list(PROMPT.encode()), KV.block_tokens)


KEYS = keys_of("")


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a store may take longer to answer than a copy is worth."""
    monkeypatch.setattr("services.gateway.cluster.prefix_replication._DEADLINE_S", 60.0)


class FakeStore(KVStoreServicer):
    """Keeps what it is asked; refuses when it is told to."""

    def __init__(self, held: Sequence[bytes], is_full: bool) -> None:
        self.asked: list[ReplicateRequest] = []
        self._held = held
        self._is_full = is_full

    async def Watch(self, request: WatchRequest, context: grpc.aio.ServicerContext) -> AsyncIterator[WatchResponse]:
        blocks = [BlockPlace(key=key, tiers=[DRAM]) for key in self._held]
        yield WatchResponse(sequence=1, is_snapshot=True, is_last_part=True, blocks=blocks)
        await asyncio.Event().wait()

    async def Replicate(self, request: ReplicateRequest, context: grpc.aio.ServicerContext) -> ReplicateResponse:
        self.asked.append(request)
        if self._is_full:
            raise NoCapacity("enough is to be copied")
        return ReplicateResponse(num_coming=len(request.keys))


@asynccontextmanager
async def fake_store(held: Sequence[bytes] = (), is_full: bool = False) -> AsyncIterator[tuple[FakeStore, str]]:
    store = FakeStore(held, is_full)  # type: ignore[abstract]
    services = [lambda server: add_KVStoreServicer_to_server(store, server)]
    async with running_server("127.0.0.1:0", services, RpcMetrics(CollectorRegistry()), grace_s=0) as server:
        yield store, f"127.0.0.1:{server.port}"


async def placed_near(
    tmp_path: Path, *stores: str, num_held: int, times: int = 2, salt: str = "", **gateway: Any
) -> str:
    """A worker near the first store is asked so often for a prompt whose stores hold `num_held` blocks in all.

    Gives the gateway's metrics.
    """
    named = {"cache_salt": salt} if salt else {}
    async with running_fleet(tmp_path, kv_store=stores, **gateway) as fleet:
        near = await fleet.add("near", "prefill", kv_store=stores[0])
        await fleet.add("d0", "decode")
        measured(fleet, near, 0.001)
        await fleet.until_told(lambda: fleet.cluster.membership.index.num_pairs == num_held)
        for _ in range(times):
            assert (await complete(fleet, **named))[0] == 200
        copies = fleet.gateway.routing.copies
        await fleet.until_told(lambda: copies.is_idle)
        return await fleet.metrics()


async def test_a_prefix_that_is_asked_for_again_is_copied_once(tmp_path: Path) -> None:
    async with fake_store() as (store, address), fake_store(KEYS[:6]) as (_, far):
        metrics = await placed_near(tmp_path, address, far, num_held=6, times=3)
    [request] = store.asked
    assert (request.source, list(request.keys), request.layout.block_tokens) == (far, KEYS[:6], KV.block_tokens)
    assert 'halfmoon_gateway_store_copies_total{outcome="asked"} 1.0' in metrics
    for decision, num in (("cold", 1), ("copy", 1), ("asked", 1)):
        assert f'pool_decisions_total{{decision="copy",reason="{decision}"}} {num}.0' in metrics


async def test_fragments_come_from_each_store_that_has_some(tmp_path: Path) -> None:
    async with (
        fake_store(KEYS[2:3]) as (store, address),
        fake_store([*KEYS[:2], *KEYS[5:6]]) as (_, one),
        fake_store(KEYS[:5]) as (_, other),
    ):
        await placed_near(tmp_path, address, one, other, num_held=9)
    assert [request.source for request in store.asked] == sorted([one, other])
    assert {tuple(request.keys) for request in store.asked} == {tuple(KEYS[:6])}


async def test_a_tenants_prefix_is_copied_as_the_tenants(tmp_path: Path) -> None:
    async with fake_store() as (store, address), fake_store(keys_of("mine")[:6]) as (_, far):
        await placed_near(tmp_path, address, far, num_held=6, salt="mine")
    [request] = store.asked
    assert (request.tenant_salt, list(request.keys)) == (b"mine", keys_of("mine")[:6])


async def test_nothing_is_asked_where_nothing_would_be_gained(tmp_path: Path) -> None:
    async with fake_store(KEYS[:6]) as (store, address), fake_store(KEYS[:6]) as (_, far):
        metrics = await placed_near(tmp_path / "here", address, far, num_held=12)
        assert 'pool_decisions_total{decision="copy",reason="here"} 1.0' in metrics
        await placed_near(tmp_path / "once", address, far, num_held=12, times=1)
    assert store.asked == []
    async with fake_store() as (store, address), fake_store(KEYS[:6]) as (_, far):
        await placed_near(tmp_path / "off", address, far, num_held=6, replica_mbps=0.0)
        await placed_near(tmp_path / "aware", address, far, num_held=6, placement="cache-aware")
    assert store.asked == []


async def test_a_store_that_refuses_changes_nothing_for_the_request(tmp_path: Path) -> None:
    async with fake_store(is_full=True) as (store, address), fake_store(KEYS[:6]) as (_, far):
        metrics = await placed_near(tmp_path, address, far, num_held=6)
    assert len(store.asked) == 1
    assert 'halfmoon_gateway_store_copies_total{outcome="failed"} 1.0' in metrics


async def spread(tmp_path: Path, times: int, **gateway: Any) -> tuple[list[PrefillRequest], str, str]:
    """One of two workers has six blocks of a prompt that is asked for so often; what the other one is told to copy."""
    async with running_fleet(tmp_path, **gateway) as fleet:
        holder = await fleet.add("holder", "prefill", can_fetch=True)
        other = await fleet.add("other", "prefill", can_fetch=True)
        await fleet.add("d0", "decode")
        for worker in (holder, other):
            measured(fleet, worker, 0.001)
        stored = b"".join(key[:8] for key in KEYS[:6])
        holder.loads.put_nowait(BlockEvents(sequence=0, is_snapshot=True, stored=stored))
        await fleet.until_told(lambda: fleet.cluster.membership.index.num_pairs == 6)
        copies = fleet.gateway.routing.copies
        for _ in range(times):
            assert (await complete(fleet))[0] == 200
            await fleet.until_told(lambda: copies.is_idle)
            if any(request.is_copy for request in other.calls.prefills):
                break
        assert not [request for request in holder.calls.prefills if request.is_copy]
        return [one for one in other.calls.prefills if one.is_copy], holder.address, await fleet.metrics()


async def test_without_stores_a_worker_loads_a_hot_prefix_before_it_is_asked_for_it(tmp_path: Path) -> None:
    [copy], holder, metrics = await spread(tmp_path, times=40)  # whose queue is shorter is a matter of time
    num_tokens = 6 * KV.block_tokens + 1
    assert list(copy.generation.prompt_token_ids) == list(PROMPT.encode())[:num_tokens]
    assert copy.generation.sampling.max_tokens == 1
    assert [(one.address, one.kind, one.num_blocks) for one in copy.sources] == [(holder, KVSource.WORKER, 6)]
    assert 'halfmoon_gateway_store_copies_total{outcome="asked"} 1.0' in metrics
    for decision, num in (("cold", 4), ("copy", 1)):
        assert f'halfmoon_gateway_pool_decisions_total{{decision="copy",reason="{decision}"}} {num}.0' in metrics


async def test_no_worker_copies_what_is_rarely_asked_for_or_where_copies_are_off(tmp_path: Path) -> None:
    assert (await spread(tmp_path / "rare", times=4))[0] == []
    assert (await spread(tmp_path / "off", times=7, replica_mbps=0.0))[0] == []
    assert (await spread(tmp_path / "aware", times=7, placement="cache-aware"))[0] == []


class FakeWorker(PrefillServicer):
    """Copies nothing before as many are asked for as it waits for, and nothing from some holders."""

    def __init__(self, num_at_once: int = 1, broken: Sequence[str] = ()) -> None:
        self.asked: list[PrefillRequest] = []
        self._num_at_once = num_at_once
        self._broken = broken
        self._may_end = asyncio.Event()

    async def Prefill(self, request: PrefillRequest, context: grpc.aio.ServicerContext) -> AsyncIterator[PrefillEvent]:
        self.asked.append(request)
        if len(self.asked) >= self._num_at_once:
            self._may_end.set()
        await self._may_end.wait()
        if any(source.address in self._broken for source in request.sources):
            raise Unavailable("all holders have failed")
        yield PrefillEvent()


@asynccontextmanager
async def copies_to(worker: FakeWorker) -> AsyncIterator[tuple[PrefixCopies, str]]:
    services = [lambda server: add_PrefillServicer_to_server(worker, server)]
    copies = PrefixCopies(Membership(FINGERPRINT, 1.0), 1e6)
    async with running_server("127.0.0.1:0", services, RpcMetrics(CollectorRegistry()), grace_s=0) as server:
        asking = asyncio.create_task(copies.ask_all())
        yield copies, f"127.0.0.1:{server.port}"
        await cancelled(asking)


def copy_from(*holders: str) -> PrefillRequest:
    return PrefillRequest(sources=[KVSource(address=holder) for holder in holders], is_copy=True)


async def settled(copies: PrefixCopies) -> None:
    async with asyncio.timeout(20):
        while not copies.is_idle:  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_copies_do_not_wait_for_each_other() -> None:
    worker = FakeWorker(num_at_once=3)
    async with copies_to(worker) as (copies, target):
        for number in range(3):
            copies._request(_WorkerCopy(target, [copy_from(f"h{number}:1")]))
        await settled(copies)
    assert copies.num_copies == {"asked": 3}


async def test_a_copy_whose_holders_fail_is_asked_of_the_next_ones() -> None:
    worker = FakeWorker(broken=["h0:1", "h2:1"])
    async with copies_to(worker) as (copies, target):
        copies._request(_WorkerCopy(target, [copy_from("h0:1"), copy_from("h1:1")]))
        await settled(copies)
        assert [request.sources[0].address for request in worker.asked] == ["h0:1", "h1:1"]
        copies._request(_WorkerCopy(target, [copy_from("h0:1"), copy_from("h2:1")]))
        await settled(copies)
    assert copies.num_copies == {"asked": 1, "failed": 1}
