"""Prompts in the middle of a running step: the simulated worker and the engine's core take the same time."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from halfmoon.engine.engine_core import EngineCore, Step
from halfmoon.engine.request import EngineRequest, SampledToken, SamplingParams
from halfmoon.engine.request_check import RequestLimits
from halfmoon.engine.scheduling.block_pool import BlockPool
from halfmoon.engine.scheduling.schedule import SchedulerLimits
from halfmoon.kv.kv_layout import KVLayout
from halfmoon.policy.models.latency import PrefillModel, StepModel
from halfmoon.policy.nested_step import nested_cost
from halfmoon.sim.cluster.cluster_spec import BatchLimits, ClusterSpec, Failure, WorkerGroup
from halfmoon.sim.cluster.contention import Contention
from halfmoon.sim.latency_sources.latency_model import LatencyModel, PrefillPiece, StepPiece
from halfmoon.sim.result import SimResult
from halfmoon.sim.simulation import simulate
from halfmoon.sim.worker.job import Job
from halfmoon.sim.worker.worker import SimWorker
from halfmoon.sim.workloads.workload import Prefixes, Workload
from tests.sim.small_clusters import FAST, MODEL, group, pair, work
from tests.sim.test_policy_agreement import prefixes_of
from tests.sim.test_scheduler_agreement import BLOCK_TOKENS, CLASSES

Arrivals = list[tuple[float, tuple[int, ...], int]]  # when, the prompt, and its class
Case = tuple[Arrivals, BatchLimits, int, int]  # with the number of blocks, and the seconds that a step takes besides
NESTS = BatchLimits(max_batch_tokens=512, nests_steps=True)


def engine_times(arrivals: Arrivals, limits: BatchLimits, num_blocks: int, launch_s: int) -> tuple[list[float], int]:
    """When each prompt gets its first token, and how many nested steps run. A token takes a second."""
    core = EngineCore(
        BlockPool(num_blocks),
        RequestLimits(100, 1024, num_blocks, KVLayout(1, 1, 1, "float16", BLOCK_TOKENS)),
        SchedulerLimits(limits.max_batch_tokens, limits.chunk_tokens, limits.max_running),
        bytes,
        lambda one: one.finish_reason(frozenset()),
    )
    first_s: dict[str, float] = {}
    now_s, num_added, num_nested_steps = 0.0, 0, 0

    def add_until(end_s: float) -> None:
        nonlocal num_added
        for at_s, prompt, number in arrivals[num_added:]:
            if at_s > end_s:
                break
            request = EngineRequest(
                str(num_added),
                prompt,
                SamplingParams(1),
                arrival_s=at_s,
                priority=CLASSES[number].priority,
                prefill_only=True,
            )
            core.add(request)
            num_added += 1

    def seconds(step: Step) -> float:
        return float(launch_s + step.schedule.num_tokens)

    def end(step: Step) -> None:
        sampled = [SampledToken(1) for item in step.schedule.scheduled if item.samples]
        for output in core.end_step(step, sampled).outputs:
            first_s[output.request_id] = now_s
            core.cancel(output.request_id)

    while len(first_s) < len(arrivals):
        add_until(now_s)
        outer = core.begin_step(now_s)
        if not outer.schedule.scheduled:
            now_s = arrivals[num_added][0]
            continue
        end_s, num_nested = now_s + seconds(outer), 0
        while num_added < len(arrivals) and (now_s := arrivals[num_added][0]) <= end_s:
            add_until(now_s)
            while outer.schedule.can_nest and limits.nests_steps:
                nested = core.begin_nested(outer.schedule, (end_s - now_s) / seconds(outer), num_nested, now_s)
                if not nested.schedule.scheduled:
                    break
                num_nested += nested_cost(nested.schedule.num_tokens, outer.schedule.num_tokens)
                num_nested_steps += 1
                now_s, end_s = now_s + seconds(nested), end_s + seconds(nested)
                add_until(now_s)
                end(nested)
        now_s = end_s
        end(outer)
    core.check_integrity()
    return [first_s[str(number)] for number in range(len(arrivals))], num_nested_steps


def simulated_times(arrivals: Arrivals, limits: BatchLimits, num_blocks: int, launch_s: int) -> list[float]:
    latency = LatencyModel(
        (PrefillPiece(0, PrefillModel(float(launch_s), 1.0, 0.0)),),
        (StepPiece(0, StepModel(1.0, 0.0, 0.0)),),
        BLOCK_TOKENS * num_blocks,
        1.0,
        "test",
    )
    groups = WorkerGroup("prefill", 1, latency, limits), WorkerGroup("decode", 1, latency)
    starts_s, prompts, numbers = zip(*arrivals, strict=True)
    lengths = np.array([len(prompt) for prompt in prompts])
    rows = [(0, len(prompt), 1, number) for prompt, number in zip(prompts, numbers, strict=True)]
    prefixes: Prefixes = prefixes_of(rows, list(prompts))
    workload = Workload(np.array(starts_s), lengths, np.ones_like(lengths), prefixes, classes=np.array(numbers))
    result = simulate(ClusterSpec(groups, FAST, block_tokens=BLOCK_TOKENS, classes=CLASSES), workload)
    times: list[float] = (result.start_s + result.ttft_s).tolist()
    return times


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num = draw(st.integers(2, 14))
    longest_gap = draw(st.sampled_from([16, 80]))
    gaps = draw(st.lists(st.integers(1, longest_gap), min_size=num, max_size=num))
    classes = st.integers(0, draw(st.sampled_from([0, len(CLASSES) - 1])))
    lengths = st.integers(1, 120) | st.integers(1, 12)
    num_blocks = draw(st.sampled_from([42, 80, 800]))  # the longest prompt has 40
    arrivals: Arrivals = []
    for number, at in enumerate(accumulate(gaps)):
        prompt: tuple[int, ...] = ()
        if number and num_blocks == 800 and draw(st.booleans()):  # nothing is evicted there
            base = draw(st.sampled_from(arrivals))[1]
            prompt = base[: draw(st.integers(0, len(base)))]
        prompt += (2 + number,) * draw(lengths)
        arrivals.append((at / 2, prompt[:160], draw(classes)))
    limits = BatchLimits(draw(st.integers(20, 160)), draw(st.integers(2, 16)), draw(st.integers(1, 8)))
    return arrivals, replace(limits, nests_steps=True), num_blocks, draw(st.sampled_from([0, 1, 4]))


BESIDE_A_LAST_TOKEN: Case = (  # which counts as a decode: the second step has no nested one, and the third has
    [(0.5, (2,) * 11, 0), (1.0, (3,) * 8, 0), (12.0, (4,), 0), (13.0, (5,) * 20, 0), (20.0, (6,) * 2, 0)],
    BatchLimits(10, 16, 8, nests_steps=True),
    400,
    0,
)


@settings(max_examples=400)
@example(BESIDE_A_LAST_TOKEN)
@given(cases())
def test_both_take_the_same_time(case: Case) -> None:
    assert simulated_times(*case) == engine_times(*case)[0]


@given(cases())
def test_both_take_the_same_time_without_nested_steps(case: Case) -> None:
    arrivals, limits, num_blocks, launch_s = case
    plain = arrivals, replace(limits, nests_steps=False), num_blocks, launch_s
    assert simulated_times(*plain) == engine_times(*plain)[0]


def ends_of(spec: ClusterSpec, *rows: tuple[float, int, int], ids: list[list[int]] | None = None) -> SimResult:
    return simulate(spec, work(*rows, ids=ids))


def nesting(role: str = "prefill", latency: LatencyModel = MODEL) -> ClusterSpec:
    """One worker whose steps have at most 512 tokens of a millisecond, and a decode worker."""
    return replace(pair(), groups=(group(role, limits=NESTS, latency=latency), group("decode")))


def test_the_cases_nest() -> None:
    """Else the first test would prove less than it says."""
    arrivals: Arrivals = [(0.0, (2,) * 40, 0), (10.0, (3,) * 6, 0), (12.0, (4,) * 5, 0), (20.0, (5,) * 21, 0)]
    limits = replace(NESTS, max_batch_tokens=40)
    nested = [51.0, 16.0, 21.0, 72.0]  # the last one has more than half as many tokens as the step
    assert engine_times(arrivals, limits, 400, 0) == (nested, 2)
    assert simulated_times(arrivals, limits, 400, 0) == nested
    assert simulated_times(arrivals, replace(limits, nests_steps=False), 400, 0) == [40.0, 72.0, 72.0, 72.0]


def test_a_short_prompt_does_not_wait_for_the_end_of_a_step() -> None:
    """One that comes during its step is looked at when that ends. No time and no step counts twice."""
    rows = (0.0, 400, 1), (0.1, 50, 1), (0.12, 30, 1)
    found = ends_of(nesting(), *rows)
    assert found.ttft_s == pytest.approx([0.48, 0.05, 0.06])
    assert (found.workers.busy_s[0], found.workers.num_steps[0]) == (pytest.approx(0.48), 3)
    whole = ends_of(pair(), *rows)
    assert whole.ttft_s == pytest.approx([0.4, 0.38, 0.36])
    assert whole.workers.num_steps[0] == 2


@pytest.mark.parametrize(("role", "num_stages"), [("both", 1), ("prefill", 2)])
def test_steps_with_decodes_and_those_of_pipelines_have_no_nested_ones(role: str, num_stages: int) -> None:
    rows = [(number / 10, 400 if number % 3 else 40, 9) for number in range(12)]
    spec = nesting(role, replace(MODEL, num_stages=num_stages))
    plain = replace(spec, groups=(replace(spec.groups[0], limits=BatchLimits(512)), spec.groups[1]))
    nested, whole = ends_of(spec, *rows), ends_of(plain, *rows)
    for name in ("ttft_s", "end_s", "longest_gap_s"):
        np.testing.assert_array_equal(getattr(nested, name), getattr(whole, name))
    np.testing.assert_array_equal(nested.workers.num_steps, whole.workers.num_steps)


def test_a_slowdown_counts_for_the_nested_step_and_the_rest_of_the_outer_one() -> None:
    """Decoding from 0.1 to 0.188 s, of eight steps of 11 ms, makes prompts take twice as long.

    At 0.18 s 40 of 400 tokens are computed. Of the nested 50 four are when the decodes end, and 46 are to come.
    """
    groups = tuple(replace(one, first_node=0) for one in nesting().groups)
    spec = ClusterSpec(groups, FAST, contention=Contention(prefill_beside_decode=2.0))
    found = ends_of(spec, (0.0, 100, 9), (0.1, 400, 1), (0.18, 50, 1))
    assert found.end_s == pytest.approx([0.188, 0.188 + 0.046 + 0.36, 0.188 + 0.046])


def job_for(worker: SimWorker, index: int, prompt: int) -> Job:
    """A prompt that waits at a worker and is handed over to another one."""
    job = Job(index, 0.0, prompt, 1, [])
    job.at, job.decode = worker.number, worker.number + 1
    worker.queues.prompts.add(job)
    return job


def test_a_slowdown_that_begins_in_a_nested_step_counts_for_what_is_left_of_both() -> None:
    """At 0.12 s 20 of the nested 50 tokens are computed, and 100 of the outer 400: 30 and 300 take twice as long."""
    worker = SimWorker(0, nesting().groups[0], 0, 64, 1)
    long = job_for(worker, 0, 400)
    worker.start(0.0)
    short = job_for(worker, 1, 50)
    worker.nest(0.1)
    assert worker.steps.wake_s == pytest.approx(0.15)
    assert worker.set_pace(2.0, 0.12)
    assert (worker.steps.wake_s, worker.steps.ends_s) == pytest.approx((0.18, 0.78))
    assert worker.finish(0.18).prompts == [short]
    assert worker.steps.left(0.18) == pytest.approx(0.75)
    other = job_for(worker, 2, 30)
    worker.nest(0.18)  # at the slow pace
    assert worker.steps.wake_s == pytest.approx(0.24)
    assert worker.finish(0.24).prompts == [other]
    assert worker.steps.wake_s == pytest.approx(0.84)
    assert worker.set_pace(1.0, 0.24)
    assert worker.steps.wake_s == pytest.approx(0.54)
    assert worker.finish(0.54).prompts == [long]
    assert worker.steps.wake_s is None
    assert worker.busy_s == pytest.approx(0.54)
    assert worker.num_steps == 3


def test_a_prompt_that_leaves_meanwhile_does_not_run() -> None:
    worker = SimWorker(0, nesting().groups[0], 0, 64, 1)
    job_for(worker, 0, 400)
    worker.start(0.0)
    gone = job_for(worker, 1, 50)
    worker.queues.withdraw(gone)
    worker.nest(0.1)
    assert worker.steps.wake_s == pytest.approx(0.4)
    running = job_for(worker, 2, 50)
    worker.nest(0.1)
    worker.queues.withdraw(running)
    running.place()
    assert worker.finish(0.15).prompts == []
    assert worker.steps.wake_s == pytest.approx(0.45)


def test_a_worker_that_dies_in_a_nested_step_loses_both() -> None:
    """Both begin anew when it is back, and the shorter one in the middle of the longer one again."""
    spec = replace(nesting(), failures=(Failure(0, 0.12, 0.5),), conditional="off")
    found = ends_of(spec, (0.0, 400, 1), (0.1, 50, 1))
    assert found.is_completed.all()
    assert found.end_s == pytest.approx([0.95, 0.55])


def test_what_a_nested_prompt_finds_in_the_cache_is_not_computed() -> None:
    """Of 448 tokens 384 are cached; the other 64 run in the middle of the step."""
    ids = [list(range(6)), list(range(10, 18)), list(range(7))]
    found = ends_of(nesting(), (0.0, 400, 1), (1.0, 512, 1), (1.1, 448, 1), ids=ids)
    assert found.cached_tokens.tolist() == [0, 0, 384]
    assert found.ttft_s == pytest.approx([0.4, 0.576, 0.064])
