"""A replay in the simulator: its outcomes, their figures, and the table of several modes."""

from __future__ import annotations

import io
import math
from dataclasses import replace

import pytest
from rich.console import Console

from halfmoon.replay.outcome import ReplayTargets, Summary, summarized
from halfmoon.replay.report import report_table
from halfmoon.replay.virtual import cluster_spec, simulated
from halfmoon.sim.latency_sources.worker_profile import INSTANT, PROFILES
from halfmoon.sim.workloads.drawn_workload import synthetic_workload
from halfmoon.sim.workloads.lengths import named_lengths

WORKLOAD = synthetic_workload(named_lengths("in=2000,out=50"), 40, 4.0, seed=0)
PROFILE = PROFILES["llama3-8b-h100"]


def summary(targets: ReplayTargets, admission: str = "off") -> Summary:
    modes = ("kvcache-centric", admission)
    outcomes = simulated(WORKLOAD, PROFILE, (1, 1), modes, targets, lambda done, total: None)  # type: ignore[arg-type]
    return summarized(outcomes, targets, WORKLOAD.duration_s)


def test_every_request_has_one_end_and_idle_latencies_bound_them() -> None:
    found = summary(ReplayTargets(ttft_s=1.0))
    ends = found.num_in_time + found.num_late + found.num_refused + found.num_failed
    assert ends == found.num_requests == len(WORKLOAD)
    assert found.ttft_s.p50 >= PROFILE.latency.prefill_s(2000) - 1e-9  # sums of the same terms
    step = PROFILE.latency.cycle(1)
    assert found.tbt_s.p50 >= step.base_s + step.slope_s * 2000
    assert found.ttft_s.p50 <= found.ttft_s.p90 <= found.ttft_s.p99


def test_wider_targets_are_met_by_no_fewer_and_none_by_all() -> None:
    in_time = [summary(ReplayTargets(ttft_s, 0.05)).num_in_time for ttft_s in (0.05, 0.1, 0.3, math.inf)]
    assert in_time == sorted(in_time)
    assert in_time[0] == 0  # an idle worker takes longer
    assert summary(ReplayTargets()).attainment == 1.0


def test_prediction_refuses_what_would_be_late() -> None:
    targets = ReplayTargets(ttft_s=0.05)
    found = summary(targets, "predicted")
    assert (
        found.num_late < summary(targets).num_late / 10
    )  # an idle cluster admits a probe (policy/admission/idle_probe.py)
    assert found.num_refused + found.num_late == sum(found.refused_by.values()) + found.num_late == len(WORKLOAD)


@pytest.mark.parametrize(("link", "expected"), [(0.0, math.inf), (1e9, 1e9)])
def test_a_profile_without_a_link_transfers_in_no_time(link: float, expected: float) -> None:
    spec = cluster_spec(
        replace(PROFILES[INSTANT], link_bytes_per_s=link), (2, 3), ("random", "off"), ReplayTargets(math.inf, 0.1)
    )
    assert spec.network.bytes_per_s == expected
    assert (spec.targets.ttft_s, spec.targets.tpot_s) == (None, 0.1)
    assert [group.count for group in spec.groups] == [2, 3]


def test_a_table_has_a_column_for_each_replay() -> None:
    found = summary(ReplayTargets(ttft_s=1.0))
    table = report_table({("random", "off"): found, ("kvcache-centric", "predicted"): found})
    text = io.StringIO()
    Console(file=text, width=120).print(table)
    assert len(table.columns) == 3
    for part in ("kvcache-centric", "predicted", f"{found.num_in_time} ({found.attainment:.1%})", "sent late p99, s"):
        assert part in text.getvalue()
