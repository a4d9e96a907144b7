"""A worker that drains finishes what it has accepted, hand-overs under way included, and takes nothing new."""

from __future__ import annotations

import asyncio

import pytest

from halfmoon.engine.checkpoint.checkpoint import Checkpoint
from halfmoon.errors import Unavailable
from halfmoon.pb import prefill_pb2
from tests.worker.test_aborts import Gate, stop_before
from tests.worker.test_handover import Start, generation, listening, prefilled, reference, tokens_of, until

PROMPT = [(7 * i + 3) % 125 + 3 for i in range(60)]


@pytest.mark.parametrize(("draining", "method"), [("decode", "reserve"), ("decode", "start"), ("prefill", "kv_read")])
async def test_a_hand_over_under_way_finishes(
    start_worker: Start, tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch, draining: str, method: str
) -> None:
    workers = {role: await start_worker(role) for role in ("prefill", "decode")}
    gate = Gate()
    stop_before(workers[draining], method, gate, monkeypatch)
    prefill, decode = workers["prefill"], workers["decode"]
    request = prefill_pb2.PrefillRequest(generation=generation(tiny, PROMPT, 12), decode_address=decode.peer.address)
    async with listening(decode) as steps:
        call = asyncio.create_task(prefilled(prefill, request))
        await gate.reached.wait()
        assert workers[draining].state.num_calls == 1
        workers[draining].state.draining = True
        gate.open.set()
        first, _ = await call
        tokens = [first.first_token.token.token_id, *await tokens_of(steps)]
    assert tokens == reference(tiny, PROMPT, 12)
    assert [worker.state.num_calls for worker in workers.values()] == [0, 0]


@pytest.mark.parametrize("draining", ["prefill", "decode"])
async def test_nothing_new_begins(start_worker: Start, tiny: Checkpoint, draining: str) -> None:
    workers = {role: await start_worker(role) for role in ("prefill", "decode")}
    prefill, decode = workers["prefill"], workers["decode"]
    workers[draining].state.draining = True
    request = prefill_pb2.PrefillRequest(generation=generation(tiny, PROMPT, 12), decode_address=decode.peer.address)
    async with listening(decode):
        with pytest.raises(Unavailable, match="draining"):
            await prefilled(prefill, request)


async def test_a_stream_ends_after_its_last_tokens(start_worker: Start, tiny: Checkpoint) -> None:
    worker = await start_worker("both")
    async with listening(worker) as steps:
        request = prefill_pb2.PrefillRequest(generation=generation(tiny, [5, 6, 7], 10))
        first, _ = await prefilled(worker, request)
        await until(lambda: not worker.engine.has_work())
        worker.state.router.end()
        tokens = [token.token_id for step in [step async for step in steps] for token in step.tokens]
    assert [first.first_token.token.token_id, *tokens] == reference(tiny, [5, 6, 7], 10)
    assert not worker.state.router.has_pending
