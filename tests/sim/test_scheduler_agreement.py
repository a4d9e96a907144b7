"""The simulated worker and the engine's scheduler take the same steps: one clock tick for each stage."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from itertools import accumulate

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from halfmoon.engine.request import EngineRequest, SamplingParams
from halfmoon.engine.scheduling.block_pool import BlockPool
from halfmoon.engine.scheduling.prefix_cache import PrefixCache
from halfmoon.engine.scheduling.schedule import SchedulerLimits
from halfmoon.engine.scheduling.scheduler import Scheduler
from halfmoon.engine.scheduling.sequence import Sequence
from halfmoon.engine.scheduling.sequence_queues import SequenceQueues
from halfmoon.kv.kv_policy import policy_salt
from halfmoon.policy.admission.qos_classes import QosClass
from halfmoon.policy.models.chunk_length import ChunkRule, chunk_target_s
from halfmoon.policy.models.latency import PrefillModel, StepModel
from halfmoon.policy.models.learned_chunk_rule import LearnedChunkRule
from halfmoon.sim.cluster.cluster_spec import BatchLimits, ClusterSpec, WorkerGroup
from halfmoon.sim.latency_sources.latency_model import LatencyModel, PrefillPiece, StepPiece
from halfmoon.sim.simulation import simulate
from halfmoon.sim.worker.kept_kv import policy_of
from halfmoon.sim.workloads.workload import Prefixes, Workload

BLOCK_TOKENS = 4
Rows = list[tuple[int, int, int, int]]  # arrival, prompt, output, class
CLASSES = QosClass("interactive", tbt_s=2.5), QosClass("batch", priority=1), QosClass("idle", priority=2, tbt_s=4.0)
RULE = ChunkRule(PrefillModel(0.5, 0.02, 0.001), StepModel(1.0, 0.02, 0.001))


class Tick(LatencyModel):
    """Steps that take a second, and models by which chunks have many lengths."""

    policy_prefill = RULE.prefill
    policy_step = RULE.step


TICK = Tick(  # every step takes a second in each stage
    (PrefillPiece(0, PrefillModel(1.0, 0.0, 0.0)),), (StepPiece(0, StepModel(1.0, 0.0, 0.0)),), 0, 1.0, "test"
)


def classes_with(*max_pause_s: float) -> tuple[QosClass, ...]:
    """The same, whose answers may be paused for as long."""
    return tuple(replace(qos, max_pause_s=seconds) for qos, seconds in zip(CLASSES, max_pause_s, strict=True))


def engine_times(
    rows: Rows,
    limits: BatchLimits,
    num_blocks: int,
    num_stages: int = 1,
    classes: tuple[QosClass, ...] = CLASSES,
) -> list[tuple[int, int, int]]:
    """When each request gets its first and its last token, and its longest gap, by the engine's scheduler."""
    return [result[:3] for result in engine_results(rows, limits, num_blocks, num_stages, classes)]


