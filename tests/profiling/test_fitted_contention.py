"""Slowdowns from means of a load: those with which it was simulated."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from halfmoon.policy.view.worker_view import Role
from halfmoon.profiling.fitted_contention import ServedMeans, fitted_slowdowns
from halfmoon.sim.cluster.cluster_spec import ClusterSpec, WorkerGroup
from halfmoon.sim.cluster.contention import Contention
from halfmoon.sim.latency_sources.measured_profile import MeasuredLimits, MeasuredPrefill, MeasuredProfile, MeasuredStep
from halfmoon.sim.simulation import simulate
from halfmoon.sim.workloads.drawn_workload import synthetic_workload
from halfmoon.sim.workloads.lengths import named_lengths

PROFILE = MeasuredProfile(
    kv_tokens=65_536,
    kv_bytes_per_token=23_040,
    limits=MeasuredLimits(max_batch_tokens=512, chunk_tokens=128),
    prefill=tuple(MeasuredPrefill(new_tokens=one, seconds=0.001 * one) for one in (16, 256, 512)),
    step=tuple(MeasuredStep(batch=one, context_tokens=256 * one, seconds=0.015 + 0.001 * one) for one in (1, 2, 4, 8)),
    request_s=0.01,
    answer_s=0.005,
)
WORKLOAD = synthetic_workload(named_lengths("in=256,out=32"), 48, 1.5, seed=1)


def served(roles: tuple[Role, ...], contention: Contention) -> ServedMeans:
    groups = [
        WorkerGroup(one, roles.count(one), PROFILE.model(None, 1, 1), PROFILE.batch_limits, True, None, 8, 0)
        for one in dict.fromkeys(roles)
    ]
    spec = ClusterSpec(tuple(groups), request_s=PROFILE.request_s, answer_s=PROFILE.answer_s)
    found = simulate(replace(spec, contention=contention), WORKLOAD)
    return ServedMeans(float(np.mean(found.ttft_s)), float(np.mean(found.tpot_s)))


@pytest.mark.parametrize("roles", [("prefill", "decode"), ("both", "both"), ("prefill", "prefill", "decode")])
@pytest.mark.parametrize(("prefill", "decode"), [(1.0, 1.0), (1.2, 1.5)])
def test_the_slowdowns_of_a_simulated_load_are_found_again(
    roles: tuple[Role, ...], prefill: float, decode: float
) -> None:
    means = served(roles, Contention(prefill, prefill, decode, decode))
    found = {(one.work, one.neighbour): one.slowdown for one in fitted_slowdowns(PROFILE, roles, WORKLOAD, means)}
    assert set(found) == {
        (work, its)
        for work in ("prefill", "decode")
        for its in ("prefill", "decode")
        if "both" in roles or work != its or roles.count(work) > 1
    }
    again = served(roles, Contention(**{f"{work}_beside_{its}": one for (work, its), one in found.items()}))
    assert again == pytest.approx(means, rel=0.02)


def test_a_load_quicker_than_any_has_no_slowdown_and_one_that_stood_still_the_largest() -> None:
    quick, slow = (
        {
            one.slowdown
            for one in fitted_slowdowns(PROFILE, ("prefill", "decode"), WORKLOAD, ServedMeans(seconds, 0.001))
        }
        for seconds in (0.001, 1e4)
    )
    assert quick == {1.0}
    assert max(slow) == pytest.approx(4.0, abs=0.01)
