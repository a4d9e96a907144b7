"""The gateway knows what the stores beside its workers hold, and counts it where prompts are placed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import grpc
import pytest
from prometheus_client import CollectorRegistry

from halfmoon.kv.keys import block_keys, root_key
from halfmoon.kv.kv_layout import KVLayout
from halfmoon.pb.gateway_pb2 import BlockEvents, LatencyProfile, LinkSpeed, WorkerLoad
from halfmoon.pb.kvstore_pb2 import BlockEvent, BlockPlace, WatchRequest, WatchResponse
from halfmoon.pb.kvstore_pb2_grpc import KVStoreServicer, add_KVStoreServicer_to_server
from halfmoon.rpc.server import running_server
from halfmoon.rpc.telemetry.rpc_metrics import RpcMetrics
from tests.services.gateway.fakes import FINGERPRINT, LAYOUT, Fleet, running_fleet
from tests.services.gateway.test_gateway_admission import PROMPT, complete

KV = KVLayout(LAYOUT.num_layers, LAYOUT.num_kv_heads, LAYOUT.head_dim, "float32", LAYOUT.block_tokens)
KEYS = block_keys(root_key(FINGERPRINT, KV), list(PROMPT.encode()), KV.block_tokens)
PLACES = [BlockPlace(key=key, tenant_tag=bytes(8)) for key in KEYS]
MODELLED = LatencyProfile(prefill=[0.0, 1.0, 0.0])  # slow, so that a pause of this machine changes no choice


class FakeStore(KVStoreServicer):
    """Tells the latest watcher what the test puts into `messages`; None ends the stream."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[WatchResponse | None] = asyncio.Queue()
        self.num_watchers = 0

    async def Watch(self, request: WatchRequest, context: grpc.aio.ServicerContext) -> AsyncIterator[WatchResponse]:
        self.num_watchers += 1
        messages: asyncio.Queue[WatchResponse | None] = asyncio.Queue()
        self.messages = messages
        while (message := await messages.get()) is not None:
            yield message

    def snapshot(self, sequence: int, *parts: list[BlockPlace]) -> None:
        for part in parts:
            whole = WatchResponse(sequence=sequence, is_snapshot=True, is_last_part=part is parts[-1], blocks=part)
            self.messages.put_nowait(whole)

    def happened(self, sequence: int, *events: tuple[BlockEvent.Kind.ValueType, int]) -> None:
        told = [BlockEvent(kind=kind, block=PLACES[block]) for kind, block in events]
        self.messages.put_nowait(WatchResponse(sequence=sequence, events=told))


@asynccontextmanager
async def fake_store() -> AsyncIterator[tuple[FakeStore, str]]:
    store = FakeStore()  # type: ignore[abstract]
    services = [lambda server: add_KVStoreServicer_to_server(store, server)]
    async with running_server("127.0.0.1:0", services, RpcMetrics(CollectorRegistry()), grace_s=0) as server:
        yield store, f"127.0.0.1:{server.port}"


async def until_stored(fleet: Fleet, address: str, num_blocks: int) -> None:
    await fleet.until_told(lambda: fleet.cluster.membership.stores.num_blocks(address) == num_blocks)


async def test_a_store_is_followed_through_gaps_and_losses(tmp_path: Path) -> None:
    stored, moved, evicted = BlockEvent.STORED, BlockEvent.MOVED, BlockEvent.EVICTED
    async with fake_store() as (store, address), running_fleet(tmp_path) as fleet:
        worker = await fleet.add("p0", "prefill", kv_store=address)
        known = partial(until_stored, fleet, address)
        await fleet.until_told(lambda: store.num_watchers == 1)
        store.snapshot(7, PLACES[:2], PLACES[2:3])
        await known(3)
        store.happened(11, (stored, 3), (moved, 0), (stored, 4), (evicted, 4))
        await known(4)
        store.happened(13, (evicted, 0))  # 12 is missing
        await fleet.until_told(lambda: store.num_watchers == 2)
        assert fleet.cluster.membership.stores.num_blocks(address) == 4  # the better guess until then
        store.snapshot(14, PLACES[1:6])
        await known(5)
        store.messages.put_nowait(None)
        await known(0)
        await fleet.until_told(lambda: store.num_watchers == 3)
        store.snapshot(1, PLACES[:1])  # it was started again
        await known(1)
        worker.end_registration.set()
        await fleet.until_told(lambda: not fleet.cluster.membership.members())
        assert fleet.cluster.membership.index.num_pairs == 0


async def test_a_store_that_knows_no_watching_costs_nothing_else(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        await fleet.add("b0", "both", kv_store="127.0.0.1:1")
        assert (await complete(fleet))[0] == 200


@pytest.mark.parametrize(("bytes_per_s", "goes_to"), [(1e9, "near"), (1.0, "cached")])
async def test_a_prompt_in_the_store_need_not_go_to_the_busy_worker_that_has_it(
    tmp_path: Path, bytes_per_s: float, goes_to: str
) -> None:
    async with fake_store() as (store, address), running_fleet(tmp_path) as fleet:
        add = partial(fleet.add, role="prefill", step_tokens=64, profile=MODELLED, kv_store=address, can_fetch=True)
        workers = {name: await add(name) for name in ("cached", "near")}
        await fleet.add("d0", "decode")
        await fleet.until_told(lambda: store.num_watchers == 1)
        store.snapshot(1, PLACES[:6])
        await until_stored(fleet, address, 6)
        keys = b"".join(key[:8] for key in KEYS[:6])
        workers["cached"].loads.put_nowait(BlockEvents(sequence=1, is_snapshot=True, stored=keys))
        link = LinkSpeed(address=address, bandwidth_bytes_per_s=bytes_per_s, is_inbound=True)
        for name, waiting in (("cached", 30), ("near", 0)):  # 30 s, where computing the prefix takes 48
            load = WorkerLoad(sequence=1, free_blocks=100, waiting_prefill_tokens=waiting, links=[link])
            workers[name].loads.put_nowait(load)
        index = fleet.cluster.membership.index
        await fleet.until_told(lambda: index.num_pairs == 12)
        members = fleet.cluster.membership.members
        await fleet.until_told(lambda: all(one.load.links for one in members() if one.role == "prefill"))
        assert (await complete(fleet))[0] == 200
    assert [name for name, worker in workers.items() if worker.calls.prefills] == [goes_to]
