"""Several prefill workers compute one prompt: the tokens of one, whatever becomes of the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from halfmoon.background import running
from halfmoon.engine.checkpoint.checkpoint import Checkpoint
from halfmoon.errors import HalfmoonError, InvalidRequest, NotFound, Unavailable
from halfmoon.kv.frame_plan import Written
from halfmoon.pb import prefill_pb2
from halfmoon.rpc.store.kvstore_client import KVStoreClient
from halfmoon.worker.sharing.segments import Segment, Segments
from halfmoon.worker.sharing.shared_prompts import SharedPrompts
from halfmoon.worker.store.block_source import BlockSource
from tests.worker.conftest import RunningWorker
from tests.worker.store.test_store_writer import keys_of
from tests.worker.test_handover import generation, listening, prefilled, reference, tokens_of, until

Start = Callable[..., Awaitable[RunningWorker]]
PROMPT = [(7 * i + 3) % 125 + 3 for i in range(203)]
ENDS = {2: [104, 203], 3: [80, 144, 203]}
ROUNDS = {2: [56, 104, 152, 203], 3: [40, 80, 120, 144, 176, 203]}


class Sharing:
    """Owns the calls to the helpers of one prompt."""

    def __init__(self, tiny: Checkpoint, workers: Sequence[RunningWorker], ends: Sequence[int]) -> None:
        self.workers = workers
        addresses = [worker.peer.address for worker in workers]
        self.requests = []
        for number in range(len(workers)):
            shares = prefill_pb2.PromptShares(addresses=addresses, segment_ends=ends, own=number)
            end = [end for at, end in enumerate(ends) if at % len(workers) == number][-1]
            part = generation(tiny, PROMPT[:end], 12 if end == len(PROMPT) else 1)
            self.requests.append(prefill_pb2.PrefillRequest(generation=part, shares=shares))

    @asynccontextmanager
    async def helping(self) -> AsyncIterator[list[asyncio.Task[Any]]]:
        async with AsyncExitStack() as stack:
            pairs = zip(self.workers[:-1], self.requests, strict=False)
            yield [await stack.enter_async_context(running(prefilled(worker, request))) for worker, request in pairs]

    async def tokens(self, decode: RunningWorker) -> tuple[list[int], prefill_pb2.FirstToken]:
        """All tokens, by the last worker and `decode`."""
        async with listening(decode) as steps:
            request = self.requests[-1]
            request.decode_address = decode.peer.address
            first, done = await prefilled(self.workers[-1], request)
            assert done.handed_over.kv_bytes == len(PROMPT) * decode.engine.layout.token_bytes
            return [first.first_token.token.token_id, *await tokens_of(steps)], first.first_token


def counted(worker: RunningWorker, result: str) -> float:
    name = "halfmoon_shared_segments_total"
    return worker.metrics.registry.get_sample_value(name, {"result": result}) or 0.0


async def no_blocks_are_left(*workers: RunningWorker) -> None:
    await until(lambda: sum(worker.num_used_blocks for worker in workers) == 0)


@pytest.mark.parametrize("degree", [2, 3])
@pytest.mark.parametrize("in_rounds", [False, True], ids=["one round", "rounds"])
async def test_several_workers_give_the_reference_tokens(
    start_worker: Start, tiny: Checkpoint, degree: int, in_rounds: bool
) -> None:
    ends = (ROUNDS if in_rounds else ENDS)[degree]
    workers = [await start_worker("prefill") for _ in range(degree)]
    decode = await start_worker("decode")
    it = Sharing(tiny, workers, ends)
    async with it.helping():
        tokens, first = await it.tokens(decode)
    assert tokens == reference(tiny, PROMPT, 12)
    num_own = sum(end - start for start, end in list(zip([0, *ends], ends, strict=False))[degree - 1 :: degree])
    assert first.num_shared_tokens == len(PROMPT) - num_own
    assert (first.num_cached_tokens, first.num_loaded_tokens) == (0, 0)
    assert counted(workers[-1], "arrived") == len(ends) // degree * (degree - 1)
    assert sum(counted(worker, "given_up") for worker in workers) == 0
    await no_blocks_are_left(*workers, decode)
    assert workers[-1].state.cached_blocks.depth(keys_of(workers[-1], PROMPT)) == len(PROMPT) // 8


async def test_a_step_begins_behind_the_first_layers_of_what_others_compute(
    start_worker: Start, tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The helper's last layer leaves only when the step that needs it has been asked for."""
    workers = [await start_worker("prefill") for _ in range(2)]
    decode = await start_worker("decode")
    it, begun = Sharing(tiny, workers, ENDS[2]), asyncio.Event()
    read, arrive = workers[0].async_engine.kv_read, workers[1].async_engine.arrive_by_layer

    async def late(*where: Any) -> memoryview:
        if where[1].layer_start == 1:
            await begun.wait()
        return await read(*where)

    def noted(*of: Any) -> None:
        arrive(*of)
        begun.set()

    monkeypatch.setattr(workers[0].async_engine, "kv_read", late)
    monkeypatch.setattr(workers[1].async_engine, "arrive_by_layer", noted)
    async with it.helping():
        tokens, _ = await it.tokens(decode)
    assert begun.is_set()
    assert tokens == reference(tiny, PROMPT, 12)
    assert counted(workers[1], "arrived") == 1


