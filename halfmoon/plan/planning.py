"""The planner's entry: a request in, a plan out. `halfmoon plan` and the planner service call it."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from halfmoon.plan.curves import Curve, curves
from halfmoon.plan.goodput import Goal
from halfmoon.plan.plan_file import plan_text
from halfmoon.plan.question import Question, default_rules
from halfmoon.plan.request import PlanRequest
from halfmoon.plan.search import Plan, Progress, Rated, layout_trial, search
from halfmoon.plan.verdict import Verdict, judged, sensitivity
from halfmoon.sim.asked_workload import DRAWN_REQUESTS, asked_workload
from halfmoon.sim.cluster import Targets
from halfmoon.sim.hardware import device
from halfmoon.sim.latency_sources import latency_source


@dataclass(frozen=True, slots=True)
class PlanResult:
    """What was found. `verdicts` are of `plan.best`, one each; `what_if` is of the best one, by what changes.

    `curves` are of the best layouts and of the best of either kind, where they were asked for.
    """

    request: PlanRequest
    question: Question
    plan: Plan
    verdicts: tuple[Verdict, ...]
    what_if: dict[str, Verdict]
    curves: tuple[Curve, ...] = ()

    @property
    def file_text(self) -> str:
        """plan.yaml."""
        return plan_text(
            self.question, self.request.model, latency_text(self.request), self.plan.best[0], self.verdicts[0]
        )


def make_plan(
    request: PlanRequest,
    num_processes: int | None = None,
    on_progress: Progress = lambda what, done, total: None,
    *,
    with_curves: bool = False,
) -> PlanResult:
    """The same request has the same plan, whatever the number of processes (None: one for each core).

    Blocks; `on_progress` is called in this thread. Raises InvalidRequest for what makes no sense or is not known, and
    NoLayout, which is one, saying which target cannot be met and what could be.
    """
    question = asked(request)
    with _pool(num_processes or os.cpu_count() or 1) as pool:
        found = search(question, pool, on_progress)
        drawn = curves(question, found.models, _compared(found), pool, on_progress) if with_curves else []
    verdicts = tuple(_verdict(question, found, one) for one in found.best)
    what_if = sensitivity(question, found.models, found.best[0].layout, verdicts[0].rate_per_s)
    return PlanResult(request, question, found, verdicts, what_if, tuple(drawn))


def latency_text(request: PlanRequest) -> str:
    """The latency source that the request means."""
    return request.latency or f"roofline:{request.model}"


def asked(request: PlanRequest) -> Question:
    """The request, checked and with what it names. Raises InvalidRequest."""
    on, source = device(request.gpu), latency_source(latency_text(request))
    objective = request.objective or ("goodput-per-gpu" if request.rate_per_s is None else "gpus")
    num = request.num_requests or DRAWN_REQUESTS
    return Question(
        source,
        on,
        request.num_nodes,
        request.gpus_per_node,
        asked_workload(request.workload, 1.0, num, "poisson", 1.0, request.seed),
        Goal(
            Targets(request.ttft_s, request.tpot_s, request.tbt_s, request.tbt_of),
            request.attainment,
            request.criterion,
        ),
        default_rules(on, request.gpus_per_node, source, request.max_running),
        objective,
        request.rate_per_s,
        request.affinity,
        request.seed,
    )


@contextmanager
def _pool(num_processes: int) -> Iterator[Executor]:
    """Processes, or this one alone. What waits is dropped when somebody interrupts."""
    pool: Executor = (
        ThreadPoolExecutor(1)
        if num_processes == 1
        else ProcessPoolExecutor(num_processes, mp_context=multiprocessing.get_context("spawn"))
    )
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _compared(found: Plan) -> list[Rated]:
    """The best, and the best of either kind if it is not among them."""
    others = [one for one in (found.disaggregated, found.colocated) if one is not None and one not in found.best]
    return [*found.best, *others]


def _verdict(question: Question, found: Plan, one: Rated) -> Verdict:
    """At the rate that was asked for, or at the most that the layout holds."""
    trial = layout_trial(question, found.models, one.layout)
    return judged(trial, question.rate_per_s or one.goodput_per_s, one.layout.num_units)
