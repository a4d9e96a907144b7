"""Whoever ends a hand-over, at whatever moment: both ends hear of it and both pools are whole."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from halfmoon.engine.checkpoint.checkpoint import Checkpoint
from halfmoon.engine.kv_memory.kv_watch import KVWatch
from halfmoon.errors import Cancelled, HalfmoonError, Unavailable
from halfmoon.kv import frame_plan
from halfmoon.kv.frame import plan_frames
from halfmoon.pb import decode_pb2, prefill_pb2
from tests.worker.conftest import RunningWorker
from tests.worker.test_handover import generation, listening, prefilled, until

Start = Callable[..., Awaitable[RunningWorker]]
PUSH = "/halfmoon.KVTransfer/Push"
FRAME_TOKENS = 30
PROMPT = [(7 * i + 3) % 125 + 3 for i in range(2 * FRAME_TOKENS)]
NUM_FRAMES = 4  # at least: two layers of twice so many tokens


@dataclass
class Gate:
    """Where the hand-over stops until the abort has been told."""

    reached: asyncio.Event = field(default_factory=asyncio.Event)
    open: asyncio.Event = field(default_factory=asyncio.Event)

    async def stop(self) -> None:
        self.reached.set()
        await self.open.wait()


def stop_before(worker: RunningWorker, method: str, gate: Gate, monkeypatch: pytest.MonkeyPatch, nth: int = 0) -> None:
    """The `nth` call of a method of the worker's asynchronous engine waits at the gate."""
    call = getattr(worker.async_engine, method)
    num_calls = 0

    async def gated(*args: Any, **options: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == nth + 1:
            await gate.stop()
        return await call(*args, **options)

    monkeypatch.setattr(worker.async_engine, method, gated)


@pytest.fixture(autouse=True)
def _several_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_plan, "MIN_FRAME_BYTES", 1)
    monkeypatch.setattr(frame_plan, "MIN_FRAME_TOKENS", 1)
    most_bytes = FRAME_TOKENS * 2 * 2 * 8 * 4  # of one layer: K and V of 2 heads of size 8 in float32
    monkeypatch.setattr(frame_plan, "plan_frames", partial(plan_frames, max_payload_bytes=most_bytes))
    monkeypatch.setattr(KVWatch, "_frame_layers", lambda watch, num_tokens: 1)


@pytest.fixture
async def workers(start_worker: Start) -> tuple[RunningWorker, RunningWorker]:
    prefill = await start_worker("prefill", max_batch_tokens=FRAME_TOKENS, max_running=8)
    return prefill, await start_worker("decode")


async def cancel_rpc(worker: RunningWorker) -> None:
    request = decode_pb2.CancelRequest(request_ids=["r"])
    await worker.peer.call(worker.decode.Cancel, request, deadline_s=30)


async def abort(who: str, prefill: RunningWorker, decode: RunningWorker, call: asyncio.Task[Any]) -> None:
    match who:
        case "client":
            call.cancel()
        case "gateway, at the prefill worker":
            await cancel_rpc(prefill)
        case "gateway, at the decode worker":
            await cancel_rpc(decode)
        case "prefill engine":
            assert await prefill.async_engine.cancel("r")
        case "decode engine":
            assert await decode.async_engine.cancel("r")


WHO = ["client", "gateway, at the prefill worker", "gateway, at the decode worker", "prefill engine", "decode engine"]


async def check_ended(prefill: RunningWorker, decode: RunningWorker, call: asyncio.Task[Any]) -> None:
    with pytest.raises((Cancelled, Unavailable, asyncio.CancelledError)):  # gRPC may lose a status: see docs/log/rpc.md
        await call
    in_flight = partial(decode.metrics.registry.get_sample_value, "halfmoon_rpc_in_flight", {"method": PUSH})
    await until(lambda: in_flight() == 0 and prefill.num_used_blocks + decode.num_used_blocks == 0)
    for worker in (prefill, decode):
        stats = await worker.async_engine.stats()
        assert (stats.num_held, stats.num_reserved, stats.num_running, stats.num_waiting) == (0, 0, 0, 0)
        worker.engine.check_integrity()


