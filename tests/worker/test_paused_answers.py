"""A paused answer whose blocks others took is not lost with its worker: another one loads it from the store."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable

import pytest

from halfmoon.catalog.block_identity import block_id
from halfmoon.engine.checkpoint.checkpoint import Checkpoint
from halfmoon.engine.step_result import StepResult
from halfmoon.pb import prefill_pb2
from tests.rpc.store.test_kvstore_client import served
from tests.worker.conftest import RunningWorker
from tests.worker.store.test_restorer import PROMPT, SLOW, believe
from tests.worker.store.test_store_writer import keys_of
from tests.worker.test_handover import generation, listening, prefilled, reference, until

Start = Callable[..., Awaitable[RunningWorker]]
NUM_TOKENS, NUM_BEFORE = 400, 40  # tokens of the answer, and of those that it surely has when it is paused


async def test_an_answer_that_lost_its_blocks_goes_on_elsewhere_from_the_store(
    start_worker: Start, tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = reference(tiny, PROMPT, NUM_BEFORE + 1)
    async with served() as (store, address):
        worker = await start_worker("both", store=address, num_blocks=61, paused_bytes=0)
        other = await start_worker("both", store=address, num_blocks=61)
        believe(other, SLOW)
        keys = keys_of(worker, [*PROMPT, *expected[:NUM_BEFORE]])
        step, may_hurry = worker.engine.step, threading.Event()

        def unhurried() -> StepResult:
            may_hurry.wait(0.02)
            return step()

        monkeypatch.setattr(worker.engine, "step", unhurried)
        low, high = generation(tiny, PROMPT, NUM_TOKENS, "low"), generation(tiny, [5] * 400, 80, "high")
        low.class_priority, low.max_pause_s = 1, 1e6
        async with listening(worker):
            await prefilled(worker, prefill_pb2.PrefillRequest(generation=low))
            await until(lambda: len(store.pool.match([block_id(key) for key in keys])) == len(keys))
            may_hurry.set()
            await prefilled(worker, prefill_pb2.PrefillRequest(generation=high))
            assert worker.metrics.registry.get_sample_value("halfmoon_engine_pauses_total") == 1
            await worker.async_engine.cancel("low")
            await worker.async_engine.cancel("high")
        low.output_token_ids.extend(expected[:NUM_BEFORE])
        async with listening(other):
            first, _ = await prefilled(other, prefill_pb2.PrefillRequest(generation=low))
            await other.async_engine.cancel("low")
        assert first.first_token.token.token_id == expected[NUM_BEFORE]
        assert first.first_token.num_loaded_tokens == 8 * len(keys)
