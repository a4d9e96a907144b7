"""An engine core whose steps take longer than it measured at its start meets its TBT targets all the same."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest

from halfmoon.engine.engine_core import EngineCore
from halfmoon.engine.request import EngineRequest, SampledToken, SamplingParams
from halfmoon.engine.request_check import RequestLimits
from halfmoon.engine.scheduling.block_pool import BlockPool
from halfmoon.engine.scheduling.schedule import SchedulerLimits
from halfmoon.kv.kv_layout import KVLayout
from halfmoon.policy.models.chunk_length import ChunkRule
from halfmoon.policy.models.latency import PrefillModel, StepModel
from halfmoon.sim.cluster.cluster_spec import BatchLimits, WorkerGroup
from halfmoon.sim.latency_sources.worker_profile import coefficients
from halfmoon.sim.worker.job import Job
from halfmoon.sim.worker.worker import SimWorker

LAYOUT = KVLayout(1, 1, 1, "float16", 16)
LATENCY = coefficients("test", PrefillModel(0.005, 2e-4, 1e-8), StepModel(0.005, 1e-3, 1e-7), 1 << 16, 1)
RULE = ChunkRule(LATENCY.policy_prefill, LATENCY.policy_step)
TARGET_S = 0.06


def request(name: str, num_prompt: int, num_output: int) -> EngineRequest:
    sampling = SamplingParams(num_output, ignore_eos=True)
    return EngineRequest(name, (1,) * num_prompt, sampling, tbt_target_s=TARGET_S)


def mixed_steps(times: float, num: int) -> list[tuple[int, float]]:
    """Prompt tokens and seconds of steps in which two answers run beside prompts; all takes `times` the model's."""
    core = EngineCore(
        BlockPool(4000),
        RequestLimits(100, 1 << 16, 4000, LAYOUT),
        SchedulerLimits(512, 64, 8),
        None,
        lambda sequence: "length" if sequence.num_output == sequence.sampling.max_tokens else None,
    )
    core.follow_targets(RULE)
    for name in ("a", "b"):
        core.add(request(name, 16, 10_000))
    found: list[tuple[int, float]] = []
    num_prompts = 0
    while len(found) < num:
        if core.stats().num_running + core.stats().num_waiting < 3:
            num_prompts += 1
            core.add(request(f"p{num_prompts}", 2000, 1))
        step = core.begin_step()
        counts = step.counts
        seconds = times * LATENCY.stage_s(
            counts.num_prefill_tokens, counts.num_prefill_pairs, counts.num_decode_seqs, counts.decode_context_tokens
        )
        sampled = [SampledToken(1) for item in step.schedule.scheduled if item.samples]
        core.note_timed(replace(core.end_step(step, sampled), duration_s=seconds))
        if counts.num_decode_seqs == 2 and counts.num_prefill_tokens:
            found.append((counts.num_prefill_tokens, seconds))
    return found


@pytest.mark.parametrize("times", [1.0, 1.5, 2.0])
def test_after_some_steps_the_target_is_met_at_any_speed(times: float) -> None:
    found = mixed_steps(times, 100)
    assert max(seconds for _, seconds in found[60:]) <= TARGET_S
    if times > 1:
        assert found[0][1] > TARGET_S, "else nothing had to be learned"


@pytest.mark.parametrize("times", [1.0, 2.0])
def test_the_simulator_takes_chunks_as_long(times: float) -> None:
    """There a worker knows its pace, which this one learns."""
    limits = BatchLimits(512, 64, 8, follows_targets=True)
    worker = SimWorker(0, WorkerGroup("both", 1, LATENCY, limits, prefix_cache=False), 0, 16, 1)
    for number in range(2):
        answer = Job(number, 0.0, 16, 10_000, [])
        answer.tbt_target_s = TARGET_S
        worker.queues.admit(answer, 0.0)
        worker.queues.decode(answer)
    worker.queues.prompts.add(Job(2, 0.0, 2000, 1, []))
    worker.set_pace(times, 0.0)
    worker.start(0.0)
    assert worker.steps.wake_s is not None
    assert worker.steps.wake_s <= TARGET_S
    (chunk,) = worker._chunks
    learned = median(num_tokens for num_tokens, _ in mixed_steps(times, 100)[60:])
    assert chunk.num_tokens == pytest.approx(learned, abs=32)
