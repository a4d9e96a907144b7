"""A prompt placed far from its prefix has the prefix copied between the stores beside the two workers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
from prometheus_client import CollectorRegistry

from halfmoon.errors import NoCapacity
from halfmoon.kv.keys import block_keys, root_key
from halfmoon.kv.kv_layout import KVLayout
from halfmoon.pb.gateway_pb2 import BlockEvents
from halfmoon.pb.kvstore_pb2 import ReplicateRequest, ReplicateResponse
from halfmoon.pb.kvstore_pb2_grpc import KVStoreServicer, add_KVStoreServicer_to_server
from halfmoon.rpc.server import running_server
from halfmoon.rpc.telemetry.rpc_metrics import RpcMetrics
from tests.services.gateway.fakes import FINGERPRINT, LAYOUT, running_fleet
from tests.services.gateway.test_gateway_admission import PROMPT, complete, measured

KV = KVLayout(LAYOUT.num_layers, LAYOUT.num_kv_heads, LAYOUT.head_dim, "float32", LAYOUT.block_tokens)


def keys_of(salt: str) -> list[bytes]:
    return block_keys(root_key(FINGERPRINT, KV, salt.encode()), list(PROMPT.encode()), KV.block_tokens)


KEYS = keys_of("")


class FakeStore(KVStoreServicer):
    """Keeps what it is asked; refuses when it is told to."""

    def __init__(self, is_full: bool) -> None:
        self.asked: list[ReplicateRequest] = []
        self._is_full = is_full

    async def Replicate(self, request: ReplicateRequest, context: grpc.aio.ServicerContext) -> ReplicateResponse:
        self.asked.append(request)
        if self._is_full:
            raise NoCapacity("enough is to be copied")
        return ReplicateResponse(num_coming=len(request.keys))


@asynccontextmanager
async def fake_store(is_full: bool = False) -> AsyncIterator[tuple[FakeStore, str]]:
    store = FakeStore(is_full)  # type: ignore[abstract]
    services = [lambda server: add_KVStoreServicer_to_server(store, server)]
    async with running_server("127.0.0.1:0", services, RpcMetrics(CollectorRegistry()), grace_s=0) as server:
        yield store, f"127.0.0.1:{server.port}"


async def placed_far(
    tmp_path: Path, near_store: str, far_store: str, near_blocks: int = 0, times: int = 2, salt: str = ""
) -> str:
    """The far worker has six blocks and is slow; gives the gateway's metrics."""
    named = {"cache_salt": salt} if salt else {}
    async with running_fleet(tmp_path) as fleet:
        far = await fleet.add("far", "prefill", kv_store=far_store)
        near = await fleet.add("near", "prefill", kv_store=near_store)
        await fleet.add("d0", "decode")
        measured(fleet, far, 1.0)
        measured(fleet, near, 0.001)
        stored = b"".join(key[:8] for key in keys_of(salt))
        far.loads.put_nowait(BlockEvents(sequence=1, is_snapshot=True, stored=stored[: 8 * 6]))
        near.loads.put_nowait(BlockEvents(sequence=1, is_snapshot=True, stored=stored[: 8 * near_blocks]))
        await fleet.until_told(lambda: fleet.cluster.membership.index.num_pairs == 6 + near_blocks)
        for _ in range(times):
            assert (await complete(fleet, **named))[0] == 200
        assert len(near.calls.prefills) == times
        copies = fleet.gateway.routing.copies
        await fleet.until(lambda: copies.is_idle)
        return await fleet.metrics()


async def test_the_store_beside_the_chosen_worker_is_asked_once(tmp_path: Path) -> None:
    async with fake_store() as (store, address):
        metrics = await placed_far(tmp_path, address, "far:1")
    [request] = store.asked
    assert (request.source, list(request.keys), request.layout.block_tokens) == ("far:1", KEYS[:6], KV.block_tokens)
    assert 'halfmoon_gateway_store_copies_total{outcome="asked"} 1.0' in metrics


async def test_a_tenants_prefix_is_copied_as_the_tenants(tmp_path: Path) -> None:
    async with fake_store() as (store, address):
        await placed_far(tmp_path, address, "far:1", salt="mine", times=1)
    [request] = store.asked
    assert (request.tenant_salt, list(request.keys)) == (b"mine", keys_of("mine")[:6])


async def test_nothing_is_asked_where_nothing_would_be_gained(tmp_path: Path) -> None:
    async with fake_store() as (store, address):
        await placed_far(tmp_path / "ratio", address, "far:1", near_blocks=3)  # half of the best is not too little
        await placed_far(tmp_path / "same", address, address)
        await placed_far(tmp_path / "none", address, "")
    assert store.asked == []


async def test_a_store_that_refuses_changes_nothing_for_the_request(tmp_path: Path) -> None:
    async with fake_store(is_full=True) as (store, address):
        metrics = await placed_far(tmp_path, address, "far:1")
    assert len(store.asked) == 1
    assert 'halfmoon_gateway_store_copies_total{outcome="failed"} 1.0' in metrics