def engine_results(
    rows: Rows,
    limits: BatchLimits,
    num_blocks: int,
    num_stages: int = 1,
    classes: tuple[QosClass, ...] = CLASSES,
    prompts: list[tuple[int, ...]] | None = None,
) -> list[tuple[int, int, int, int]]:
    """The same, and how many tokens of its prompt were cached. `prompts`: their tokens; None: nothing is cached.

    `ParallelRunner.run` returns when the first stage is done, or with the sampled tokens if there are any.
    """
    root = None if prompts is None else lambda salt: sha256(salt).digest()[:16]
    cache = PrefixCache(BlockPool(num_blocks), BLOCK_TOKENS, root)
    cached: dict[int, int] = {}
    step_limits = SchedulerLimits(limits.max_batch_tokens, limits.chunk_tokens, limits.max_running)
    scheduler = Scheduler(SequenceQueues(cache, BLOCK_TOKENS, step_limits))
    if limits.follows_targets:
        scheduler.chunk_rule = LearnedChunkRule(RULE)
    first: dict[int, int] = {}
    newest: dict[int, int] = {}
    longest: dict[int, int] = {}
    last: dict[int, int] = {}
    now, following = 0, 0
    free = [0] * num_stages
    while len(last) < len(rows):
        while following < len(rows) and rows[following][0] <= now:
            at, prompt, output, number = rows[following]
            sampling = SamplingParams(max_tokens=output, ignore_eos=True)
            qos = classes[number]
            request = EngineRequest(
                str(following),
                (1,) * prompt if prompts is None else prompts[following],
                sampling,
                arrival_s=float(at),
                priority=qos.priority,
                class_priority=qos.priority,
                max_pause_s=qos.max_pause_s,
                tbt_target_s=chunk_target_s(qos.tbt_target_s, "both"),
                tenant_salt=policy_salt(policy_of(qos.kv_policy), b""),
            )
            scheduler.queues.add(Sequence(request, following))
            following += 1
        schedule = scheduler.schedule(float(now))
        if not schedule.scheduled:
            now = rows[following][0]
            continue
        through = now
        for stage in range(num_stages):
            through = free[stage] = max(through, free[stage]) + 1
        now = through if any(part.samples for part in schedule.scheduled) else free[0]
        for part in schedule.scheduled:
            sequence, samples = part.sequence, part.samples
            cached.setdefault(int(sequence.request_id), sequence.num_cached)
            sequence.num_computed += part.num_tokens
            cache.insert(sequence)
            scheduler.queues.blocks.drop_unseen(sequence)
            if not samples:
                continue
            sequence.token_ids.append(1)
            number = int(sequence.request_id)
            first.setdefault(number, now)
            longest[number] = max(longest.get(number, 0), now - newest.get(number, now))
            newest[number] = now
            if sequence.num_output == rows[number][2]:
                last[number] = now
                scheduler.queues.remove(sequence)
    return [(first[number], last[number], longest[number], cached[number]) for number in range(len(rows))]


def simulated_times(
    rows: Rows,
    limits: BatchLimits,
    num_blocks: int,
    num_stages: int = 1,
    classes: tuple[QosClass, ...] = CLASSES,
) -> list[tuple[int, int, int]]:
    return [result[:3] for result in simulated_results(rows, limits, num_blocks, num_stages, classes)]


def simulated_results(
    rows: Rows,
    limits: BatchLimits,
    num_blocks: int,
    num_stages: int = 1,
    classes: tuple[QosClass, ...] = CLASSES,
    prefixes: Prefixes | None = None,
) -> list[tuple[int, int, int, int]]:
    latency = replace(TICK, num_stages=num_stages)
    group = WorkerGroup("both", 1, latency, limits, kv_tokens=num_blocks * BLOCK_TOKENS)
    starts, prompts, outputs, numbers = (np.array(column) for column in zip(*rows, strict=True))
    workload = Workload(starts.astype(float), prompts, outputs, prefixes, classes=numbers)
    found = simulate(ClusterSpec((group,), block_tokens=BLOCK_TOKENS, classes=classes), workload)
    first_s = found.start_s + found.ttft_s
    columns = first_s, found.end_s, np.nan_to_num(found.longest_gap_s), found.cached_tokens
    return [(round(one), round(other), round(gap), int(num)) for one, other, gap, num in zip(*columns, strict=True)]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Rows, BatchLimits, int]:
    num = draw(st.integers(1, 14))
    arrivals = list(accumulate(draw(st.lists(st.integers(1, 4), min_size=num, max_size=num))))
    classes = st.integers(0, draw(st.sampled_from([0, len(CLASSES) - 1])))
    rows = [(at, draw(st.integers(1, 40)), draw(st.integers(1, 16)), draw(classes)) for at in arrivals]
    limits = BatchLimits(draw(st.integers(10, 30)), draw(st.integers(2, 16)), draw(st.integers(1, 8)))
    limits = replace(limits, follows_targets=draw(st.booleans()))
    return rows, limits, draw(st.sampled_from([15, 20, 40, 200]))  # 15 blocks hold the longest request


