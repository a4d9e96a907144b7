"""Prefill on one worker, decode on another: the tokens of one process, and no block left behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from halfmoon.engine.checkpoint.checkpoint import Checkpoint
from halfmoon.errors import (
    Cancelled,
    DeadlineExceeded,
    HalfmoonError,
    Incompatible,
    InvalidRequest,
    NoCapacity,
    Unavailable,
)
from halfmoon.kv.frame import KVRange
from halfmoon.kv.keys import adapter_salt
from halfmoon.kv.kv_layout import KVSlice
from halfmoon.kv.kv_policy import SNAPKV, KVPolicy, policy_salt
from halfmoon.pb import decode_pb2, prefill_pb2, types_pb2
from halfmoon.policy.models.latency import PrefillSample
from halfmoon.rpc.transfer import transfer_to
from halfmoon.worker.servicers.wire import request_from
from tests.worker.conftest import RunningWorker

Start = Callable[..., Awaitable[RunningWorker]]
GATEWAY = "gateway-1"


def generation(checkpoint: Checkpoint, prompt: list[int], max_tokens: int, request_id: str = "r") -> Any:
    sampling = types_pb2.SamplingParams(
        max_tokens=max_tokens, temperature=0, top_p=1, repetition_penalty=1, ignore_eos=True
    )
    return types_pb2.Generation(
        request_id=request_id,
        model_fingerprint=checkpoint.fingerprint,
        prompt_token_ids=prompt,
        sampling=sampling,
        gateway_id=GATEWAY,
    )


def reference(checkpoint: Checkpoint, prompt: list[int], max_tokens: int) -> list[int]:
    model = LlamaForCausalLM.from_pretrained(checkpoint.path, dtype=torch.float32)
    ids = torch.tensor([prompt])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, eos_token_id=-1
    )
    found: list[int] = output[0, len(prompt) :].tolist()
    return found


@asynccontextmanager
async def listening(worker: RunningWorker) -> AsyncIterator[AsyncIterator[Any]]:
    request = decode_pb2.TokensRequest(gateway_id=GATEWAY)
    async with worker.peer.stream(worker.decode.Tokens, request, deadline_s=170) as steps:
        assert not (await anext(steps)).tokens
        yield steps


async def prefilled(worker: RunningWorker, request: prefill_pb2.PrefillRequest) -> list[prefill_pb2.PrefillEvent]:
    async with worker.peer.stream(worker.prefill.Prefill, request, deadline_s=170) as events:
        return [event async for event in events]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - what is watched has no event
            await asyncio.sleep(0.005)


async def tokens_of(steps: AsyncIterator[Any], request_id: str = "r") -> list[int]:
    found: list[int] = []
    async for step in steps:
        for token in step.tokens:
            if token.request_id == request_id:
                assert token.position == len(found) + 1
                found.append(token.token_id)
                if token.finish_reason != types_pb2.NOT_FINISHED:
                    return found
    raise AssertionError("the token stream ended")


@pytest.mark.parametrize("num_prompt", [1, 7, 8, 9, 100])
async def test_two_workers_give_the_reference_tokens(start_worker: Start, tiny: Checkpoint, num_prompt: int) -> None:
    prompt = [(7 * i + 3) % 125 + 3 for i in range(num_prompt)]
    prefill, decode = await start_worker("prefill"), await start_worker("decode")
    async with listening(decode) as steps:
        request = prefill_pb2.PrefillRequest(
            generation=generation(tiny, prompt, 12), decode_address=decode.peer.address
        )
        first, done = await prefilled(prefill, request)
        tokens = [first.first_token.token.token_id, *await tokens_of(steps)]
    assert tokens == reference(tiny, prompt, 12)
    assert done.handed_over.kv_bytes == num_prompt * decode.engine.layout.token_bytes
    await until(lambda: prefill.num_used_blocks + decode.num_used_blocks == 0)


@pytest.mark.parametrize("policy", [KVPolicy(3, 12), KVPolicy(12, 10, SNAPKV)], ids=str)
@pytest.mark.parametrize("num_prompt", [20, 64, 101])
async def test_under_a_policy_only_what_is_kept_is_sent(
    start_worker: Start, tiny: Checkpoint, num_prompt: int, policy: KVPolicy
) -> None:
    prompt = [(7 * i + 3) % 125 + 3 for i in range(num_prompt)]
    prefill, decode, both = [await start_worker(role) for role in ("prefill", "decode", "both")]
    asked = generation(tiny, prompt, 20)
    asked.tenant_salt = policy_salt(policy, b"")
    async with listening(both) as steps:
        first, _ = await prefilled(both, prefill_pb2.PrefillRequest(generation=asked))
        expected = [first.first_token.token.token_id, *await tokens_of(steps)]
    for _ in range(2):  # the second time the prompt is in the prefill worker's cache
        async with listening(decode) as steps:
            request = prefill_pb2.PrefillRequest(generation=asked, decode_address=decode.peer.address)
            first, done = await prefilled(prefill, request)
            assert [first.first_token.token.token_id, *await tokens_of(steps)] == expected
        layout = decode.engine.layout
        num_tokens = num_prompt - len(policy.unseen(num_prompt, layout.block_tokens)) * layout.block_tokens
        if num_tokens < num_prompt:  # with a gap nothing is found on the decode worker
            assert done.handed_over.held_tokens == 0
        assert done.handed_over.kv_bytes == (num_tokens - done.handed_over.held_tokens) * layout.token_bytes
        await until(lambda: prefill.num_used_blocks + decode.num_used_blocks == 0)


async def test_a_hand_over_of_all_tokens_under_a_policy_is_refused(start_worker: Start, tiny: Checkpoint) -> None:
    decode = await start_worker("decode")
    asked = generation(tiny, [5] * 60, 4)
    asked.tenant_salt = policy_salt(KVPolicy(3, 12), b"")
    layout = decode.engine.layout
    whole = KVRange(0, layout.num_layers, 0, layout.num_kv_heads, 0, 60)
    async with listening(decode), transfer_to(decode.peer, layout, deadline_s=170) as transfer:
        with pytest.raises(Incompatible, match="that are kept"):
            await transfer.open(whole, decode_pb2.HandoverOpen(generation=asked).SerializeToString())


async def test_role_both_gives_the_same_on_one_worker(start_worker: Start, tiny: Checkpoint) -> None:
    worker = await start_worker("both")
    async with listening(worker) as steps:
        request = prefill_pb2.PrefillRequest(generation=generation(tiny, [5, 6, 7], 10))
        first, _ = await prefilled(worker, request)
        tokens = [first.first_token.token.token_id, *await tokens_of(steps)]
    assert tokens == reference(tiny, [5, 6, 7], 10)
    await until(lambda: worker.num_used_blocks == 0)


async def test_a_request_moved_in_the_middle_goes_on_with_the_same_tokens(
    start_worker: Start, tiny: Checkpoint
) -> None:
    prefill, decode = await start_worker("prefill"), await start_worker("decode")
    expected = reference(tiny, [9, 8, 7], 12)
    moved = generation(tiny, [9, 8, 7], 12)
    moved.output_token_ids.extend(expected[:5])
    async with listening(decode) as steps:
        first, _ = await prefilled(
            prefill, prefill_pb2.PrefillRequest(generation=moved, decode_address=decode.peer.address)
        )
        assert first.first_token.token.position == 5
        found = [first.first_token.token.token_id]
        async for step in steps:
            found.extend(token.token_id for token in step.tokens)
            if len(found) == 7:
                break
    assert found == expected[5:]


async def test_a_known_prefix_is_not_computed_again(start_worker: Start, tiny: Checkpoint) -> None:
    prefill = await start_worker("prefill")
    prompt = list(range(3, 43))
    events = [
        (
            await prefilled(
                prefill,
                prefill_pb2.PrefillRequest(generation=generation(tiny, prompt, 1, name), decode_address="127.0.0.1:1"),
            )
        )[0]
        for name in ("one", "two")
    ]
    cached = [event.first_token.num_cached_tokens for event in events]
    assert cached == [0, 39]  # at least one token is always computed
    assert len({event.first_token.token.token_id for event in events}) == 1


async def test_a_single_token_needs_no_decode_worker(start_worker: Start, tiny: Checkpoint) -> None:
    prefill = await start_worker("prefill")
    request = prefill_pb2.PrefillRequest(generation=generation(tiny, [5, 6], 1), decode_address="127.0.0.1:1")
    (only,) = await prefilled(prefill, request)
    assert only.first_token.token.finish_reason == types_pb2.LENGTH
    await until(lambda: prefill.num_used_blocks == 0)


async def test_a_full_decode_worker_refuses_and_nothing_is_left(start_worker: Start, tiny: Checkpoint) -> None:
    prefill, decode = await start_worker("prefill"), await start_worker("decode", num_blocks=32, max_running=1)
    async with listening(decode):
        held = generation(tiny, [4] * 8, 4, "held")
        async with transfer_to(decode.peer, decode.engine.layout, deadline_s=170) as transfer:
            body = decode_pb2.HandoverOpen(generation=held).SerializeToString()
            await transfer.open(KVRange(0, 2, 0, 2, 0, 8), body)
            request = prefill_pb2.PrefillRequest(
                generation=generation(tiny, [5] * 20, 4), decode_address=decode.peer.address
            )
            with pytest.raises(NoCapacity) as caught:
                await prefilled(prefill, request)
            assert caught.value.retry_after_ms
            assert prefill.engine.stats().num_waiting == 0
        await until(lambda: prefill.num_used_blocks + decode.num_used_blocks == 0)


@pytest.mark.parametrize("is_soon_computed", [True, False])
@pytest.mark.parametrize("is_refused", [False, True])
async def test_only_a_prompt_that_is_soon_computed_begins_without_a_reservation(
    start_worker: Start,
    tiny: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
    is_soon_computed: bool,
    is_refused: bool,
) -> None:
    prefill, decode = await start_worker("prefill"), await start_worker("decode")
    prefill.state.compute_rate.begin_with([PrefillSample(20, 0, 0.01 if is_soon_computed else 1.0)] * 3)
    is_asked, may_answer, reserve = asyncio.Event(), asyncio.Event(), decode.async_engine.reserve

    async def reserve_late(*wanted: Any) -> int:
        is_asked.set()
        await may_answer.wait()
        if is_refused:
            raise NoCapacity("full")
        return await reserve(*wanted)

    monkeypatch.setattr(decode.async_engine, "reserve", reserve_late)
    request = prefill_pb2.PrefillRequest(generation=generation(tiny, [5] * 20, 6), decode_address=decode.peer.address)
    async with (
        listening(decode) as steps,
        prefill.peer.stream(prefill.prefill.Prefill, request, deadline_s=170) as events,
    ):
        first = asyncio.ensure_future(anext(events))
        await is_asked.wait()
        if is_soon_computed:
            await until(lambda: prefill.engine.stats().num_held == 1)
        else:
            assert prefill.num_used_blocks == prefill.engine.stats().num_waiting == 0
        assert not first.done(), "a token was answered that no decode worker takes over"
        may_answer.set()
        if is_refused:
            with pytest.raises(NoCapacity):
                await first
        else:
            answer = [(await first).first_token.token.token_id, *(await tokens_of(steps))]
            assert answer == reference(tiny, [5] * 20, 6)
            assert [event.WhichOneof("event") async for event in events] == ["handed_over"]
        await until(lambda: prefill.num_used_blocks + decode.num_used_blocks == 0)


async def test_a_caller_that_leaves_frees_both_workers(start_worker: Start, tiny: Checkpoint) -> None:
    prefill, decode = await start_worker("prefill"), await start_worker("decode")
    async with listening(decode):
        request = prefill_pb2.PrefillRequest(
            generation=generation(tiny, [5] * 100, 150), decode_address=decode.peer.address
        )
        async with prefill.peer.stream(prefill.prefill.Prefill, request, deadline_s=170) as events:
            await anext(events)
        await decode.peer.call(
            decode.decode.Cancel, decode_pb2.CancelRequest(request_ids=["r", "unknown"]), deadline_s=5
        )
        await until(lambda: prefill.num_used_blocks + decode.num_used_blocks == 0)
        with pytest.raises(Cancelled):
            await prefilled(prefill, request)  # what still comes for a cancelled request is refused


async def test_a_lost_sender_loses_its_reservation(start_worker: Start, tiny: Checkpoint) -> None:
    decode = await start_worker("decode", lease_s=0.05)
    async with listening(decode), transfer_to(decode.peer, decode.engine.layout, deadline_s=170) as transfer:
        body = decode_pb2.HandoverOpen(generation=generation(tiny, [4] * 8, 4)).SerializeToString()
        await transfer.open(KVRange(0, 2, 0, 2, 0, 8), body)
        assert decode.num_used_blocks > 0
        with pytest.raises(DeadlineExceeded, match="reservation"):
            await transfer.until_broken()
        await until(lambda: decode.num_used_blocks == 0)


async def test_nothing_is_taken_for_a_gateway_that_does_not_listen(start_worker: Start, tiny: Checkpoint) -> None:
    prefill, decode = await start_worker("prefill"), await start_worker("decode")
    request = prefill_pb2.PrefillRequest(generation=generation(tiny, [5], 4), decode_address=decode.peer.address)
    with pytest.raises(Unavailable, match="token stream"):
        await prefilled(prefill, request)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"model_fingerprint": "another"}, Incompatible),
        ({"tenant_salt": adapter_salt("ab" * 16, b"")}, Incompatible),
        ({"request_id": ""}, InvalidRequest),
        ({"prompt_token_ids": [1000]}, InvalidRequest),
        ({"prompt_token_ids": [1] * 511}, InvalidRequest),
    ],
)
async def test_bad_requests_are_refused(
    start_worker: Start, tiny: Checkpoint, change: dict[str, Any], error: type[HalfmoonError]
) -> None:
    worker = await start_worker("both")
    wrong = generation(tiny, [5, 6], 4)
    for name, value in change.items():
        wrong.ClearField(name)
        wrong.MergeFrom(types_pb2.Generation(**{name: value}))
    async with listening(worker):
        with pytest.raises(error):
            await prefilled(worker, prefill_pb2.PrefillRequest(generation=wrong))
    assert worker.num_used_blocks == 0


async def test_roles_and_draining_are_respected(start_worker: Start, tiny: Checkpoint) -> None:
    request = prefill_pb2.PrefillRequest(generation=generation(tiny, [5], 4))
    both = await start_worker("both")
    both.state.draining = True
    with pytest.raises(Unavailable, match="draining"):
        await prefilled(both, request)


async def test_many_requests_at_once_through_few_blocks(start_worker: Start, tiny: Checkpoint) -> None:
    prefill, decode = await start_worker("prefill", num_blocks=24), await start_worker("decode", num_blocks=24)
    prompts = {f"r{n}": [(n * 31 + i) % 120 + 3 for i in range(5 + 3 * n)] for n in range(8)}
    found: dict[str, list[int]] = {}

    async def one(request_id: str) -> None:
        while request_id not in found:
            request = prefill_pb2.PrefillRequest(
                generation=generation(tiny, prompts[request_id], 20, request_id), decode_address=decode.peer.address
            )
            try:
                first, _ = await prefilled(prefill, request)
            except NoCapacity:
                await asyncio.sleep(0.01)
                continue
            found.setdefault(request_id, []).insert(0, first.first_token.token.token_id)

    async def read(steps: AsyncIterator[Any]) -> None:
        later: dict[str, list[int]] = {request_id: [] for request_id in prompts}
        num_finished = 0
        while num_finished < len(prompts):
            for token in (await anext(steps)).tokens:
                later[token.request_id].append(token.token_id)
                num_finished += token.finish_reason != types_pb2.NOT_FINISHED
        for request_id, tokens in later.items():
            found.setdefault(request_id, []).extend(tokens)

    async with listening(decode) as steps:
        reading = asyncio.ensure_future(read(steps))
        await asyncio.gather(*(one(request_id) for request_id in prompts))
        await reading
    assert found == {request_id: reference(tiny, prompt, 20) for request_id, prompt in prompts.items()}
    await until(lambda: prefill.num_used_blocks + decode.num_used_blocks == 0)


async def chat(
    start_worker: Start, tiny: Checkpoint, prefill_dtype: str, **options: Any
) -> list[tuple[int, list[int]]]:
    """Ten turns on one pair of workers: of each the hand-over's bytes and the tokens."""
    prefill = await start_worker("prefill", dtype=prefill_dtype, **options)
    decode = await start_worker("decode")
    turns, prompt = [], [(7 * i + 3) % 125 + 3 for i in range(20)]
    async with listening(decode) as steps:
        for turn in range(10):
            request = prefill_pb2.PrefillRequest(
                generation=generation(tiny, prompt, 12, f"turn {turn}"), decode_address=decode.peer.address
            )
            first, done = await prefilled(prefill, request)
            answer = [first.first_token.token.token_id, *await tokens_of(steps, f"turn {turn}")]
            held = 0 if not turn else (len(prompt) - 6) // 8 * 8  # the last token of an answer is never run
            assert done.handed_over.held_tokens == held
            assert done.handed_over.kv_bytes == (len(prompt) - held) * prefill.engine.layout.token_bytes
            turns.append((done.handed_over.kv_bytes, answer))
            prompt = [*prompt, *answer, 5, 6, 7, 8, 9]
    await until(lambda: prefill.num_used_blocks + decode.num_used_blocks == 0)
    return turns


