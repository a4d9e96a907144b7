"""The simulated cluster beside what theory or a few lines by hand say of the same thing."""

from __future__ import annotations

import heapq
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from halfmoon.policy.models.latency import PrefillModel, StepModel
from halfmoon.sim.cluster.cluster_spec import BatchLimits, ClusterSpec, Failure, Network
from halfmoon.sim.latency_sources.latency_model import PrefillPiece, StepPiece
from halfmoon.sim.simulation import simulate
from halfmoon.sim.workloads.workload import Workload
from tests.sim.small_clusters import FAST, MODEL, group, pair, work

ONE_AT_A_TIME = BatchLimits(max_running=1)
STEADY_STEP = replace(MODEL, step=(StepPiece(0, StepModel(0.01, 0.0, 0.0)),), kv_tokens=64 * 100_000)
NO_PROMPT_TIME = replace(STEADY_STEP, prefill=(PrefillPiece(0, PrefillModel(1e-9, 0.0, 0.0)),))


def poisson(num: int, rate_per_s: float, seed: int = 1) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.cumsum(np.random.default_rng(seed).exponential(1 / rate_per_s, num))


def test_prompts_of_several_lengths_wait_as_pollaczek_and_khinchine_say() -> None:
    """M/G/1 at a load of 0.7, prompts of 100 to 900 ms: a mean wait of rate * E[S^2] / 2 / (1 - load). Request by
    request it is Lindley's recursion; that its mean is the law's is a matter of so many requests."""
    lengths = np.random.default_rng(2).choice([100, 200, 900], 6_000, p=[0.5, 0.3, 0.2])
    service_s = lengths * 1e-3
    rate_per_s = 0.7 / 0.29  # of a mean of 0.29 s
    start_s = poisson(len(lengths), rate_per_s)
    spec = ClusterSpec((group("prefill", limits=BatchLimits(100_000, 100_000, 1)), group("decode")), FAST)
    found = simulate(spec, Workload(start_s, lengths, np.ones_like(lengths)))
    wait_s, expected = 0.0, []
    for gap_s, own_s in zip([0.0, *np.diff(start_s)], [0.0, *service_s[:-1]], strict=True):
        wait_s = max(wait_s + own_s - gap_s, 0.0)
        expected.append(wait_s)
    assert found.ttft_s - service_s == pytest.approx(expected, abs=1e-9)
    second_moment = 0.5 * 0.1**2 + 0.3 * 0.2**2 + 0.2 * 0.9**2
    assert np.mean(expected) == pytest.approx(rate_per_s * second_moment / 2 / 0.3, rel=0.2)


def test_places_of_a_decode_worker_are_taken_as_erlang_says() -> None:
    """Ten places, answers of exponential length, so many come that 8 are served on average: M/M/10, in steps of 10 ms
    that are short beside answers of 4 s. Who has to wait for a place, and how long: Erlang's C."""
    num, places, load = 12_000, 10, 8.0
    outputs = np.maximum(np.random.default_rng(5).exponential(400, num).astype(int), 1) + 1
    mean_s = float((outputs - 1).mean()) * 0.01
    start_s = poisson(num, load / mean_s, seed=6)
    prompts = group("prefill", latency=NO_PROMPT_TIME, limits=BatchLimits(max_running=num), kv_tokens=1 << 40)
    decodes = group("decode", latency=STEADY_STEP, limits=BatchLimits(max_running=places), kv_tokens=1 << 40)
    found = simulate(
        ClusterSpec((prompts, decodes), replace(FAST, handover="pull")),
        Workload(start_s, np.ones(num, dtype=np.int64), outputs),
    )
    alone_s = (outputs - 1) * 0.01
    waits_s = found.end_s - start_s - alone_s
    terms = np.cumprod([1.0, *(load / one for one in range(1, places + 1))])
    last = terms[-1] / (1 - load / places)
    erlang_c = last / (terms[:-1].sum() + last)  # 0.41
    assert (waits_s > 0.0101).mean() == pytest.approx(erlang_c, rel=0.12)
    free_s, expected = [0.0] * places, []
    for at_s, own_s in zip(
        start_s, alone_s, strict=True
    ):  # the same requests, each of which begins when a place is free
        begin_s = max(heapq.heappop(free_s), at_s)
        heapq.heappush(free_s, begin_s + own_s)
        expected.append(begin_s - at_s)
    assert waits_s.mean() == pytest.approx(np.mean(expected), rel=0.03)


