"""A decode worker goes on with an answer of another one: what somebody has is loaded, the rest is computed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from halfmoon.engine.checkpoint.checkpoint import Checkpoint
from halfmoon.errors import NotFound, Unavailable
from halfmoon.pb import prefill_pb2, types_pb2
from tests.rpc.store.test_kvstore_client import served
from tests.worker.conftest import RunningWorker
from tests.worker.store.test_restorer import PROMPT, SLOW, believe, counted, stored
from tests.worker.test_fetching import LOAD_ALL, break_reads, naming, sources, warm
from tests.worker.test_handover import generation, listening, prefilled, reference, until

Start = Callable[..., Awaitable[RunningWorker]]
NUM_TOKENS, NUM_BEFORE = 24, 9  # 83 + 9 tokens: 11 blocks of 8, of which others have 10


def asked(tiny: Checkpoint, before: list[int], request_id: str = "r", **sampling: Any) -> prefill_pb2.PrefillRequest:
    """A request that stays where it is computed and has given the tokens `before`."""
    wanted = generation(tiny, PROMPT, NUM_TOKENS, request_id)
    wanted.output_token_ids.extend(before)
    wanted.sampling.MergeFrom(types_pb2.SamplingParams(**sampling))
    return prefill_pb2.PrefillRequest(generation=wanted)


async def answer(worker: RunningWorker, request: prefill_pb2.PrefillRequest) -> tuple[list[Any], Any]:
    """All tokens of its answer, and what its prefill was."""
    wanted = request.generation
    async with listening(worker) as steps:
        first, _ = await prefilled(worker, request)
        tokens = [first.first_token.token]
        while len(tokens) < NUM_TOKENS - len(wanted.output_token_ids):
            step = await anext(steps)
            tokens += [token for token in step.tokens if token.request_id == wanted.request_id]
    return tokens, first.first_token


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 1.3, "top_p": 0.9, "top_k": 40, "seed": 7},
        {"temperature": 0.8, "seed": 1 << 40, "repetition_penalty": 1.2, "frequency_penalty": 0.4, "min_tokens": 12},
        {"num_top_logprobs": 3, "logit_bias": {5: 2.0}},
    ],
    ids=["greedy", "seeded", "penalties", "logprobs"],
)
async def test_it_says_what_the_first_one_would_have_said(
    start_worker: Start, tiny: Checkpoint, sampling: dict[str, Any]
) -> None:
    holder, decode = await warm(start_worker, tiny), await start_worker("decode")
    believe(decode, SLOW)
    whole, _ = await answer(await start_worker("both"), asked(tiny, [], **sampling))
    before = [token.token_id for token in whole[:NUM_BEFORE]]
    rest, first = await answer(decode, naming(asked(tiny, before, **sampling), holder))
    assert [token.token_id for token in rest] == [token.token_id for token in whole[NUM_BEFORE:]]
    assert [token.position for token in rest] == list(range(NUM_BEFORE, NUM_TOKENS))
    assert (first.num_loaded_tokens, counted(decode, "restored_tokens", source="computed")) == (80, 12)
    reported = {(one.decision, one.reason): one.count for one in decode.state.load(decode.async_engine, {}).decisions}
    assert reported["restore", "load"] == reported["source", "worker here"] == 1
    assert (reported["restored_token", "worker"], reported["restored_token", "computed"]) == (80, 12)
    for found, expected in zip(rest, whole[NUM_BEFORE:], strict=True):
        assert found.logprob == pytest.approx(expected.logprob, abs=1e-4)
        assert [top.token_id for top in found.top_logprobs] == [top.token_id for top in expected.top_logprobs]
    await until(lambda: decode.num_used_blocks + holder.num_used_blocks == 0)


async def test_stores_and_another_decode_worker_are_holders_too(start_worker: Start, tiny: Checkpoint) -> None:
    """The blocks of the answer are in no prefill worker's cache."""
    expected = reference(tiny, PROMPT, NUM_TOKENS)
    async with served() as (_, address):
        await stored(start_worker, tiny, address)
        other, decode = await start_worker("decode"), await start_worker("decode", store=address)
        await answer(other, asked(tiny, [], "other"))  # its cache has the answer, too
        believe(decode, SLOW)
        rest, first = await answer(decode, naming(asked(tiny, expected[:15]), other, num_blocks=12))
        assert [token.token_id for token in rest] == expected[15:]
        assert first.num_loaded_tokens == 96
        assert counted(decode, "restored_tokens", source="computed") == 83 + 15 - 96


