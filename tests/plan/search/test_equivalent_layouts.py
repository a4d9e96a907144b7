"""Who has the same workers and the same figures is one row."""

from __future__ import annotations

from dataclasses import replace

from halfmoon.plan.layout import Layout, Parallelism, WorkerKind, WorkerSet
from halfmoon.plan.search.equivalent_layouts import group_equivalent
from halfmoon.plan.search.evaluation import Evaluation
from halfmoon.sim.result import Attainment

ONE = WorkerKind("h100", Parallelism(1, 1))
APART = Layout((WorkerSet("prefill", ONE, 2), WorkerSet("decode", ONE, 4)))
PAIRED, UNITS = replace(APART, is_paired=True), Layout(
    (WorkerSet("prefill", ONE, 1), WorkerSet("decode", ONE, 2)), num_units=2, is_paired=True
)  # fmt: skip
OTHER = Layout((WorkerSet("prefill", ONE, 4), WorkerSet("decode", ONE, 2)))
TIMES: dict[str, float | None] = {"mean": 0.1, "p50": 0.1, "p90": 0.2, "p99": None}
VERDICT = Evaluation(10.0, Attainment(0.95, 0.96, 0.99, 1.0), TIMES, TIMES, TIMES, keeps_up=True)


def test_paired_or_apart_or_in_units_is_one_row_where_figures_are_equal() -> None:
    almost = replace(VERDICT, ttft_s={**TIMES, "p90": 0.2001})
    assert group_equivalent([(APART, VERDICT), (OTHER, VERDICT), (PAIRED, almost), (UNITS, VERDICT)]) == {
        APART: (PAIRED, UNITS),
        OTHER: (),
    }


def test_other_figures_are_another_row() -> None:
    for other in (
        replace(VERDICT, rate_per_s=10.2),
        replace(VERDICT, attainment=Attainment(0.93, 0.94, 0.99, 1.0)),
        replace(VERDICT, tpot_s={**TIMES, "p50": 0.11}),
        replace(VERDICT, tpot_s={**TIMES, "p99": 0.3}),
        replace(VERDICT, keeps_up=False),
    ):
        assert len(group_equivalent([(APART, VERDICT), (PAIRED, other)])) == 2


def test_a_lossier_codec_that_gains_nothing_is_no_row_of_its_own() -> None:
    int8, int4 = replace(APART, codec="int8"), replace(PAIRED, codec="int4")
    of_all = [(APART, VERDICT), (int8, VERDICT), (int4, VERDICT)]
    assert group_equivalent(of_all) == {APART: (int8, int4)}
    assert group_equivalent(of_all, of_one_codec=True) == {APART: (), int8: (), int4: ()}
    assert len(group_equivalent([(APART, VERDICT), (int8, replace(VERDICT, rate_per_s=10.6))])) == 2
    assert len(group_equivalent([(int8, VERDICT), (APART, VERDICT)])) == 2  # it was ranked first for its goodput
