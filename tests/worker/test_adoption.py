"""Answers of real workers whose gateway dies: adopted by another gateway, settled, or given up."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from halfmoon.engine.checkpoint.checkpoint import Checkpoint
from halfmoon.engine.step_result import StepResult
from halfmoon.errors import NotFound, Unavailable
from halfmoon.pb import decode_pb2, prefill_pb2, types_pb2
from tests.worker.conftest import RunningWorker
from tests.worker.test_handover import Start, generation, prefilled, reference, until

KEY = b"key"
PROMPT = [9, 8, 7]


def repeatable(checkpoint: Checkpoint, max_tokens: int, gateway_id: str = "a") -> Any:
    made = generation(checkpoint, PROMPT, max_tokens)
    made.gateway_id = gateway_id
    made.repeatable.key = KEY
    made.sampling.num_top_logprobs = 2
    return made


def tokens_stream(worker: RunningWorker, gateway_id: str) -> Any:
    request = decode_pb2.TokensRequest(gateway_id=gateway_id)
    return worker.peer.stream(worker.decode.Tokens, request, deadline_s=170)


async def adopted(worker: RunningWorker, gateway_id: str, request_id: str = "r") -> list[decode_pb2.AdoptedTokens]:
    request = decode_pb2.AdoptRequest(request_id=request_id, gateway_id=gateway_id)
    async with worker.peer.stream(worker.decode.Adopt, request, deadline_s=170) as parts:
        return [part async for part in parts]


async def found(worker: RunningWorker) -> list[decode_pb2.KeptAnswer]:
    response = await worker.peer.call(worker.decode.Find, decode_pb2.FindRequest(key=KEY), deadline_s=170)
    return list(response.answers)


@pytest.mark.parametrize("is_split", [True, False])
async def test_a_gateway_dies_and_another_gets_every_token(
    start_worker: Start, tiny: Checkpoint, is_split: bool
) -> None:
    decode = await start_worker("decode" if is_split else "both")
    prefill = await start_worker("prefill") if is_split else decode
    request = prefill_pb2.PrefillRequest(
        generation=repeatable(tiny, 60), decode_address=decode.peer.address if is_split else ""
    )
    async with tokens_stream(decode, "b") as of_b:
        await anext(of_b)
        async with tokens_stream(decode, "a") as of_a:
            await anext(of_a)
            event, *_ = await prefilled(prefill, request)
            await anext(of_a)
        head, *parts = await adopted(decode, "b")
        tokens = {token.position: token for part in parts for token in part.tokens}
        while tokens[max(tokens)].finish_reason == types_pb2.NOT_FINISHED:
            tokens |= {token.position: token for token in (await anext(of_b)).tokens}
    assert [tokens[position].token_id for position in range(60)] == reference(tiny, PROMPT, 60)
    assert all(len(token.top_logprobs) == 2 for token in tokens.values())
    assert head.first == event.first_token
    await until(lambda: decode.num_used_blocks == 0)


def stop_until_cancelled(worker: RunningWorker, monkeypatch: pytest.MonkeyPatch, num_steps: int) -> None:
    """After so many steps the engine waits until a request is cancelled."""
    step, cancel, num_done, goes_on = worker.engine.step, worker.async_engine.cancel, 0, threading.Event()

    def stopped() -> StepResult:
        nonlocal num_done
        num_done += 1
        if num_done > num_steps:
            goes_on.wait()
        return step()

    async def heard(request_id: str) -> bool:
        cancelling = asyncio.ensure_future(cancel(request_id))
        await asyncio.sleep(0)  # it is queued
        goes_on.set()
        return await cancelling

    monkeypatch.setattr(worker.engine, "step", stopped)
    monkeypatch.setattr(worker.async_engine, "cancel", heard)


async def test_an_answer_that_was_settled_is_kept_and_holds_no_blocks(
    start_worker: Start, tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await start_worker("both")
    stop_until_cancelled(worker, monkeypatch, num_steps=50)
    async with tokens_stream(worker, "a") as steps:
        await anext(steps)
        await prefilled(worker, prefill_pb2.PrefillRequest(generation=repeatable(tiny, 200)))
        await anext(steps)
        settle = decode_pb2.SettleRequest(request_ids=["r"], gateway_id="a")
        await worker.peer.call(worker.decode.Settle, settle, deadline_s=170)
        await until(lambda: worker.num_used_blocks == 0)
        (answer,) = await found(worker)
        assert answer.is_settled
        assert answer.num_tokens < 200
        head, part = await adopted(worker, "a")
    assert head.has_ended
    assert len(part.tokens) == answer.num_tokens


async def test_only_the_gateway_that_has_an_answer_may_cancel_it(start_worker: Start, tiny: Checkpoint) -> None:
    worker = await start_worker("both")
    async with tokens_stream(worker, "a") as of_a, tokens_stream(worker, "b") as of_b:
        await anext(of_a)
        await anext(of_b)
        await prefilled(worker, prefill_pb2.PrefillRequest(generation=repeatable(tiny, 200)))
        await adopted(worker, "b")
        for gateway_id, num_cancelled in (("a", 0), ("b", 1)):
            cancel = decode_pb2.CancelRequest(request_ids=["r"], gateway_id=gateway_id)
            response = await worker.peer.call(worker.decode.Cancel, cancel, deadline_s=170)
            assert response.num_cancelled == num_cancelled
        with pytest.raises(NotFound):
            await adopted(worker, "b")
    await until(lambda: worker.num_used_blocks == 0)
    assert await found(worker) == []


async def test_a_gateway_that_does_not_listen_adopts_nothing(start_worker: Start, tiny: Checkpoint) -> None:
    worker = await start_worker("both")
    async with tokens_stream(worker, "a") as steps:
        await anext(steps)
        await prefilled(worker, prefill_pb2.PrefillRequest(generation=repeatable(tiny, 200)))
        with pytest.raises(Unavailable):
            await adopted(worker, "b")


async def test_an_answer_of_one_token_stays_at_the_prefill_worker(start_worker: Start, tiny: Checkpoint) -> None:
    prefill, decode = await start_worker("prefill"), await start_worker("decode")
    request = prefill_pb2.PrefillRequest(generation=repeatable(tiny, 1), decode_address=decode.peer.address)
    (event,) = await prefilled(prefill, request)
    head, part = await adopted(prefill, "a")
    assert (list(part.tokens), head.has_ended) == ([event.first_token.token], True)
    assert await found(decode) == []