@pytest.mark.parametrize("transports", [("shm",), ()])
async def test_a_chat_sends_what_its_decode_worker_lacks(
    start_worker: Start, tiny: Checkpoint, transports: tuple[str, ...]
) -> None:
    turns = await chat(start_worker, tiny, "float32", transports=transports)
    prompt = [(7 * i + 3) % 125 + 3 for i in range(20)]
    for _, answer in turns:
        assert answer == reference(tiny, prompt, 12)
        prompt = [*prompt, *answer, 5, 6, 7, 8, 9]


async def test_what_is_held_is_found_under_the_decode_workers_own_dtype(start_worker: Start, tiny: Checkpoint) -> None:
    await chat(start_worker, tiny, "bfloat16")


async def test_what_is_held_stays_while_its_reservation_is_cancelled_and_made_again(
    start_worker: Start, tiny: Checkpoint
) -> None:
    prefill, decode = await start_worker("prefill"), await start_worker("decode")
    prompt = list(range(3, 43))
    async with listening(decode) as steps:
        for name in ("one", "two"):
            request = prefill_pb2.PrefillRequest(
                generation=generation(tiny, prompt, 4, name), decode_address=decode.peer.address
            )
            first, done = await prefilled(prefill, request)
            tokens = [first.first_token.token.token_id, *await tokens_of(steps, name)]
            assert tokens == reference(tiny, prompt, 4)
            assert done.handed_over.kv_bytes == (0 if name == "two" else 40 * decode.engine.layout.token_bytes)
            body = decode_pb2.HandoverOpen(generation=generation(tiny, prompt, 4, "given up")).SerializeToString()
            async with transfer_to(decode.peer, decode.engine.layout, deadline_s=170) as transfer:
                await transfer.open(KVRange(0, 2, 0, 2, 0, 40), body, skips_held=True)
                assert transfer.held_tokens == 40
            await until(lambda: decode.num_used_blocks == 0)


async def test_the_engine_takes_no_kv_for_blocks_that_others_share(start_worker: Start, tiny: Checkpoint) -> None:
    prefill, decode = await start_worker("prefill"), await start_worker("decode")
    prompt = list(range(3, 43))
    async with listening(decode) as steps:
        request = prefill_pb2.PrefillRequest(generation=generation(tiny, prompt, 4), decode_address=decode.peer.address)
        await prefilled(prefill, request)
        await tokens_of(steps)
    again = request_from(generation(tiny, prompt, 4, "again"), prefill_only=False, arrival_s=0.0)
    assert await decode.async_engine.reserve(again) == 40
    with pytest.raises(InvalidRequest, match="shared with others"):
        await decode.async_engine.kv_write("again", KVSlice(0, 2, 32, 8), bytes(8 * decode.engine.layout.token_bytes))
    await decode.async_engine.cancel("again")