def test_in_a_batch_without_bound_as_many_decode_as_come_while_one_does() -> None:
    """M/G/infinity and Little: who comes has to wait for the step under way, half a step on average."""
    num, rate_per_s = 3_000, 20.0
    outputs = np.random.default_rng(7).integers(2, 200, num)
    start_s = poisson(num, rate_per_s, seed=8)
    big = BatchLimits(max_running=num)
    groups = group("prefill", latency=NO_PROMPT_TIME, limits=big), group("decode", latency=STEADY_STEP, limits=big)
    found = simulate(ClusterSpec(groups, FAST), Workload(start_s, np.ones(num, dtype=np.int64), outputs))
    waits_s = found.end_s - start_s - (outputs - 1) * 0.01
    assert waits_s.min() >= -1e-9
    assert waits_s.max() <= 0.01 + 1e-9
    assert waits_s.mean() == pytest.approx(0.005, rel=0.05)


@pytest.mark.parametrize(("num_stages", "num_chunks"), [(2, 1), (2, 3), (4, 1), (4, 2)])
def test_a_pipeline_is_a_flow_shop(num_stages: int, num_chunks: int) -> None:
    """Each stage takes a chunk when the stage before is done with it and it is done with the chunk before:
    C(i, s) = max(C(i, s - 1), C(i - 1, s)) + t. Twelve prompts, chunks of 0.1 s a stage, come within two seconds."""
    start_s = np.sort(np.random.default_rng(num_stages).uniform(0, 2, 12))
    prefill = group(
        "prefill", latency=replace(MODEL, num_stages=num_stages, fills_stages=True), limits=BatchLimits(100)
    )
    workload = work(*((at_s, 100 * num_chunks, 1) for at_s in start_s))
    found = simulate(ClusterSpec((prefill, group("decode")), FAST), workload)
    done_s = [0.0] * num_stages
    for at_s, ttft_s in zip(start_s, found.ttft_s, strict=True):
        for _ in range(num_chunks):
            ready_s = at_s
            for stage in range(num_stages):
                ready_s = done_s[stage] = max(ready_s, done_s[stage]) + 0.1
        assert at_s + ttft_s == pytest.approx(ready_s)


@pytest.mark.parametrize(("num", "round_s"), [(8, 4 * 0.012), (2, 4 * 0.011), (1, 4 * 0.011)])
def test_four_stages_decode_in_rounds(num: int, round_s: float) -> None:
    """Eight sequences are four groups of two: a round is four times a stage's 12 ms. One or two of them are groups of
    one, which wait for all four stages."""
    four = group("both", latency=replace(MODEL, num_stages=4, fills_stages=True))
    found = simulate(ClusterSpec((four,), FAST), work(*((0.0, 1, 21) for _ in range(num))))
    assert found.longest_gap_s == pytest.approx([round_s] * num)


def test_transfers_of_a_node_go_one_by_one_and_those_of_two_nodes_at_once() -> None:
    """Six prompts of 100 MB each, 0.1 s of a port: from one prefill worker to two decode workers they queue behind
    each other; from two nodes to two they need half as long."""
    slow = Network(bytes_per_s=1e9, latency_s=0.0, handover="pull")
    quick = replace(MODEL, prefill=(PrefillPiece(0, PrefillModel(1e-9, 0.0, 0.0)),))
    rows = work(*((0.0, 100, 2) for _ in range(6)))
    ends = {}
    for num in (1, 2):
        groups = group("prefill", num, latency=quick, limits=BatchLimits(max_running=64)), group("decode", 2)
        spec = ClusterSpec(groups, slow, "least-loaded")
        ends[num] = np.sort(simulate(spec, rows, 1).end_s)
    assert ends[1] == pytest.approx([0.1 * one + 0.011 for one in range(1, 7)], abs=1e-3)
    assert ends[2][-1] < ends[1][-1]
    assert ends[2][-1] >= 0.3


