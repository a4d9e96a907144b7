"""Several simulated prefill workers compute one prompt, where the live rule says that it pays."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from halfmoon.errors import InvalidRequest
from halfmoon.policy.models.segments import SEGMENT_PASSES, SegmentWorker, plan_segments
from halfmoon.sim.cluster.cluster_spec import BatchLimits, ClusterSpec, Failure
from halfmoon.sim.result import SimResult
from halfmoon.sim.simulation import simulate
from tests.sim.small_clusters import FAST, MODEL, group, work

LARGE = replace(MODEL, kv_tokens=64 * 4_000)
TOKENS = 8_000  # a second for each thousand


def cluster(count: int, max_degree: int, **changed: object) -> ClusterSpec:
    limits = BatchLimits(max_batch_tokens=2048)
    prefill = group("prefill", count, latency=LARGE, limits=limits, layer_passes=5)
    spec = ClusterSpec((prefill, group("decode", latency=LARGE)), FAST, max_prefill_degree=max_degree)
    return replace(spec, **changed)  # type: ignore[arg-type]


def ttft_s(found: SimResult) -> list[float]:
    assert found.is_completed.all()
    return [float(one) for one in found.ttft_s]


@pytest.mark.parametrize("degree", [2, 4])
def test_the_first_token_comes_when_the_plan_says(degree: int) -> None:
    (alone,) = ttft_s(simulate(cluster(4, 1), work((0.0, TOKENS, 2))))
    (shared,) = ttft_s(simulate(cluster(4, degree), work((0.0, TOKENS, 2))))
    assert alone == pytest.approx(8.0)
    worker = SegmentWorker(LARGE.policy_prefill, 2048)
    plan = plan_segments([worker] * degree, TOKENS, 0, 64, SEGMENT_PASSES)
    assert plan is not None
    behind_s, last_s = (degree - 1) * plan.round_s / SEGMENT_PASSES, (plan.ends[-1] - plan.ends[-2]) * 1e-3
    assert shared == pytest.approx((plan.num_rounds - 1) * plan.round_s + last_s + behind_s)
    assert shared < plan.seconds < 1.25 * alone / degree


def test_each_worker_computes_its_part_and_no_memory_is_lost() -> None:
    rows = *((20.0 * number, TOKENS, 2) for number in range(5)), (100.0, 100, 2)
    found = simulate(cluster(4, 4), work(*rows))
    assert max(ttft_s(found)) < 3
    busy_s = found.workers.busy_s[:4]
    assert busy_s.sum() == pytest.approx(5 * 8.0 + 0.1)
    assert busy_s.max() < 1.2 * busy_s.min()


def test_busy_workers_do_not_help() -> None:
    """Prompts that come at once get a worker each, and wait no longer than without sharing."""
    rows = work(*((0.0, TOKENS, 2) for _ in range(4)))
    for degree in (1, 4):
        times = sorted(ttft_s(simulate(cluster(4, degree), rows, policies="always")))
        assert times[-1] <= 2 * 8.0 + 3.0


def test_short_prompts_are_as_without_sharing() -> None:
    rows = work(*((0.1 * number, 60, 2) for number in range(30)))
    alone, shared = (simulate(cluster(3, degree), rows, policies="always") for degree in (1, 3))
    assert np.array_equal(alone.end_s, shared.end_s)


def test_sharing_where_nothing_is_predicted_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="max_prefill_degree has no effect with placement random"):
        cluster(3, 3, placement="random")


def test_a_prompt_under_a_kv_policy_has_one_worker() -> None:
    rows = work((0.0, TOKENS, 2))
    alone, shared = (simulate(cluster(4, degree, kv_policy="sinks:64+256"), rows) for degree in (1, 4))
    assert ttft_s(alone) == ttft_s(shared)


@pytest.mark.parametrize("worker", range(4))
def test_a_worker_that_dies_in_the_middle_loses_no_request(worker: int) -> None:
    failures = (Failure(worker, 1.0, 30.0),)
    found = simulate(cluster(3, 3, failures=failures), work((0.0, TOKENS, 2), (40.0, TOKENS, 2)))
    assert found.is_completed.all()


def test_prompts_that_wait_behind_a_part_are_computed_after_it() -> None:
    rows = work((0.0, TOKENS, 2), (0.1, 200, 2), (0.2, 200, 2), (0.3, 200, 2), (0.4, 200, 2))
    found = simulate(cluster(4, 4), rows)
    assert max(ttft_s(found)) < 4
