"""Small planning problems, as the command line asks them."""

from __future__ import annotations

from dataclasses import replace

from halfmoon.plan.layout import Layout, Parallelism, WorkerKind, WorkerSet
from halfmoon.plan.planning import problem_from
from halfmoon.plan.problem import PlanningProblem
from halfmoon.plan.request import PlanRequest
from halfmoon.plan.search.evaluation import Evaluation
from halfmoon.plan.search.objective import Rated
from halfmoon.sim.result import Attainment

ONE, TWO = WorkerKind("h100", Parallelism(1, 1)), WorkerKind("h100", Parallelism(2, 1))
REQUEST = PlanRequest("llama-3-8b", "h100", "in=512,out=64", ttft_s=0.4, tpot_s=0.05, num_requests=24)
TIMES: dict[str, float | None] = {"mean": 0.1, "p50": 0.1, "p90": 0.2, "p99": None}
EVALUATION = Evaluation(10.0, Attainment(0.95, 0.96, 0.99, 1.0), TIMES, TIMES, TIMES, keeps_up=True)


def problem(**changes: object) -> PlanningProblem:
    return problem_from(replace(REQUEST, **changes))[0]  # type: ignore[arg-type]


def colocated(num: int = 1, kind: WorkerKind = ONE) -> Layout:
    return Layout((WorkerSet("both", kind, num),))


def disaggregated(prefill: int = 1, decode: int = 1, kind: WorkerKind = ONE) -> Layout:
    return Layout((WorkerSet("prefill", kind, prefill), WorkerSet("decode", kind, decode)))


def rated(layout: Layout, goodput_per_s: float = 12.0) -> Rated:
    return Rated(layout, goodput_per_s, 3.0 * layout.num_gpus, EVALUATION)