async def test_what_one_has_cached_need_not_come(start_worker: Start, tiny: Checkpoint) -> None:
    workers = [await start_worker("prefill") for _ in range(2)]
    decode = await start_worker("decode")
    for worker, num_tokens in zip(workers, (120, 60), strict=True):
        await prefilled(worker, prefill_pb2.PrefillRequest(
            generation=generation(tiny, PROMPT[:num_tokens], 1, "before"), decode_address=decode.peer.address
        ))  # fmt: skip
    it = Sharing(tiny, workers, ENDS[2])
    async with it.helping():
        tokens, first = await it.tokens(decode)
    assert tokens == reference(tiny, PROMPT, 12)
    assert first.num_cached_tokens == 56
    assert first.num_shared_tokens == 104 - 56


@pytest.mark.parametrize("missing", [0, 1])
async def test_a_worker_that_was_never_asked_costs_no_token(
    start_worker: Start, tiny: Checkpoint, missing: int
) -> None:
    workers = [await start_worker("prefill") for _ in range(3)]
    decode = await start_worker("decode")
    it = Sharing(tiny, workers, ROUNDS[3])
    async with running(prefilled(workers[1 - missing], it.requests[1 - missing])):
        tokens, _ = await it.tokens(decode)
    assert tokens == reference(tiny, PROMPT, 12)
    assert counted(workers[-1], "given_up") == 2
    await no_blocks_are_left(*workers, decode)


