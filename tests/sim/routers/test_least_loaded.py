"""Requests that go to the lightest worker: all end, loads are even, and one worker alone serves as by policies."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from halfmoon.sim.cluster.cluster_spec import ClusterSpec, WorkerGroup
from halfmoon.sim.latency_sources.distserve import DistServeCoefficients
from halfmoon.sim.simulation import simulate
from halfmoon.sim.workloads.drawn_workload import synthetic_workload
from halfmoon.sim.workloads.lengths import named_lengths

MODEL = DistServeCoefficients("opt-13b").model("a100-80g", 1, 1)
WORKLOAD = synthetic_workload(named_lengths("chat"), 120, 6.0, seed=0, most_tokens=2048)
APART = ClusterSpec((WorkerGroup("prefill", 2, MODEL), WorkerGroup("decode", 3, MODEL)))
BOTH = ClusterSpec((WorkerGroup("both", 3, MODEL),))


@pytest.mark.parametrize("spec", [APART, BOTH])
def test_everybody_is_served_and_nobody_who_decodes_has_twice_the_work(spec: ClusterSpec) -> None:
    found = simulate(spec, WORKLOAD, policies="never")
    assert found.is_completed.all()
    decodes_s = found.workers.busy_s[-3:]
    assert decodes_s.max() < 2 * decodes_s.min()


@pytest.mark.parametrize("spec", [APART, BOTH])
def test_where_there_is_one_way_to_go_it_is_gone(spec: ClusterSpec) -> None:
    single = replace(spec, groups=tuple(replace(group, count=1) for group in spec.groups))
    lightly, asked = (simulate(single, WORKLOAD, policies=how) for how in ("never", "always"))
    np.testing.assert_array_equal(lightly.end_s, asked.end_s)


@pytest.mark.parametrize("spec", [APART, BOTH])
def test_a_prompt_goes_past_who_computes_one_to_who_is_idle(spec: ClusterSpec) -> None:
    """As many at once as there are workers for prompts: none waits."""
    two = replace(spec, groups=tuple(replace(group, count=2) for group in spec.groups))
    pairs = WORKLOAD.first(2)
    at_once = replace(pairs, start_s=np.array([0.0, 0.01]))
    assert simulate(two, at_once, policies="never").wait_s.max() == pytest.approx(0.0)


def test_who_is_too_long_is_refused_and_who_finds_no_room_is_placed_again() -> None:
    few = replace(BOTH, groups=(replace(BOTH.groups[0], kv_tokens=1024),))
    found = simulate(few, WORKLOAD, policies="never")
    is_too_long = WORKLOAD.prompt_tokens + WORKLOAD.output_tokens > 1024
    assert not found.is_completed[is_too_long].any()
    tight = replace(APART, groups=(APART.groups[0], replace(APART.groups[1], kv_tokens=2560)))
    assert simulate(tight, WORKLOAD.at_rate(1.0), policies="never").is_completed.mean() > 0.8
