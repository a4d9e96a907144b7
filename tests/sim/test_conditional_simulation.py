"""Simulated decode workers compute prompts where the policies let them, and keep what they were handed."""

from __future__ import annotations

import numpy as np
import pytest

from halfmoon.policy.placement.conditional import ConditionalMode
from halfmoon.policy.placement.ranking import PlacementMode
from halfmoon.sim.cluster.cluster_spec import BatchLimits, ClusterSpec, Failure, Network, SloTargets, WorkerGroup
from halfmoon.sim.latency_sources.latency_source import latency_source
from halfmoon.sim.result import SimResult
from halfmoon.sim.simulation import simulate
from halfmoon.sim.worker.job import Job
from halfmoon.sim.worker.worker import SimWorker
from halfmoon.sim.workloads.drawn_workload import synthetic_workload
from halfmoon.sim.workloads.lengths import named_lengths
from halfmoon.sim.workloads.workload import Workload
from tests.sim.small_clusters import FAST, MODEL, group, pair, work

KEEPING: tuple[ConditionalMode, ...] = ("auto", "strict")


@pytest.mark.parametrize("placement", ["kvcache-centric", "least-loaded", "random"])
@pytest.mark.parametrize("mode", KEEPING)
def test_a_short_prompt_does_not_wait_behind_a_long_one(mode: ConditionalMode, placement: PlacementMode) -> None:
    """1,000 tokens take a second on the prefill worker; 100 more take 0.1 s on the idle decode worker."""
    load = work((0.0, 1000, 2), (0.05, 100, 2))
    assert simulate(pair(placement=placement), load).ttft_s[1] > 0.1
    found = simulate(pair(conditional=mode, placement=placement), load)
    assert found.ttft_s == pytest.approx([1.0, 0.1])
    assert found.handover_bytes == 1000 * MODEL.kv_bytes_per_token


def test_a_decode_worker_keeps_the_prompts_handed_over_to_it() -> None:
    """The second turn's 2 blocks are on both workers; the prefill worker is busy with another prompt."""
    load = work((0.0, 150, 2), (1.0, 1000, 2), (1.1, 200, 2), ids=[[1, 2], list(range(10, 25)), [1, 2, 3]])
    found = simulate(pair(conditional="auto"), load)
    assert found.cached_tokens.tolist() == [0, 0, 128]
    assert found.ttft_s[2] == pytest.approx(0.072)


def test_chunks_beside_decodes_and_blocks_all_come_back() -> None:
    spec = ClusterSpec(
        (group("prefill"), group("decode", limits=BatchLimits(chunk_tokens=16, max_running=4), kv_tokens=64 * 12)),
        FAST,
        conditional="auto",
    )
    rows = [(0.02 * number, 40 + 90 * (number % 3), 30) for number in range(40)]
    found = simulate(spec, work(*rows, ids=[[number % 5, 100 + number] for number in range(40)]))
    assert found.is_completed.sum() + (found.outcome == 1).sum() == 40
    assert found.is_completed.any()


def test_a_full_decode_worker_refuses_a_prompt() -> None:
    worker = SimWorker(0, group("decode", kv_tokens=64 * 5, limits=BatchLimits(max_running=3)), 0, 64, 1)
    jobs = [Job(number, 0.0, 100, 9, []) for number in range(4)]
    assert worker.may_keep(jobs[0], 0.0)
    worker.queues.prompts.add(jobs[0])
    assert worker.may_keep(jobs[1], 0.0)  # two blocks each
    worker.queues.prompts.add(jobs[1])
    assert not worker.may_keep(jobs[2], 0.0)  # the fifth block is not enough, though both others wait
    short = Job(9, 0.0, 20, 9, [])
    assert worker.may_keep(short, 0.0)
    worker.queues.prompts.add(short)
    assert not worker.may_keep(Job(10, 0.0, 1, 2, []), 0.0)  # three places


def run(mode: ConditionalMode, load: Workload, prefill: int, decode: int) -> tuple[SimResult, float]:
    model, targets = latency_source("roofline:llama-3-8b@h100").model(None, 1, 1), SloTargets(0.4, 0.05)
    groups = WorkerGroup("prefill", prefill, model), WorkerGroup("decode", decode, model)
    found = simulate(ClusterSpec(groups, Network(), targets=targets, conditional=mode), load, seed=7)
    return found, found.goodput_per_s(targets)


@pytest.mark.parametrize("mode", KEEPING)
def test_goodput_of_a_chat_is_no_less(mode: ConditionalMode) -> None:
    load = synthetic_workload(named_lengths("chat"), 250, 45.0, seed=2)
    before, after = run("off", load, 1, 3), run(mode, load, 1, 3)
    assert after[1] >= before[1]
    assert after[0].ttft_s.mean() < before[0].ttft_s.mean()
    assert np.nanmean(after[0].tpot_s) < 1.1 * np.nanmean(before[0].tpot_s)


def test_long_prompts_go_to_prefill_workers_that_are_free() -> None:
    load = synthetic_workload(named_lengths("summarization"), 100, 4.0, seed=2)
    before, after = run("off", load, 2, 2), run("strict", load, 2, 2)
    assert after[1] == before[1]
    assert after[0].handover_bytes == before[0].handover_bytes


def moved(mode: ConditionalMode) -> SimResult:
    """One request loses its decode worker while the only prefill worker, which has its prompt, computes another."""
    groups = group("prefill"), group("decode", count=2)
    load = work((0.0, 640, 200), (2.05, 2000, 1), ids=[list(range(10)), list(range(50, 81))])
    specs = [ClusterSpec(groups, FAST, conditional=mode, failures=(Failure(victim, 2.1),)) for victim in (1, 2)]
    (found,) = [result for spec in specs if (result := simulate(spec, load)).num_retries[0]]
    return found


def test_a_request_that_lost_its_decode_worker_is_restored_by_the_next_one() -> None:
    """It loads ten blocks and computes the tokens that it had; a hand-over waits for two seconds of another prompt."""
    off, on = moved("off"), moved("failover")
    assert on.longest_gap_s[0] < 0.2 < off.longest_gap_s[0]
    assert on.handover_bytes < off.handover_bytes


def test_a_prompt_that_goes_on_refuses_no_hand_over() -> None:
    """Only one that was preempted here waits for memory."""
    worker = SimWorker(0, group("decode"), 0, 64, 1)
    going_on = Job(0, 0.0, 100, 9, [])
    going_on.generated = 3
    going_on.place()
    worker.queues.prompts.add(going_on)
    assert worker.reserve(Job(1, 0.0, 100, 9, []), 0.0)
    going_on.generated = 4
    assert not worker.reserve(Job(2, 0.0, 100, 9, []), 0.0)
