"""A decode worker computes prompts that are sent to it alone: the tokens of one process, and no block left behind."""

from __future__ import annotations

import pytest

from halfmoon.engine.checkpoint.checkpoint import Checkpoint
from halfmoon.errors import NoCapacity, Unavailable
from halfmoon.pb import prefill_pb2
from halfmoon.worker.servicers.wire import request_from
from tests.worker.test_handover import (
    Start,
    generation,
    listening,
    prefilled,
    reference,
    tokens_of,
    until,
)


async def test_a_second_turn_stays_where_the_first_was_decoded(start_worker: Start, tiny: Checkpoint) -> None:
    """The first turn is handed over; the second one is computed where its KV is, with the reference's tokens."""
    prefill, decode = await start_worker("prefill"), await start_worker("decode")
    question = [(7 * i + 3) % 125 + 3 for i in range(40)]
    async with listening(decode) as steps:
        request = prefill_pb2.PrefillRequest(
            generation=generation(tiny, question, 20, "first"), decode_address=decode.peer.address
        )
        first, _ = await prefilled(prefill, request)
        answer = [first.first_token.token.token_id, *await tokens_of(steps, "first")]
        follow_up = [*question, *answer, 11, 12, 13]
        begun, kept = await prefilled(
            decode, prefill_pb2.PrefillRequest(generation=generation(tiny, follow_up, 12, "second"))
        )
        found = [begun.first_token.token.token_id, *await tokens_of(steps, "second")]
    assert kept.handed_over.kv_bytes == 0
    assert begun.first_token.num_cached_tokens == 59  # question and answer; its last token was not run
    assert found == reference(tiny, follow_up, 12)
    await until(lambda: prefill.num_used_blocks + decode.num_used_blocks == 0)


async def test_it_hands_nothing_over(start_worker: Start, tiny: Checkpoint) -> None:
    decode = await start_worker("decode")
    request = prefill_pb2.PrefillRequest(generation=generation(tiny, [5], 4), decode_address="elsewhere:1")
    with pytest.raises(Unavailable, match="role is decode"):
        await prefilled(decode, request)


async def test_a_full_or_draining_worker_refuses(start_worker: Start, tiny: Checkpoint) -> None:
    decode = await start_worker("decode", num_blocks=8)
    long = prefill_pb2.PrefillRequest(generation=generation(tiny, [5] * 30, 4))
    short = prefill_pb2.PrefillRequest(generation=generation(tiny, [5], 4))
    expected = request_from(generation(tiny, [5] * 40, 4, "expected"), prefill_only=False, arrival_s=0.0)
    await decode.async_engine.reserve(expected)  # six blocks, or less than two left
    async with listening(decode):
        with pytest.raises(NoCapacity):
            await prefilled(decode, long)
        decode.state.identity.max_running = 1
        with pytest.raises(NoCapacity):
            await prefilled(decode, short)
        await decode.async_engine.cancel("expected")
        assert len(await prefilled(decode, long)) == 2
        await until(lambda: decode.num_used_blocks == 0)
        decode.state.draining = True
        with pytest.raises(Unavailable, match="draining"):
            await prefilled(decode, short)
    assert decode.num_used_blocks == 0
