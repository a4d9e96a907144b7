"""Hand-overs that stand still: whoever waits in vain gives up with one clear error, and nobody else waits with it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from halfmoon.engine.checkpoint.checkpoint import Checkpoint
from halfmoon.errors import DeadlineExceeded, HalfmoonError
from halfmoon.pb import prefill_pb2, prefill_pb2_grpc
from halfmoon.rpc import peer as peer_module
from halfmoon.rpc import server as server_module
from halfmoon.rpc.peer import Peer
from tests.rpc.test_keepalive import Proxy, faster
from tests.worker.conftest import RunningWorker
from tests.worker.test_aborts import PUSH, Gate, begin, stop_before
from tests.worker.test_handover import generation, listening, prefilled, until

Start = Callable[..., Awaitable[RunningWorker]]


async def nothing_is_left(prefill: RunningWorker, decode: RunningWorker) -> None:
    in_flight = partial(decode.metrics.registry.get_sample_value, "halfmoon_rpc_in_flight", {"method": PUSH})
    await until(lambda: in_flight() == 0 and prefill.num_used_blocks + decode.num_used_blocks == 0)
    for worker in (prefill, decode):
        worker.engine.check_integrity()


@pytest.mark.parametrize("method", ["kv_write", "start"])
async def test_a_receiver_that_stands_still(
    start_worker: Start, tiny: Checkpoint, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = await start_worker("prefill", stall_s=1.0), await start_worker("decode")
    gate = Gate()
    stop_before(decode, method, gate, monkeypatch)
    async with listening(decode):
        with pytest.raises(DeadlineExceeded, match=r"did not answer|no progress"):
            await begin(prefill, decode, tiny)
        assert gate.reached.is_set()
        await nothing_is_left(prefill, decode)


async def test_a_link_that_swallows_everything(
    start_worker: Start, tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = await start_worker("prefill", stall_s=1.0), await start_worker("decode", lease_s=1.0)
    gate, proxy = Gate(), Proxy()
    stop_before(prefill, "kv_read", gate, monkeypatch)
    read = partial(decode.metrics.registry.get_sample_value, "halfmoon_rpc_handled_total")
    async with listening(decode), proxy.to(int(decode.peer.address.rpartition(":")[2])) as port:
        request = prefill_pb2.PrefillRequest(
            generation=generation(tiny, [5] * 60, 12), decode_address=f"127.0.0.1:{port}"
        )
        call = asyncio.create_task(prefilled(prefill, request))
        await gate.reached.wait()
        assert decode.num_used_blocks
        proxy.swallows = True
        gate.open.set()
        with pytest.raises(DeadlineExceeded):
            await call
        await nothing_is_left(prefill, decode)
        assert read({"method": PUSH, "status": "DEADLINE_EXCEEDED"}) == 1


async def test_a_gateway_that_vanishes_without_a_word(
    start_worker: Start, tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pings are the lease of what the prefill worker holds for it, and of what that one reserved."""
    monkeypatch.setattr(peer_module, "CHANNEL_OPTIONS", faster(peer_module.CHANNEL_OPTIONS))
    monkeypatch.setattr(server_module, "_OPTIONS", faster(server_module._OPTIONS))
    prefill, decode = await start_worker("prefill"), await start_worker("decode")
    gate, proxy = Gate(), Proxy()
    stop_before(decode, "start", gate, monkeypatch)
    async with (
        listening(decode),
        proxy.to(int(prefill.peer.address.rpartition(":")[2])) as port,
        Peer(f"127.0.0.1:{port}") as gateway,
    ):
        stub = prefill_pb2_grpc.PrefillStub(gateway.channel)
        request = prefill_pb2.PrefillRequest(
            generation=generation(tiny, [5] * 60, 12), decode_address=decode.peer.address
        )
        async with gateway.stream(stub.Prefill, request, deadline_s=60) as events:
            await anext(events)
            await gate.reached.wait()
            assert prefill.num_used_blocks
            proxy.swallows = True
            with pytest.raises(HalfmoonError):
                await anext(events)
            await nothing_is_left(prefill, decode)


async def test_others_pass_one_that_stands_still(
    start_worker: Start, tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the same link and on another one."""
    prefill = await start_worker("prefill", num_blocks=64)
    decode, other = await start_worker("decode"), await start_worker("decode")
    gate = Gate()
    stop_before(decode, "kv_write", gate, monkeypatch)
    async with listening(decode), listening(other):
        call = begin(prefill, decode, tiny)
        await gate.reached.wait()
        for name, to in (("same link", decode), ("other link", other)):
            request = prefill_pb2.PrefillRequest(
                generation=generation(tiny, [5] * 60, 2, name), decode_address=to.peer.address
            )
            assert len(await prefilled(prefill, request)) == 2
        assert not call.done()
        gate.open.set()
        assert len(await call) == 2