def begin(prefill: RunningWorker, decode: RunningWorker, tiny: Checkpoint) -> asyncio.Task[Any]:
    request = prefill_pb2.PrefillRequest(generation=generation(tiny, PROMPT, 12), decode_address=decode.peer.address)
    return asyncio.create_task(prefilled(prefill, request))


# The worker that stops, before which call of its engine, and before which of those calls.
STOPS = [
    *(("decode", "kv_write", nth) for nth in range(NUM_FRAMES)),
    *(("prefill", "kv_read", nth) for nth in (0, NUM_FRAMES - 1)),
    ("decode", "reserve", 0),
    ("decode", "start", 0),
]
UNABLE = {"reserve": "engine", "start": "prefill"}  # it does not know the request yet, or not any more


@pytest.mark.parametrize(
    ("who", "stops", "method", "nth"),
    [(who, *stop) for stop in STOPS for who in WHO if UNABLE.get(stop[1], "nobody") not in who],
)
async def test_before_a_call(
    who: str,
    stops: str,
    method: str,
    nth: int,
    workers: tuple[RunningWorker, RunningWorker],
    tiny: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prefill, decode = workers
    gate = Gate()
    stop_before(prefill if stops == "prefill" else decode, method, gate, monkeypatch, nth)
    async with listening(decode):
        call = begin(prefill, decode, tiny)
        await gate.reached.wait()
        await abort(who, prefill, decode, call)
        gate.open.set()
        await check_ended(prefill, decode, call)


@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("copy", ["read", "write"])
async def test_in_the_middle_of_a_copy(
    who: str, copy: str, workers: tuple[RunningWorker, RunningWorker], tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy holds the sequence's lock; what ends the request waits for it, and only then are blocks free."""
    prefill, decode = workers
    memory = (prefill if copy == "read" else decode).engine._kv._memory
    do_copy, go_on = getattr(memory, copy), threading.Event()
    reached, loop = asyncio.Event(), asyncio.get_running_loop()

    def slow(*args: Any) -> Any:
        loop.call_soon_threadsafe(reached.set)
        assert go_on.wait(30)
        return do_copy(*args)

    monkeypatch.setattr(memory, copy, slow)
    async with listening(decode):
        call = begin(prefill, decode, tiny)
        await reached.wait()
        aborting = asyncio.create_task(abort(who, prefill, decode, call))
        await asyncio.sleep(0)
        go_on.set()
        await aborting
        await check_ended(prefill, decode, call)


async def test_a_failing_engine_is_told_as_such(
    workers: tuple[RunningWorker, RunningWorker], tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = workers

    def broken(*_: object) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(prefill.engine._runner, "run", broken)
    async with listening(decode):
        with pytest.raises(HalfmoonError, match="failed while computing"):
            await begin(prefill, decode, tiny)
        await until(lambda: prefill.num_used_blocks + decode.num_used_blocks == 0)


@pytest.mark.parametrize("which", ["prefill", "decode"])
async def test_an_engine_that_ends_is_told_as_such(
    which: str, workers: tuple[RunningWorker, RunningWorker], tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not as a cancellation: the gateway is to place the request elsewhere."""
    prefill, decode = workers
    gate = Gate()
    stop_before(decode, "kv_write", gate, monkeypatch, nth=1)
    async with listening(decode):
        call = begin(prefill, decode, tiny)
        await gate.reached.wait()
        await (prefill if which == "prefill" else decode).async_engine._thread.stop()
        await until(lambda: not (prefill if which == "prefill" else decode).num_used_blocks)
        gate.open.set()
        with pytest.raises(Unavailable):
            await call
        await until(lambda: prefill.num_used_blocks + decode.num_used_blocks == 0)
