"""The engine over vLLM: what it orders, when blocks of the shared memory are free, what the worker is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
import torch

from halfmoon.engine.kv_memory.kv_access import NotWritten
from halfmoon.engine.request import EngineRequest, SamplingParams, TokenLogprobs, TokenOutput
from halfmoon.engine.request_check import RequestLimits
from halfmoon.engine.scheduling.prefix_cache import CacheChanges
from halfmoon.engine.scheduling.restore_order import RestoreOrder
from halfmoon.engine.step_result import StepResult
from halfmoon.errors import InvalidRequest, NoCapacity, NotFound, Unavailable
from halfmoon.kv.codec import Codec
from halfmoon.kv.frame_plan import Written
from halfmoon.kv.keys import adapter_salt, block_keys, root_key
from halfmoon.kv.kv_layout import KVLayout, KVSlice
from halfmoon.vllm_engine.host import UNSUPPORTED
from halfmoon.vllm_engine.messages import Ended, Finished, Keep, KVOrder, Saved, Stepped
from halfmoon.vllm_engine.requests.vllm_engine import VllmEngine
from halfmoon.vllm_engine.staging import StagingMemory
from tests.vllm_engine.fake_vllm import BlockStored, FakeVllm

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=4, dtype="float32", block_tokens=8)
NUM_BLOCKS = 6
EOS = 2
PROMPT = tuple(range(10, 30))  # 3 blocks
GREEDY = SamplingParams(max_tokens=4, temperature=0.0)


def root(salt: bytes) -> bytes:
    return root_key("model", LAYOUT, salt)


class Worker:
    """The engine, the fake vLLM under it, and all that it reported."""

    def __init__(self, num_ranks: int = 1) -> None:
        self.vllm = FakeVllm()
        self.memory = StagingMemory(LAYOUT, NUM_BLOCKS)
        self.steps: list[StepResult] = []
        self.deaths: list[BaseException] = []
        self._changed = asyncio.Event()
        limits = RequestLimits(100, max_tokens=64, num_blocks=8, layout=LAYOUT, unsupported=UNSUPPORTED)
        self.engine = VllmEngine(
            self.vllm,
            self.memory,
            limits,
            frozenset({EOS}),
            self._on_step,
            self._on_death,
            lambda: None,
            root,
            num_ranks,
        )

    def _on_step(self, result: StepResult) -> None:
        self.steps.append(result)
        self._changed.set()

    def _on_death(self, reason: BaseException) -> None:
        self.deaths.append(reason)
        self._changed.set()

    @property
    def outputs(self) -> list[TokenOutput]:
        return [output for step in self.steps for output in step.outputs]

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self._changed.clear()
            await self._changed.wait()

    async def until_outputs(self, count: int) -> list[TokenOutput]:
        await self.until(lambda: len(self.outputs) >= count)
        return self.outputs


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    found = Worker()
    async with found.engine:
        yield found


def written_values(seed: int = 0) -> torch.Tensor:
    """[layers, 2, heads, tokens, head_dim] for PROMPT."""
    return torch.randn(LAYOUT.shape(3, len(PROMPT)), generator=torch.Generator().manual_seed(seed))


def save(worker: Worker, order: KVOrder, values: torch.Tensor) -> None:
    """Does what the connector does in one step over the whole prompt."""
    for layer in range(3):
        worker.memory.write(layer, slice(0, 2), order.blocks, 0, values[layer])
    worker.engine.handle(Saved(order.request_id, len(PROMPT), len(PROMPT), 3))


async def test_a_prompt_is_read_while_it_is_written_and_freed_when_both_ends_are_done(worker: Worker) -> None:
    reports: list[Written | None] = []
    await worker.engine.add(EngineRequest("a", PROMPT, GREEDY, prefill_only=True, tenant_salt=b"t"), reports.append)
    prompt = await worker.vllm.prompt("a")
    assert (prompt.token_ids, prompt.salt, prompt.sampling["max_tokens"]) == (list(PROMPT), "74", 1)
    assert (prompt.order.save_tokens, prompt.order.load_tokens, len(prompt.order.blocks)) == (20, 0, 3)
    assert worker.memory.has_stamps(prompt.order.blocks, prompt.order.use)
    values = written_values()
    worker.memory.write(0, slice(0, 2), prompt.order.blocks, 0, values[0])
    worker.engine.handle(Saved("a", 0, 20, 1))
    with pytest.raises(NotWritten):
        await worker.engine.kv_read("a", KVSlice(0, 2, 0, 20))
    assert bytes(await worker.engine.kv_read("a", KVSlice(0, 1, 3, 10))) == values[0:1, :, :, 3:13].numpy().tobytes()
    save(worker, prompt.order, values)
    assert reports == [Written(0, 20, 1), Written(20, 20, 3)]
    worker.vllm.draw("a", 50)
    (output,) = await worker.until_outputs(1)
    assert (output.token_id, output.position, output.finish_reason) == (50, 0, None)
    worker.engine.handle(Ended("a", prompt.order.use))
    assert bytes(await worker.engine.kv_read("a", KVSlice(0, 3, 0, 20))) == values.numpy().tobytes()
    assert worker.engine.stats_now().num_held == 1
    assert worker.engine._blocks.num_free == 3
    assert await worker.engine.cancel("a")
    assert worker.engine._blocks.num_free == NUM_BLOCKS
    assert reports[-1] is None


async def test_a_cancelled_prompt_keeps_its_blocks_until_vllm_has_left_them(worker: Worker) -> None:
    await worker.engine.add(EngineRequest("a", PROMPT, GREEDY, prefill_only=True), lambda _: None)
    order = (await worker.vllm.prompt("a")).order
    assert await worker.engine.cancel("a")
    assert worker.vllm.aborted == ["a"]
    assert worker.engine._blocks.num_free == 3
    with pytest.raises(NotFound):
        await worker.engine.kv_read("a", KVSlice(0, 1, 0, 1))
    worker.engine.handle(Ended("a", order.use))
    assert worker.engine._blocks.num_free == NUM_BLOCKS
    assert not worker.memory.has_stamps(order.blocks, order.use)


async def test_prompts_wait_for_shared_memory_in_order(worker: Worker) -> None:
    for name in ("a", "b", "c"):
        await worker.engine.add(EngineRequest(name, PROMPT, GREEDY, prefill_only=True), lambda _: None)
    first = (await worker.vllm.prompt("a")).order
    await worker.vllm.prompt("b")
    assert worker.engine._blocks.num_free == 0
    assert "c" not in worker.vllm.prompts
    assert worker.engine.stats_now().num_waiting == 3
    await worker.engine.cancel("a")
    worker.engine.handle(Ended("a", first.use))
    assert set((await worker.vllm.prompt("c")).order.blocks) == set(first.blocks)


async def test_a_prompt_that_waits_for_memory_can_be_cancelled(worker: Worker) -> None:
    for name in ("a", "b", "c"):
        await worker.engine.add(EngineRequest(name, PROMPT, GREEDY, prefill_only=True), lambda _: None)
    first = (await worker.vllm.prompt("a")).order
    assert await worker.engine.cancel("c")
    await worker.engine.cancel("a")
    worker.engine.handle(Ended("a", first.use))
    assert worker.engine._blocks.num_free == 3
    assert "c" not in worker.vllm.prompts


async def test_vllms_cache_is_emptied_and_its_own_events_say_so(worker: Worker) -> None:
    await worker.engine.add(EngineRequest("a", PROMPT, GREEDY, prefill_only=True), lambda _: None)
    order = (await worker.vllm.prompt("a")).order
    save(worker, order, written_values())
    worker.engine.handle(Ended("a", order.use))
    worker.vllm.draw("a", 50)
    await worker.until_outputs(1)
    await worker.engine.cancel("a")
    keys = block_keys(root(b""), PROMPT, LAYOUT.block_tokens)
    for num_known in (2, 0):
        async with worker.engine.cached(keys) as blocks:
            assert len(blocks) == num_known
        assert await worker.engine.forget_prefixes() == CacheChanges()
    assert worker.vllm.num_emptied == 2


async def test_received_kv_is_loaded_and_decoding_goes_on(worker: Worker) -> None:
    values = written_values(1)
    assert await worker.engine.reserve(EngineRequest("d", PROMPT, GREEDY)) == 0
    for layer in range(3):
        await worker.engine.kv_write("d", KVSlice(layer, layer + 1, 0, 20), values[layer].numpy().tobytes(), Codec.RAW)
    await worker.engine.start("d", 40)
    prompt = await worker.vllm.prompt("d")
    order = prompt.order
    assert (prompt.token_ids, prompt.sampling["max_tokens"]) == ([*PROMPT, 40], 3)
    assert (order.load_tokens, order.save_tokens) == (20, 0)
    loaded = torch.stack([worker.memory.read(layer, slice(0, 2), order.blocks, 0, 20) for layer in range(3)])
    assert torch.equal(loaded, values)
    worker.engine.handle(Ended("d", order.use))  # loaded
    assert worker.engine._blocks.num_free == NUM_BLOCKS
    worker.vllm.draw("d", 41)
    worker.vllm.draw("d", 42)
    worker.vllm.draw("d", 43)
    outputs = await worker.until_outputs(3)
    assert [(output.token_id, output.position, output.finish_reason) for output in outputs] == [
        (41, 1, None),
        (42, 2, None),
        (43, 3, "length"),
    ]
    assert not await worker.engine.cancel("d")


async def test_what_vllm_has_cached_is_not_sent_and_reported(worker: Worker) -> None:
    keys = block_keys(root(b"t"), PROMPT, LAYOUT.block_tokens)
    worker.engine.note_blocks([BlockStored(["h0", "h1"], None, list(PROMPT[:16]), 8, [("74",), None])])
    await worker.until(lambda: bool(worker.steps))
    assert worker.steps[0].stored_keys == tuple(keys)
    assert await worker.engine.reserve(EngineRequest("d", PROMPT, GREEDY, tenant_salt=b"t")) == 16
    with pytest.raises(InvalidRequest):
        await worker.engine.kv_write("d", KVSlice(0, 1, 8, 1), bytes(64))
    await worker.engine.kv_write("d", KVSlice(0, 3, 16, 4), bytes(3 * 4 * 64))
    await worker.engine.start("d", 40)
    order = (await worker.vllm.prompt("d")).order
    assert (order.load_from, order.load_tokens) == (16, 20)
    assert await worker.engine.reserve(EngineRequest("e", PROMPT, GREEDY)) == 0
    worker.engine.note_blocks(None)
    await worker.until(lambda: len(worker.steps) > 1)
    assert set(worker.steps[1].evicted_keys) == set(keys)


async def test_the_salt_names_the_adapter(worker: Worker) -> None:
    salt = adapter_salt("ab" * 16, b"t")
    await worker.engine.add(EngineRequest("a", PROMPT, GREEDY, tenant_salt=salt))
    prompt = await worker.vllm.prompt("a")
    assert (prompt.adapter, prompt.salt) == ("ab" * 16, salt.hex())


async def test_private_kv_is_found_by_nobody_else(worker: Worker) -> None:
    await worker.engine.reserve(EngineRequest("d", PROMPT, GREEDY, tenant_salt=b"t"))
    await worker.engine.start("d", 40, is_private=True)
    assert (await worker.vllm.prompt("d")).salt not in ("", "74")


async def test_a_reservation_without_room_is_refused_and_one_given_up_is_free(worker: Worker) -> None:
    await worker.engine.reserve(EngineRequest("d", PROMPT, GREEDY))
    await worker.engine.reserve(EngineRequest("e", PROMPT, GREEDY))
    with pytest.raises(NoCapacity):
        await worker.engine.reserve(EngineRequest("f", PROMPT, GREEDY))
    gone: list[Written | None] = []
    assert await worker.engine.cancel("d")
    await worker.engine.reserve(EngineRequest("f", PROMPT, GREEDY), gone.append)
    assert await worker.engine.cancel("f")
    assert gone == [None]
    with pytest.raises(NotFound):
        await worker.engine.kv_write("f", KVSlice(0, 1, 0, 1), bytes(64))


async def test_what_vllm_has_no_blocks_for_is_refused(worker: Worker) -> None:
    await worker.engine.add(EngineRequest("a", PROMPT, GREEDY))
    await worker.vllm.prompt("a")
    worker.engine.handle(Stepped(1.0, 2.0, {}, 1, 20, num_free_blocks=2))
    with pytest.raises(NoCapacity):
        await worker.engine.reserve(EngineRequest("d", PROMPT, GREEDY))
    worker.vllm.draw("a", EOS)
    await worker.until_outputs(1)
    assert await worker.engine.reserve(EngineRequest("d", PROMPT, GREEDY)) == 0  # though no step has counted since


async def test_a_prompt_larger_than_the_shared_memory_is_refused(worker: Worker) -> None:
    with pytest.raises(InvalidRequest, match="staging-memory"):
        await worker.engine.reserve(EngineRequest("d", tuple(range(50)), GREEDY))


async def test_an_end_of_sequence_ends_the_request(worker: Worker) -> None:
    await worker.engine.add(EngineRequest("a", PROMPT, GREEDY))
    await worker.vllm.prompt("a")
    worker.vllm.draw("a", 40, EOS)
    outputs = await worker.until_outputs(2)
    assert [output.finish_reason for output in outputs] == [None, "stop"]
    assert worker.engine.stats_now().num_running == 0


async def test_what_vllm_refuses_or_ends_is_an_error_and_frees_its_blocks(worker: Worker) -> None:
    worker.vllm.refusal = InvalidRequest("no such thing")
    await worker.engine.add(EngineRequest("a", PROMPT, GREEDY, prefill_only=True), lambda _: None)
    (output,) = await worker.until_outputs(1)
    assert output.finish_reason == "error"
    assert worker.engine._blocks.num_free == NUM_BLOCKS
    worker.vllm.refusal = None
    await worker.engine.add(EngineRequest("b", PROMPT, GREEDY))
    await worker.vllm.prompt("b")
    worker.vllm.draw("b", is_failed=True)
    assert [output.finish_reason for output in await worker.until_outputs(2)] == ["error", "error"]


async def test_a_request_that_only_vllm_ends_fails(worker: Worker) -> None:
    """An end of sequence that is the only token allowed ends nothing here within `min_tokens`."""
    sampling = SamplingParams(max_tokens=9, min_tokens=4, allowed_token_ids=(2,))
    await worker.engine.add(EngineRequest("a", PROMPT, sampling))
    await worker.vllm.prompt("a")
    worker.vllm.draw("a", 2)
    await worker.until_outputs(1)
    worker.vllm.end("a")
    assert [output.finish_reason for output in await worker.until_outputs(2)] == [None, "error"]
    assert worker.engine.stats_now().num_running == 0


async def test_a_step_is_reported_with_its_tokens(worker: Worker) -> None:
    await worker.engine.add(EngineRequest("a", PROMPT, GREEDY))
    await worker.vllm.prompt("a")
    worker.engine.handle(Stepped(1.0, 1.5, {"a": (8, 12)}, 2, 30, num_free_blocks=5))
    worker.vllm.draw("a", 40)
    await worker.until_outputs(1)
    first = worker.steps[0]
    assert (first.num_prefill_tokens, first.num_prefill_pairs, first.num_decode_seqs) == (12, 12 * 14.0, 2)
    assert (first.decode_context_tokens, first.duration_s) == (30, 0.5)
    assert first.num_cached_tokens == {"a": 8}
    assert first.num_computed_tokens == {"a": 12}
    assert worker.engine.stats_now().num_free_blocks == 5
    assert worker.engine.stats_now().decode_context_tokens == len(PROMPT) + 1


async def test_a_step_that_was_planned_during_another_lasts_from_its_end(worker: Worker) -> None:
    worker.engine.handle(Stepped(1.0, 3.0, {}, 1, 20, num_free_blocks=5))
    worker.engine.handle(Stepped(2.0, 3.5, {}, 1, 21, num_free_blocks=5))
    await worker.until(lambda: len(worker.steps) == 2)
    assert [step.duration_s for step in worker.steps] == [2.0, 0.5]


async def test_kv_counts_once_every_rank_has_it() -> None:
    worker = Worker(num_ranks=2)
    async with worker.engine:
        reports: list[Written | None] = []
        await worker.engine.add(EngineRequest("a", PROMPT, GREEDY, prefill_only=True), reports.append)
        order = (await worker.vllm.prompt("a")).order
        worker.engine.handle(Saved("a", 20, 20, 3, rank=0))
        assert reports == []
        worker.engine.handle(Saved("a", 0, 20, 2, rank=1))
        assert reports == [Written(0, 20, 2)]
        await worker.engine.cancel("a")
        worker.engine.handle(Ended("a", order.use, rank=0))
        assert worker.engine._blocks.num_free == 3
        worker.engine.handle(Ended("a", order.use, rank=1))
        assert worker.engine._blocks.num_free == NUM_BLOCKS


async def test_the_death_of_vllm_is_reported_once_and_refuses_everything(worker: Worker) -> None:
    await worker.engine.add(EngineRequest("a", PROMPT, GREEDY))
    await worker.engine.add(EngineRequest("b", PROMPT, GREEDY))
    await worker.vllm.prompt("b")
    worker.vllm.die()
    await worker.until(lambda: bool(worker.deaths))
    worker.engine.die(RuntimeError("again"))
    assert len(worker.deaths) == 1
    with pytest.raises(Unavailable):
        worker.engine.check_open()
    with pytest.raises(Unavailable):
        await worker.engine.add(EngineRequest("c", PROMPT, GREEDY))


async def test_a_known_prefix_is_loaded_before_vllm_computes_the_rest(worker: Worker) -> None:
    values, progress, reports = written_values(3), list[tuple[int, int]](), list[Written | None]()
    begun = asyncio.Event()

    def on_progress(num_tokens: int, num_loaded: int) -> None:
        progress.append((num_tokens, num_loaded))
        begun.set()

    order = RestoreOrder(2, 0, on_progress)
    request = EngineRequest("a", PROMPT, GREEDY, prefill_only=True)
    await worker.engine.add(request, reports.append, order)
    await begun.wait()
    for block in (1, 0):
        cells = values[:, :, :, 8 * block : 8 * block + 8].contiguous().numpy().tobytes()
        await worker.engine.load_block("a", block, cells)
        assert "a" not in worker.vllm.prompts
        worker.engine.note_loaded("a", [block])
    sent = (await worker.vllm.prompt("a")).order
    assert (sent.load_from, sent.load_tokens, sent.save_tokens) == (0, 16, 20)
    assert progress == [(0, 0), (0, 0), (16, 16)]
    assert reports[-1] == Written(0, 0, 0, ((0, 16),))
    got = await worker.engine.kv_read("a", KVSlice(0, 3, 2, 9))
    assert bytes(got) == values[:, :, :, 2:11].contiguous().numpy().tobytes()
    worker.engine.handle(Stepped(1.0, 1.5, {"a": (16, 4)}, 0, 0, num_free_blocks=5))
    worker.vllm.draw("a", 50)
    assert (await worker.until_outputs(1))[0].finish_reason == "error"  # its KV was not saved
    assert worker.steps[0].num_cached_tokens == {"a": 0}


@pytest.mark.parametrize("gives_up_by_fence", [True, False])
async def test_what_is_not_loaded_is_computed(worker: Worker, gives_up_by_fence: bool) -> None:
    begun = asyncio.Event()
    order = RestoreOrder(2, 0, lambda tokens, loaded: begun.set())
    await worker.engine.add(EngineRequest("a", PROMPT, GREEDY), None, order)
    await begun.wait()
    await worker.engine.load_block("a", 1, bytes(LAYOUT.block_bytes))
    worker.engine.note_loaded("a", [1])
    if gives_up_by_fence:
        assert await worker.engine.move_fence("a", 1) == 2
    else:
        worker.engine.note_loaded("a", (), [0])
    assert (await worker.vllm.prompt("a")).order.load_tokens == 0
    with pytest.raises(NotFound):
        await worker.engine.load_block("a", 0, bytes(LAYOUT.block_bytes))


async def test_a_prompt_that_waits_for_its_prefix_can_be_cancelled(worker: Worker) -> None:
    await worker.engine.add(EngineRequest("a", PROMPT, GREEDY), None, RestoreOrder(2, 0, lambda *_: None))
    assert await worker.engine.cancel("a")
    assert worker.engine._blocks.num_free == NUM_BLOCKS
    assert "a" not in worker.vllm.prompts


async def test_the_last_prompts_can_be_read_by_their_keys_until_room_is_needed(worker: Worker) -> None:
    await worker.engine.add(EngineRequest("a", PROMPT, GREEDY, prefill_only=True, tenant_salt=b"t"), lambda _: None)
    order, values = (await worker.vllm.prompt("a")).order, written_values()
    save(worker, order, values)
    worker.engine.handle(Ended("a", order.use))
    worker.vllm.draw("a", 50)
    await worker.until_outputs(1)
    keys = block_keys(root(b"t"), PROMPT, LAYOUT.block_tokens)
    (chain,) = [chain for step in worker.steps for chain in step.chains]
    assert (chain.keys, chain.tenant_salt) == (tuple(keys), b"t")
    await worker.engine.cancel("a")
    assert worker.engine._blocks.num_free == NUM_BLOCKS
    async with worker.engine.cached(keys) as blocks:
        assert len(blocks) == 2
        cells = bytes(await worker.engine.read_block(blocks[1]))
        assert cells == values[:, :, :, 8:16].contiguous().numpy().tobytes()
        assert worker.engine._blocks.num_free == NUM_BLOCKS - 2
    for name in ("b", "c"):
        await worker.engine.reserve(EngineRequest(name, PROMPT, GREEDY))
    async with worker.engine.cached(keys) as blocks:
        assert blocks == []


def kept_keys(worker: Worker) -> list[tuple[bytes, ...]]:
    return [chain.keys for step in worker.steps for chain in step.chains]


async def test_an_answer_goes_into_the_shared_memory_when_it_has_ended(worker: Worker) -> None:
    sampling = SamplingParams(max_tokens=5, temperature=0.0)
    await worker.engine.reserve(EngineRequest("d", PROMPT, sampling, tenant_salt=b"t"))
    await worker.engine.start("d", 40)
    order = (await worker.vllm.prompt("d")).order
    assert (order.is_kept, order.is_watched) == (True, False)
    worker.engine.handle(Ended("d", order.use))  # loaded
    worker.vllm.draw("d", 41)
    await worker.until_outputs(1)
    keep = worker.engine.handle(Finished("d", order.use, 24, (41, 42, 43)))  # before its last tokens arrive
    worker.vllm.draw("d", 42, 43, 44)
    await worker.until_outputs(4)
    assert keep is not None
    assert (keep.finished_use, keep.first, len(keep.blocks)) == (order.use, 2, 1)  # two blocks of the prompt are here
    assert worker.memory.has_stamps(keep.blocks, keep.use)
    cells = torch.full((2, 2, 8, 4), 7.0)
    for layer in range(3):
        worker.memory.write(layer, slice(0, 2), keep.blocks, 0, cells)
    worker.engine.handle(Ended("d", keep.use))
    keys = block_keys(root(b"t"), [*PROMPT, 40, 41, 42, 43], LAYOUT.block_tokens)
    await worker.until(lambda: bool(kept_keys(worker)))
    assert kept_keys(worker) == [tuple(keys)]
    async with worker.engine.cached(keys) as blocks:
        assert len(blocks) == 3
        assert bytes(await worker.engine.read_block(blocks[2])) == torch.full((3, 2, 2, 8, 4), 7.0).numpy().tobytes()
    assert worker.engine._blocks.num_free == NUM_BLOCKS


async def test_a_cancelled_answer_is_kept_as_far_as_it_was_computed(worker: Worker) -> None:
    await worker.engine.reserve(EngineRequest("d", PROMPT, SamplingParams(max_tokens=30)))
    await worker.engine.start("d", 40)
    order = (await worker.vllm.prompt("d")).order
    worker.engine.handle(Ended("d", order.use))
    worker.vllm.draw("d", *range(41, 45))
    await worker.until_outputs(4)
    await worker.engine.cancel("d")
    finished = Finished("d", order.use, 32, tuple(range(41, 52)))  # vLLM was ahead
    keep = worker.engine.handle(finished)
    assert keep is not None
    assert (keep.first, len(keep.blocks)) == (2, 2)
    worker.engine.handle(Ended("d", keep.use))
    await worker.until(lambda: bool(kept_keys(worker)))
    assert kept_keys(worker) == [tuple(block_keys(root(b""), [*PROMPT, *range(40, 52)], LAYOUT.block_tokens))]
    assert worker.engine.handle(finished) == Keep(order.use, keep.use + 1, 0, ())
    assert worker.engine.handle(Finished("d", order.use, 0)) is None  # nobody waits for an answer


@pytest.mark.parametrize("is_private", [True, False])
async def test_nothing_is_kept_without_room_or_of_private_kv(worker: Worker, is_private: bool) -> None:
    await worker.engine.reserve(EngineRequest("d", PROMPT, SamplingParams(max_tokens=30)))
    await worker.engine.start("d", 40, is_private=is_private)
    order = (await worker.vllm.prompt("d")).order
    assert order.is_kept is not is_private
    await worker.engine.reserve(EngineRequest("e", PROMPT, GREEDY))
    worker.vllm.draw("d", *range(41, 55))
    await worker.until_outputs(14)
    keep = worker.engine.handle(Finished("d", order.use, 32, tuple(range(41, 52))))
    assert keep is not None
    assert keep.blocks == ()


async def test_a_prompt_that_nobody_awaits_is_saved_behind_its_first_token(worker: Worker) -> None:
    await worker.engine.add(EngineRequest("a", PROMPT, GREEDY, tenant_salt=b"t"))
    order = (await worker.vllm.prompt("a")).order
    assert (order.is_watched, order.is_kept, order.save_tokens) == (False, True, 20)
    worker.vllm.draw("a", 50)
    await worker.until_outputs(1)
    save(worker, order, written_values())
    await worker.until(lambda: bool(kept_keys(worker)))
    assert kept_keys(worker) == [tuple(block_keys(root(b"t"), PROMPT, LAYOUT.block_tokens))]


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        (SamplingParams(max_tokens=1, pooling="last"), "pooling"),
        (SamplingParams(max_tokens=4, num_top_logprobs=21), "logprobs"),  # vLLM's own limit
    ],
)
async def test_what_vllm_cannot_do_is_refused_before_kv_moves(
    worker: Worker, sampling: SamplingParams, param: str
) -> None:
    for ask in (worker.engine.reserve, worker.engine.add):
        with pytest.raises(InvalidRequest, match=r"embeddings|vLLM refuses") as refused:
            await ask(EngineRequest("d", PROMPT, sampling))
        assert refused.value.param == param
    assert worker.engine.stats_now().num_reserved == 0
    assert worker.engine._blocks.num_free == NUM_BLOCKS


async def test_log_probabilities_of_a_prompt_come_with_its_first_token(worker: Worker) -> None:
    await worker.engine.add(EngineRequest("a", PROMPT, SamplingParams(max_tokens=3, num_prompt_logprobs=1)))
    assert (await worker.vllm.prompt("a")).sampling["prompt_logprobs"] == 1
    known = (TokenLogprobs(-1.0, ((3, -0.5),), 2),)
    worker.vllm.draw("a", 50, 51, prompt_logprobs=known)
    first, second = await worker.until_outputs(2)
    assert (first.prompt_logprobs, second.prompt_logprobs) == (known, ())


async def test_the_memory_is_the_same_under_its_path() -> None:
    memory = StagingMemory(LAYOUT, 2)
    other = StagingMemory(LAYOUT, 2, memory.path)
    values = torch.arange(2 * 2 * 12 * 4, dtype=torch.float32).reshape(2, 2, 12, 4)
    memory.write(1, slice(0, 2), (1, 0), 2, values)
    assert torch.equal(other.read(1, slice(0, 2), (1, 0), 2, 14), values)
    other.stamps[1] = 7
    assert memory.has_stamps((1,), 7)
    assert not memory.has_stamps((0, 1), 7)