def test_a_chunked_prompt_beside_an_answer_by_hand() -> None:
    """An answer decodes (11 ms a step) when 100 tokens come at 30.5 ms. They go in chunks of 30, 30, 30 and 10, each
    beside one token of the answer: steps of 31, 31, 31 and 11 ms. Then two sequences decode, and one again."""
    spec = ClusterSpec((group("both", limits=BatchLimits(chunk_tokens=30)),), FAST)
    found = simulate(spec, work((0.0, 8, 50), (0.0305, 100, 3)))
    free_s = 0.008 + 3 * 0.011  # the step under way ends
    first_s = free_s + 3 * 0.031 + 0.011
    assert found.ttft_s[1] == pytest.approx(first_s - 0.0305)
    assert found.end_s[1] == pytest.approx(first_s + 2 * 0.012)
    assert found.longest_gap_s[0] == pytest.approx(0.031)
    steps = 3 + 4 + 2  # of the answer's 49 until then
    assert found.end_s[0] == pytest.approx(first_s + 2 * 0.012 + (49 - steps) * 0.011)


def test_memory_that_is_too_small_for_two_preempts_the_second_by_hand() -> None:
    """Five blocks of 64 tokens for two sequences of 214. The first has its first token at 64 ms, and its second beside
    the second one's prompt at 129 ms. In 64 steps of both it grows to three blocks, and the second, with two, finds
    none for its 66th token. The first goes on alone, 84 steps of 11 ms. Then the second one's 129 tokens are computed
    again, which draws that token, and 84 are left."""
    tight = group("both", kv_tokens=64 * 5)
    found = simulate(ClusterSpec((tight,), FAST), work((0.0, 64, 150), (0.0, 64, 150)))
    preempted_s = 0.129 + 64 * 0.012
    first_s = preempted_s + 84 * 0.011
    assert found.end_s == pytest.approx([first_s, first_s + 0.129 + 84 * 0.011])
    assert found.longest_gap_s[1] == pytest.approx(first_s + 0.129 - preempted_s)
    assert found.workers.num_preempted.tolist() == [1]
    assert found.workers.peak_kv == pytest.approx([1.0])


def test_a_prefill_worker_that_dies_loses_what_it_computes_and_what_waits() -> None:
    """The first prompt of 200 ms is half done, the second waits, when their worker dies at 0.1 s; it is back at 0.4 s
    and computes both from the beginning."""
    failing = pair(failures=(Failure(0, 0.1, 0.4),), conditional="off")
    found = simulate(failing, work((0.0, 200, 1), (0.05, 100, 1)))
    assert found.num_retries.tolist() == [1, 1]
    assert found.ttft_s == pytest.approx([0.4 + 0.2, 0.4 + 0.2 + 0.1 - 0.05])


def test_places_are_served_in_the_order_of_arrival() -> None:
    """One that does both, one at a time: a queue by hand, each for its prompt and its answer."""
    rng = np.random.default_rng(3)
    rows = [
        (float(at_s), int(rng.integers(1, 300)), int(rng.integers(1, 30)))
        for at_s in np.cumsum(rng.exponential(0.3, 60))
    ]
    found = simulate(ClusterSpec((group("both", limits=ONE_AT_A_TIME),), FAST), work(*rows))
    free_s = [0.0]
    for row, end_s in zip(rows, found.end_s, strict=True):
        begin_s = max(heapq.heappop(free_s), row[0])
        heapq.heappush(free_s, begin_s + row[1] * 1e-3 + (row[2] - 1) * 0.011)
        assert end_s == pytest.approx(free_s[0])


_REPEATED = """
import hashlib, numpy as np
from halfmoon.sim.cluster.cluster_spec import *
from halfmoon.sim.latency_sources.latency_source import latency_source
from halfmoon.sim.workloads.lengths import named_lengths
from halfmoon.sim.simulation import simulate
from halfmoon.sim.workloads.drawn_workload import synthetic_workload
model = latency_source("roofline:llama-3-8b@h100").model(None, 1, 1)
groups = WorkerGroup("prefill", 2, model), WorkerGroup("decode", 2, model)
spec = ClusterSpec(groups, placement="random", admission="predicted", targets=SloTargets(0.3, 0.02))
found = simulate(spec, synthetic_workload(named_lengths("chat"), 300, 60.0, seed=4), seed=9)
columns = found.ttft_s, found.end_s, found.outcome
print(hashlib.sha256(b"".join(np.ascontiguousarray(one).tobytes() for one in columns)).hexdigest())
"""


def test_another_process_with_another_hash_seed_has_the_same_result() -> None:
    told = {
        subprocess.run(
            [sys.executable, "-c", _REPEATED], env={"PYTHONHASHSEED": seed}, capture_output=True, check=True, text=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(told) == 1