async def test_a_helper_that_dies_in_the_middle_costs_no_token(
    start_worker: Start, tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has sent its first layers."""
    workers = [await start_worker("prefill") for _ in range(2)]
    decode = await start_worker("decode")
    it = Sharing(tiny, workers, ENDS[2])
    read, calls = workers[0].async_engine.kv_read, 0

    async def dying(*where: Any) -> memoryview:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise Unavailable("it died")
        return await read(*where)

    monkeypatch.setattr(workers[0].async_engine, "kv_read", dying)
    async with it.helping():
        tokens, _ = await it.tokens(decode)
    assert calls == 2
    assert tokens == reference(tiny, PROMPT, 12)
    assert counted(workers[-1], "given_up") == 1
    await no_blocks_are_left(*workers, decode)


async def test_a_segment_may_take_three_times_as_long_as_was_planned(
    start_worker: Start, tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers of one host slow each other down, and the serving worker may have other prompts before this one."""
    workers = [await start_worker("prefill") for _ in range(2)]
    decode = await start_worker("decode")
    it, load, deadlines_s = Sharing(tiny, workers, ENDS[2]), BlockSource.load_layers, list[float]()

    async def noted(self: BlockSource, *args: Any, deadline_s: float, **more: Any) -> list[int]:
        deadlines_s.append(deadline_s)
        return await load(self, *args, deadline_s=deadline_s, **more)

    monkeypatch.setattr(BlockSource, "load_layers", noted)
    it.requests[-1].shares.round_s, it.requests[-1].shares.queue_s = 10.0, 5.0
    async with it.helping():
        await it.tokens(decode)
    assert deadlines_s == [35.0]


async def test_the_end_of_the_serving_worker_leaves_nothing_behind(start_worker: Start, tiny: Checkpoint) -> None:
    workers = [await start_worker("prefill") for _ in range(2)]
    it = Sharing(tiny, workers, ENDS[2])
    async with it.helping() as calls:
        await until(lambda: workers[0].num_used_blocks > 0)
        assert not calls[0].done(), "it waits to be let go"
    await no_blocks_are_left(*workers)


async def test_a_prompt_that_is_refused_is_not_kept_for_others(start_worker: Start, tiny: Checkpoint) -> None:
    small, other = await start_worker("prefill", num_blocks=8), await start_worker("prefill")
    it = Sharing(tiny, [small, other], ENDS[2])
    with pytest.raises(InvalidRequest):
        await prefilled(small, it.requests[0])
    with pytest.raises(NotFound):
        await small.state.shared_prompts.get("r", 0.0)
    async with small.restorer.holders.worker(other.peer.address) as holder:
        assert holder.num_users == 1


async def test_an_engine_whose_steps_cannot_wait_computes_alone(
    start_worker: Start, tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = [await start_worker("prefill") for _ in range(2)]
    decode = await start_worker("decode")
    monkeypatch.setattr(type(workers[1].async_engine), "layer_loading", None)
    tokens, first = await Sharing(tiny, workers, ENDS[2]).tokens(decode)
    assert tokens == reference(tiny, PROMPT, 12)
    assert first.num_shared_tokens == 0


async def test_a_reader_gets_what_its_keys_name_and_nothing_else(start_worker: Start, tiny: Checkpoint) -> None:
    workers = [await start_worker("prefill") for _ in range(2)]
    it, client = Sharing(tiny, workers, ENDS[2]), KVStoreClient(workers[0].peer.address, server_role="worker")
    keys, layout = keys_of(workers[0], PROMPT), workers[0].engine.layout

    async def read(named: Sequence[bytes], first: int, request_id: str = "r") -> list[range]:
        parts = client.get_layers(named, layout, 1, request_id=request_id, first_block=first, deadline_s=30)
        return [layers async for layers, _ in parts]

    async with it.helping():
        assert await read(keys[3:5], 3) == [range(1), range(1, 2)]
        with pytest.raises(NotFound):
            await read(keys[3:5], 4)
        with pytest.raises(NotFound):
            await read(keys[3:5], 3, "another")
    await client.close()


@pytest.mark.parametrize(
    ("addresses", "ends", "own"),
    [(["a:1"], [203], 0), (["a:1", "b:1"], [], 0), (["a:1", "b:1"], [100, 203], 0), (["a:1", "b:1"], [104, 203], 2),
     (["a:1", "b:1"], [104, 104], 0), (["a:1", "b:1"], [104, 200], 0)],
)  # fmt: skip
def test_shares_that_make_no_sense_are_refused(addresses: list[str], ends: list[int], own: int) -> None:
    message = prefill_pb2.PromptShares(addresses=addresses, segment_ends=ends, own=own)
    with pytest.raises(InvalidRequest):
        Segments.read(message, 203, 8)


def test_a_helper_knows_the_segments_up_to_its_last() -> None:
    message = prefill_pb2.PromptShares(addresses=["a:1", "b:1", "c:1"], segment_ends=[16, 32, 40, 48, 64, 70], own=1)
    it = Segments.read(message, 64, 8)
    assert it.of_own == (range(2, 4), range(6, 8))
    assert it.of_others == [[Segment(0, range(2))], [Segment(2, range(4, 5)), Segment(0, range(5, 6))]]
    message.own = 2
    last = Segments.read(message, 70, 8)
    assert last.of_own == (range(4, 5), range(8, 9))
    assert [len(run) for run in last.of_others] == [2, 2]


async def test_a_reader_waits_for_a_prompt_and_its_layers_and_learns_that_it_is_gone() -> None:
    prompts = SharedPrompts()
    with pytest.raises(NotFound):
        await prompts.get("r", 0.0)
    waiting = asyncio.create_task(prompts.get("r", 20))
    await asyncio.sleep(0)
    with prompts.computing("r", []) as prompt:
        assert await waiting is prompt
        layer = asyncio.create_task(prompt.until_written(2, 8, 16))
        for written in (Written(8), Written(0, 16, 1), Written(8, 16, 2)):
            await asyncio.sleep(0)
            assert not layer.done()
            prompt.on_kv(written)
        await layer
        later = asyncio.create_task(prompt.until_written(3, 8, 16))
        await asyncio.sleep(0)
    with pytest.raises(HalfmoonError):
        await later