A_STEP_THAT_PREEMPTS_AMID_DECODES = (
    [
        (1, 1, 1, 0), (2, 1, 1, 0), (3, 1, 1, 0), (4, 1, 1, 0), (5, 13, 9, 0), (8, 37, 6, 0), (9, 6, 1, 0),
        (10, 5, 3, 0), (11, 4, 7, 0), (12, 1, 1, 0), (13, 1, 1, 0), (14, 1, 1, 0), (15, 1, 1, 0), (16, 1, 1, 0),
    ],
    BatchLimits(10, 9, 4),
    15,
)  # fmt: skip


A_RISEN_ANSWER_THAT_IS_PREEMPTED = (
    [
        (2, 13, 1, 1), (4, 21, 12, 2), (6, 19, 12, 2), (8, 31, 2, 0), (9, 16, 5, 0), (11, 12, 4, 0), (15, 25, 9, 0),
        (18, 24, 6, 0), (21, 34, 8, 2), (24, 21, 12, 2), (27, 40, 12, 1),
    ],
    BatchLimits(17, 8, 5),
    15,
)  # fmt: skip


RUNNING_PROMPTS_BEHIND_ONE_THAT_HAS_NO_PLACE = (
    [
        (4, 8, 6, 2), (7, 40, 5, 2), (8, 33, 2, 0), (9, 23, 16, 2), (11, 15, 12, 2), (15, 10, 13, 2), (17, 18, 3, 1),
        (18, 9, 6, 0), (22, 9, 2, 1), (23, 9, 9, 2),
    ],
    BatchLimits(21, 5, 4),
    200,
)  # fmt: skip


@settings(max_examples=300)
@example(A_STEP_THAT_PREEMPTS_AMID_DECODES)
@example(RUNNING_PROMPTS_BEHIND_ONE_THAT_HAS_NO_PLACE)
@given(cases())
def test_both_take_the_same_steps(case: tuple[Rows, BatchLimits, int]) -> None:
    assert simulated_times(*case) == engine_times(*case)


@settings(max_examples=100)
@given(cases(), st.integers(2, 4))
def test_both_take_the_same_time_in_a_pipeline(case: tuple[Rows, BatchLimits, int], num_stages: int) -> None:
    assert simulated_times(*case, num_stages) == engine_times(*case, num_stages)


@settings(max_examples=300)
@example(A_RISEN_ANSWER_THAT_IS_PREEMPTED, (0.0, 20.0, 20.0))
@given(cases(), st.tuples(*3 * [st.sampled_from([0.0, 2.0, 5.0, 20.0, 1e6])]))
def test_both_pause_the_same_answers(
    case: tuple[Rows, BatchLimits, int], max_pause_s: tuple[float, float, float]
) -> None:
    classes = classes_with(*max_pause_s)
    assert simulated_times(*case, classes=classes) == engine_times(*case, classes=classes)


def test_the_cases_pause() -> None:
    """Else the test above would prove less than it says."""
    case = [(1, 4, 16, 1), (4, 4, 4, 0)], BatchLimits(30, 16, 1), 15
    paused = engine_times(*case, classes=classes_with(0.0, 20.0, 20.0))
    assert paused != engine_times(*case)
    assert paused == [(2, 21, 5), (5, 8, 1)]


def test_the_cases_preempt() -> None:
    """Else the test above would prove less than it says."""
    rows = [(number + 1, 20, 16) for number in range(8)]
    group = WorkerGroup("both", 1, TICK, BatchLimits(30, 16, 8), kv_tokens=20 * BLOCK_TOKENS)
    starts, prompts, outputs = (np.array(column) for column in zip(*rows, strict=True))
    spec = ClusterSpec((group,), block_tokens=BLOCK_TOKENS)
    found = simulate(spec, Workload(starts.astype(float), prompts, outputs))
    assert found.workers.num_preempted[0] > 0
