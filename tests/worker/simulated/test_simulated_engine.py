"""The simulated engine schedules as the real one does, in the time that its profile says."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from halfmoon.engine.kv_memory.kv_access import NotWritten
from halfmoon.engine.request import Constraint, EngineRequest, SamplingParams, TokenOutput
from halfmoon.engine.step_result import StepResult
from halfmoon.errors import InvalidRequest, NoCapacity, NotFound
from halfmoon.kv.frame_plan import Written
from halfmoon.kv.keys import block_keys, root_key
from halfmoon.kv.kv_layout import KVLayout, KVSlice
from halfmoon.policy.models.latency import PrefillModel, StepModel
from halfmoon.sim.answer_model import AnswerModel
from halfmoon.sim.latency_sources.worker_profile import WorkerProfile, coefficients
from halfmoon.worker.simulated.simulated_engine import SimulatedEngine

BLOCK = 16
LAYOUT = KVLayout(1, 1, 1, "float16", BLOCK)
ROOT = partial(root_key, "fingerprint", LAYOUT)
PROFILE = WorkerProfile(
    "test",
    coefficients("test", PrefillModel(0.1, 0.001, 1e-6), StepModel(0.01, 0.002, 1e-5), 64 * BLOCK, 1),
    link_bytes_per_s=0,
    context_tokens=1024,
    max_batch_tokens=256,
    chunk_tokens=32,
    max_running=8,
).scaled(1000)
NESTS = replace(PROFILE, nests_steps=True).scaled(1 / 700)  # a whole step takes a quarter of a second


def with_kv(kv_tokens: int) -> WorkerProfile:
    return replace(PROFILE, latency=replace(PROFILE.latency, kv_tokens=kv_tokens))


def request(name: str, num_prompt: int, max_tokens: int = 1, **options: Any) -> EngineRequest:
    sampling = SamplingParams(max_tokens, ignore_eos=True)
    return EngineRequest(name, tuple(range(num_prompt)), **{"sampling": sampling, **options})


class Simulated:
    """An engine, and the steps that it has told of."""

    def __init__(self, profile: WorkerProfile = PROFILE, answers: AnswerModel | None = None) -> None:
        self.steps: list[StepResult] = []
        self._stepped = asyncio.Event()
        self.engine = SimulatedEngine(profile, LAYOUT, ROOT, answers or AnswerModel(2000), self._note)

    async def until_idle(self) -> None:
        """Runs until nothing is left to compute."""
        async with self.engine.running():
            await self.until(lambda: not self.num_unfinished)

    async def until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            await self._stepped.wait()
            self._stepped.clear()

    @property
    def num_unfinished(self) -> int:
        stats = self.engine.stats_now()
        return stats.num_running + stats.num_waiting + stats.num_paused

    @property
    def outputs(self) -> list[TokenOutput]:
        return [output for step in self.steps for output in step.outputs]

    def _note(self, step: StepResult) -> None:
        self.steps.append(step)
        self._stepped.set()

    async def decode(self, *requests: EngineRequest) -> None:
        for one in requests:
            await self.engine.reserve(one)
            await self.engine.start(one.request_id, 0)


async def test_a_short_prompt_shares_the_steps_of_a_long_one() -> None:
    simulated = Simulated()
    await simulated.engine.add(request("long", 1000))
    await simulated.engine.add(request("short", 10))
    await simulated.until_idle()
    assert simulated.steps[0].num_computed_tokens == {"long": 64, "short": 10}
    assert [output.request_id for output in simulated.outputs] == ["short", "long"]


async def test_a_prompt_in_chunks_takes_what_the_model_says_and_each_further_pass() -> None:
    simulated = Simulated()
    await simulated.engine.add(request("r", 600))
    await simulated.until_idle()
    assert [step.num_prefill_tokens for step in simulated.steps] == [256, 256, 88]
    seconds = sum(step.duration_s for step in simulated.steps)
    assert seconds == pytest.approx(PROFILE.prefill.seconds(600) + 2 * PROFILE.prefill.a)
    assert sum(step.num_prefill_pairs for step in simulated.steps) == 600**2 / 2


async def test_a_short_prompt_runs_in_the_middle_of_a_step_which_ends_as_much_later() -> None:
    simulated = Simulated(NESTS)
    async with simulated.engine.running():
        began_s = time.monotonic()
        await simulated.engine.add(request("long", 256, prefill_only=True))
        await asyncio.sleep(0.02)
        await simulated.engine.add(request("short", 20, prefill_only=True))
        await asyncio.sleep(0.02)
        await simulated.engine.add(request("comes while that runs", 10, prefill_only=True))
        await simulated.until(lambda: len(simulated.outputs) == 3)
        took_s = time.monotonic() - began_s
    assert [output.request_id for output in simulated.outputs] == ["short", "comes while that runs", "long"]
    seconds = [NESTS.prefill.seconds(num_tokens) for num_tokens in (20, 10, 256)]
    assert [step.duration_s for step in simulated.steps] == pytest.approx(seconds)
    assert took_s >= sum(seconds)
    assert simulated.steps[-1].interrupted_s == pytest.approx(sum(seconds[:2]))


@pytest.mark.parametrize("newcomer", [request("short", 20), request("short", 200, prefill_only=True)])
async def test_others_wait_for_the_end_of_a_step(newcomer: EngineRequest) -> None:
    simulated = Simulated(NESTS)
    async with simulated.engine.running():
        await simulated.engine.add(request("long", 256, prefill_only=True))
        await asyncio.sleep(0.02)
        await simulated.engine.add(newcomer)
        await simulated.until(lambda: len(simulated.outputs) == 2)
    assert [output.request_id for output in simulated.outputs] == ["long", "short"]


async def test_prompts_share_a_pass() -> None:
    simulated = Simulated()
    for name in ("one", "two"):
        await simulated.engine.add(request(name, 50))
    await simulated.until_idle()
    (step,) = simulated.steps
    assert step.duration_s == pytest.approx(2 * PROFILE.prefill.seconds(50) - PROFILE.prefill.a)


async def test_decodes_share_a_step_and_leave_when_they_are_done() -> None:
    simulated = Simulated()
    await simulated.decode(request("short", 20, 3), request("long", 20, 4))
    await simulated.until_idle()
    assert simulated.steps[0].duration_s == pytest.approx(PROFILE.step.seconds(2, 42))
    told = [[(output.request_id, output.finish_reason) for output in step.outputs] for step in simulated.steps]
    assert told == [[("short", None), ("long", None)], [("short", "length"), ("long", None)], [("long", "length")]]
    assert simulated.engine.stats_now().num_free_blocks == 64


async def test_a_known_prefix_is_not_computed_again() -> None:
    simulated = Simulated()
    await simulated.engine.add(request("first", 100))
    await simulated.until_idle()
    (step,) = simulated.steps
    assert step.stored_keys == tuple(block_keys(ROOT(b""), range(100), BLOCK))
    await simulated.engine.add(request("second", 96))
    await simulated.engine.add(request("stranger", 96, tenant_salt=b"other"))
    await simulated.until_idle()
    (_, step) = simulated.steps
    assert step.num_cached_tokens == {"second": 80, "stranger": 0}  # one token at least is left to compute


async def test_a_prefilled_request_is_held_and_its_kv_is_told_until_it_is_cancelled() -> None:
    simulated = Simulated(replace(PROFILE, link_latency_s=1e-6))
    heard: list[Written | None] = []
    await simulated.engine.add(request("r", 300, 5, prefill_only=True), heard.append)
    with pytest.raises(NotWritten):
        await simulated.engine.kv_read("r", KVSlice(0, 1, 0, 1))
    await simulated.until_idle()
    async with asyncio.timeout(10):
        while len(heard) < 2:  # noqa: ASYNC110 - timers of the link, which nobody else hears of
            await asyncio.sleep(0)
    assert heard == [Written(256), Written(300)]
    assert len(await simulated.engine.kv_read("r", KVSlice(0, 1, 0, 300))) == 300 * 4
    assert simulated.engine.stats_now().num_held == 1
    assert await simulated.engine.cancel("r")
    assert not await simulated.engine.cancel("r")
    assert heard[2:] == [None]
    assert simulated.engine.stats_now().num_free_blocks == 64


async def test_kv_that_its_reader_has_does_not_cross_the_link() -> None:
    simulated = Simulated(replace(PROFILE, link_bytes_per_s=1e-3))
    held: list[Written | None] = []
    lacked: list[Written | None] = []
    await simulated.engine.add(request("held", 50, prefill_only=True, held_tokens=50), held.append)
    await simulated.engine.add(request("lacked", 50, prefill_only=True, held_tokens=32), lacked.append)
    await simulated.until_idle()
    assert held == [Written(50)]
    assert lacked == []


async def test_a_moved_request_goes_on_at_its_position() -> None:
    simulated = Simulated()
    await simulated.engine.add(request("r", 20, 6, output_token_ids=(1, 2, 3, 4)))
    await simulated.until_idle()
    assert [output.position for output in simulated.outputs] == [4, 5]


async def test_preempted_requests_are_computed_again_and_all_end() -> None:
    simulated = Simulated(with_kv(6 * BLOCK))
    await simulated.decode(request("one", 40, 40), request("two", 40, 40))
    await simulated.until_idle()
    assert sum(step.num_preempted for step in simulated.steps) > 0
    for name in ("one", "two"):
        assert [one.position for one in simulated.outputs if one.request_id == name] == list(range(1, 40))
    assert simulated.engine.stats_now().num_free_blocks == 6


async def test_a_reservation_amid_a_step_pauses_a_lower_class_when_that_has_ended() -> None:
    simulated = Simulated(replace(PROFILE, max_running=1))
    low = request("low", 40, 9, priority=1, class_priority=1, max_pause_s=1e9)
    async with simulated.engine.running():
        await simulated.decode(low)
        await simulated.until(lambda: bool(simulated.steps))
        await simulated.engine.reserve(request("high", 40, 5))
        assert simulated.engine.stats_now().num_paused == 1
        with pytest.raises(NoCapacity, match="wait"):
            await simulated.engine.reserve(replace(low, request_id="lower"))
        await simulated.engine.start("high", 0)
        await simulated.until(lambda: not simulated.num_unfinished)
    ends = [output.request_id for output in simulated.outputs if output.finish_reason]
    assert ends == ["high", "low"]
    assert [one.position for one in simulated.outputs if one.request_id == "low"] == list(range(1, 9))
    assert sum(step.num_prefill_tokens for step in simulated.steps) == 0  # nothing was computed again
    assert sum(step.num_paused for step in simulated.steps) == 1


async def test_what_has_no_room_is_refused() -> None:
    simulated = Simulated(with_kv(4 * BLOCK))
    await simulated.engine.reserve(request("r", 40, 2))
    with pytest.raises(NoCapacity) as refusal:
        await simulated.engine.reserve(request("s", 40, 2))
    assert refusal.value.retry_after_ms
    with pytest.raises(InvalidRequest, match="blocks"):
        await simulated.engine.add(request("large", 60, 20))
    with pytest.raises(InvalidRequest, match="already"):
        await simulated.engine.add(request("r", 1))
    with pytest.raises(NotFound):
        await simulated.engine.start("s", 0)
    with pytest.raises(NotFound):
        await simulated.engine.kv_write("s", KVSlice(0, 1, 0, 1), b"")
    assert await simulated.engine.cancel("r")


async def test_an_answer_ends_where_the_answer_model_says() -> None:
    answers = AnswerModel(2000, text="echo", length="seed")
    simulated = Simulated(answers=answers)
    await simulated.engine.add(request("seeded", 20, sampling=SamplingParams(30, seed=7)))
    await simulated.engine.add(request("stopped", 20, sampling=SamplingParams(30, seed=25, stop_token_ids=(3,))))
    await simulated.engine.add(request("cut", 20, sampling=SamplingParams(5, seed=7)))
    await simulated.until_idle()
    ends = {one.request_id: (one.position + 1, one.finish_reason) for one in simulated.outputs if one.finish_reason}
    assert ends == {"seeded": (7, "stop"), "stopped": (4, "stop"), "cut": (5, "length")}


async def test_an_answer_of_one_token_has_nothing_to_decode() -> None:
    simulated = Simulated(answers=AnswerModel(2000, length="seed"))
    await simulated.engine.reserve(request("r", 20, sampling=SamplingParams(30, seed=1)))
    with pytest.raises(InvalidRequest):
        await simulated.engine.start("r", 0)
    assert simulated.engine.stats_now().num_free_blocks == 64


async def test_what_needs_a_model_is_refused() -> None:
    sampling = SamplingParams(5, constraint=Constraint("regex", "a"))
    with pytest.raises(InvalidRequest, match="response_format"):
        await Simulated().engine.add(request("r", 5, sampling=sampling))


async def test_prefix_cache_and_loads_change_between_steps_only() -> None:
    simulated = Simulated()
    engine = simulated.engine
    await engine.add(request("r", 600))
    async with engine.running():
        await asyncio.sleep(0)  # the first step runs
        engine.note_loaded("r", [0])
        with pytest.raises(NotFound):
            await engine.move_fence("gone", 0)
        assert len(simulated.steps) == 1
        async with engine.cached(block_keys(ROOT(b""), range(600), BLOCK)) as blocks:
            assert len(simulated.steps) == 2
            assert len(blocks) == 2 * 256 // BLOCK
            assert len(await engine.read_block(blocks[0])) == LAYOUT.block_bytes
        with pytest.raises(NotFound):
            await engine.load_block("r", 0, b"")