async def test_a_holder_that_dies_in_the_middle_costs_no_token(
    start_worker: Start, tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = reference(tiny, PROMPT, NUM_TOKENS)
    dying, decode = await warm(start_worker, tiny), await start_worker("decode", link_mbps=0.1)
    believe(decode, LOAD_ALL)
    break_reads(monkeypatch, Unavailable("killed"))
    rest, first = await answer(decode, naming(asked(tiny, expected[:NUM_BEFORE]), dying))
    assert [token.token_id for token in rest] == expected[NUM_BEFORE:]
    assert 0 < first.num_loaded_tokens < 80
    assert sources(decode, "worker", "away") == 1
    await until(lambda: decode.num_used_blocks == 0)


async def test_a_holder_that_lacks_blocks_or_is_away_costs_no_token(start_worker: Start, tiny: Checkpoint) -> None:
    expected = reference(tiny, PROMPT, NUM_TOKENS)
    short, decode = await warm(start_worker, tiny, 43), await start_worker("decode")
    believe(decode, SLOW)
    request = naming(asked(tiny, expected[:NUM_BEFORE]), short)
    request.sources.add(address="127.0.0.1:1", kind=prefill_pb2.KVSource.WORKER, num_blocks=10)
    rest, first = await answer(decode, request)
    assert [token.token_id for token in rest] == expected[NUM_BEFORE:]
    assert first.num_loaded_tokens == 40
    assert (sources(decode, "worker", "stale"), sources(decode, "worker", "away")) == (1, 1)


async def test_another_salt_finds_nothing(start_worker: Start, tiny: Checkpoint) -> None:
    expected = reference(tiny, PROMPT, NUM_TOKENS)
    holder, decode = await warm(start_worker, tiny), await start_worker("decode")
    believe(decode, SLOW)
    request = naming(asked(tiny, expected[:NUM_BEFORE]), holder)
    request.generation.tenant_salt = b"another"
    rest, first = await answer(decode, request)
    assert [token.token_id for token in rest] == expected[NUM_BEFORE:]
    assert (first.num_loaded_tokens, counted(decode, "restored_tokens", source="computed")) == (0, 92)


async def test_a_client_that_leaves_during_the_restore_leaves_no_block(start_worker: Start, tiny: Checkpoint) -> None:
    expected = reference(tiny, PROMPT, NUM_TOKENS)
    holder, decode = await warm(start_worker, tiny), await start_worker("decode", link_mbps=0.02)  # 0.1 s a block
    believe(decode, SLOW)
    request = naming(asked(tiny, expected[:NUM_BEFORE]), holder)
    async with listening(decode):
        async with decode.peer.stream(decode.prefill.Prefill, request, deadline_s=170):
            await until(lambda: counted(decode, "store_loaded_bytes", tier="worker") > 0)
        await until(lambda: decode.num_used_blocks + holder.num_used_blocks == 0)


def ahead(tiny: Checkpoint, tokens: list[int], *holders: RunningWorker) -> prefill_pb2.PrefillRequest:
    """A copy of an answer that goes on elsewhere, to be computed to its last token."""
    wanted = generation(tiny, tokens, 1, f"ahead-{len(tokens)}")
    request = prefill_pb2.PrefillRequest(generation=wanted, is_copy=True, keeps_partial=True)
    return naming(request, *holders)


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.8, "seed": 3, "num_top_logprobs": 3, "frequency_penalty": 0.4}]
)
async def test_what_was_computed_ahead_is_not_computed_again(
    start_worker: Start, tiny: Checkpoint, sampling: dict[str, Any]
) -> None:
    holder, decode = await warm(start_worker, tiny), await start_worker("decode")
    believe(decode, SLOW)
    whole, _ = await answer(await start_worker("both"), asked(tiny, [], **sampling))
    tokens = [*PROMPT, *(token.token_id for token in whole)]
    figures = [(await prefilled(decode, ahead(tiny, tokens[:num], holder)))[0].first_token for num in (89, 91)]
    assert [(one.num_cached_tokens, one.num_loaded_tokens) for one in figures] == [(80, 80), (89, 0)]
    rest, first = await answer(decode, naming(asked(tiny, tokens[83 : 83 + NUM_BEFORE], **sampling), holder))
    assert first.num_cached_tokens == 91
    assert [token.token_id for token in rest] == tokens[83 + NUM_BEFORE :]
    for found, expected in zip(rest, whole[NUM_BEFORE:], strict=True):
        assert found.logprob == pytest.approx(expected.logprob, abs=1e-4)
    await until(lambda: decode.num_used_blocks + holder.num_used_blocks == 0)


async def test_an_engine_of_whole_blocks_computes_nothing_ahead(start_worker: Start, tiny: Checkpoint) -> None:
    decode = await start_worker("decode", prefix_cache=False)
    with pytest.raises(NotFound):
        await prefilled(decode, ahead(tiny, PROMPT))
    assert counted(decode, "restored_tokens", source="computed") == 0
