"""Figures of a simulation: attainment, goodput, quantiles, rows."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.sim.cluster.cluster_spec import SloTargets
from halfmoon.sim.report import request_rows, simulation_summary
from halfmoon.sim.result import OUTCOMES, SimResult, WorkerFigures, quantiles
from halfmoon.sim.simulation import simulate
from tests.sim.small_clusters import pair, work

TARGETS = SloTargets(0.5, 0.1, 0.3)
WORKERS = WorkerFigures(("prefill-0",), np.array([1.0]), np.array([3]), np.array([0]), np.array([0]), np.array([0.5]))


def result(*rows: tuple[str, float, float, float]) -> SimResult:
    """Outcome, TTFT, TPOT and longest gap of requests that come a second apart."""
    names, ttft_s, tpot_s, gap_s = zip(*rows, strict=True)
    num, start_s = len(rows), np.arange(float(len(rows)))
    ints = np.zeros(num, dtype=np.int64)
    return SimResult(
        start_s, np.array(ttft_s), np.array(tpot_s), np.array(gap_s), np.array(gap_s), start_s + 1, np.zeros(num),
        np.array([OUTCOMES.index(name) for name in names], dtype=np.int8), ints, ints, WORKERS,
    )  # fmt: skip


def test_each_target_is_met_by_its_own_share_and_all_by_who_meets_all() -> None:
    nan = math.nan
    found = result(
        ("completed", 0.4, 0.05, 0.2), ("completed", 0.6, 0.05, 0.2), ("completed", 0.4, 0.2, 0.2),
        ("completed", 0.4, nan, nan), ("refused", nan, nan, nan), ("completed", 0.4, 0.05, 0.4),
    )  # fmt: skip
    shares = found.attainment(TARGETS)
    assert shares == pytest.approx((2 / 6, 4 / 6, 4 / 6, 4 / 6))
    assert (shares.value("joint"), shares.value("marginal")) == pytest.approx((2 / 6, 4 / 6))
    assert found.goodput_per_s(TARGETS) == pytest.approx(2 / 5)


@given(st.lists(st.tuples(st.sampled_from(OUTCOMES), *([st.floats(0.0, 1.0)] * 3)), min_size=1, max_size=30))
def test_joint_attainment_is_below_marginal_and_wider_targets_meet_no_less(
    rows: list[tuple[str, float, float, float]],
) -> None:
    found = result(*rows)
    shares, wider = found.attainment(TARGETS), found.attainment(SloTargets(0.6, 0.2, 0.3))
    assert shares.value("joint") <= shares.value("marginal")
    assert all(after >= before for after, before in zip(wider, shares, strict=True))
    assert found.attainment(SloTargets()).joint == pytest.approx(np.mean([name == "completed" for name, *_ in rows]))


@given(st.integers(1, 20), st.data())
def test_rows_cut_every_column_alike(num: int, data: st.DataObject) -> None:
    found = result(*[("completed", 0.01 * index, 0.05, 0.2) for index in range(num)])
    begin = data.draw(st.integers(0, num))
    end = data.draw(st.integers(begin, num))
    part = found.rows(begin, end)
    assert part.ttft_s.tolist() == found.ttft_s[begin:end].tolist()
    assert {len(column) for column in (part.start_s, part.outcome, part.cached_tokens, part.wait_s)} == {end - begin}
    assert part.workers is found.workers


def test_quantiles_leave_out_what_is_no_number() -> None:
    assert quantiles(np.array([math.nan, 1.0, 3.0]))["mean"] == 2.0
    assert set(quantiles(np.array([math.nan])).values()) == {None}
    found = quantiles(np.arange(101.0))
    assert (found["p50"], found["p90"], found["p99"]) == (50.0, 90.0, 99.0)


def test_a_summary_is_plain_json_and_adds_up() -> None:
    spec, workload = pair(), work((0, 100, 3), (0.5, 50, 1), (1.0, 20_000, 2))
    found = simulate(spec, workload)
    summary = json.loads(json.dumps(simulation_summary(spec, found, TARGETS, 0.6, "joint")))
    assert sum(summary["outcomes"].values()) == summary["num_requests"] == 3
    assert summary["outcomes"]["refused"] == 1
    assert summary["is_met"] == (summary["attainment"] >= 0.6)
    assert [worker["name"] for worker in summary["workers"]] == ["prefill-0", "decode-1"]
    assert all(0 <= worker["busy"] <= 1 and 0 <= worker["peak_kv"] <= 1 for worker in summary["workers"])
    rows = json.loads(json.dumps(request_rows(workload, found)))
    assert [row["prompt_len"] for row in rows] == [100, 50, 20_000]
    assert rows[1]["tpot_s"] is None
    assert rows[2] == {**rows[2], "ttft_s": None, "outcome": "refused"}
