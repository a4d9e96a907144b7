"""Planning by averages under bursts: `python -m benchmarks.planner bursts --trace FILE`.

A planner by averages models a steady state: mean lengths, mean rate, the capacity of a worker that is always busy, and
as many workers as the rate needs. It knows no queues. Its layouts, and those of `halfmoon plan`, are simulated under
the trace's own arrivals.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import replace
from itertools import product

import numpy as np

from halfmoon.plan.layout import Layout, WorkerKind, WorkerSet
from halfmoon.plan.layout_trial import layout_trial
from halfmoon.plan.problem import PlanningProblem
from halfmoon.plan.search.evaluation import evaluate
from halfmoon.plan.search.feasible import feasible_models
from halfmoon.plan.search.search import search
from halfmoon.policy.view.worker_view import Role
from halfmoon.sim.latency_sources.latency_model import LatencyModel
from halfmoon.sim.workloads.drawn_workload import arrivals
from halfmoon.sim.workloads.workload import Workload

_MINUTE_S = 60.0

Peer = Callable[[PlanningProblem, float], Mapping[str, Layout]]
"""Another planner's layouts for a rate, by its kinds of them."""


def show_bursts(problem: PlanningProblem, pool: Executor, peers: Mapping[str, Peer]) -> None:
    """Prints the table.

    The rate is the trace's own; planning by averages uses the mean rate or the busiest minute's.
    """
    trace, rate_per_s = problem.workload, problem.workload.rate_per_s
    problem = replace(problem, rate_per_s=rate_per_s, objective="gpus")
    models = feasible_models(problem)
    smooth = trace.arriving(arrivals("poisson", len(trace), rate_per_s, np.random.default_rng(0)))
    busiest_per_s = float(np.bincount((trace.start_s // _MINUTE_S).astype(int)).max()) / _MINUTE_S
    rates = {
        f"mean rate ({rate_per_s:.2f}/s)": rate_per_s,
        f"busiest minute ({busiest_per_s:.2f}/s)": busiest_per_s,
    }
    planned = {
        **{f"averages, {what}": by_averages(problem, models, rate) for what, rate in rates.items()},
        **{
            f"{name}{kind}, {what}": layout
            for name, peer in peers.items()
            for what, rate in rates.items()
            for kind, layout in peer(problem, rate).items()
        },
        "halfmoon plan, Poisson arrivals": search(replace(problem, workload=smooth), pool).best[0].layout,
        "halfmoon plan, the trace": search(problem, pool).best[0].layout,
    }
    gaps_s = np.diff(trace.start_s)
    print(f"{len(trace)} requests in {trace.duration_s:.0f} s, gaps' CV {gaps_s.std() / gaps_s.mean():.1f}")
    print("| planned by | layout | GPUs | attainment | TTFT p50 / p90 / p99 s |")
    print("|---|---|---|---|---|")
    for how, layout in planned.items():
        evaluation = evaluate(layout_trial(problem, models, layout), rate_per_s)
        times = " / ".join(f"{evaluation.ttft_s[name] or 0:.2f}" for name in ("p50", "p90", "p99"))
        print(f"| {how} | {layout} | {layout.num_gpus} | {evaluation.attainment.joint:.1%} | {times} |", flush=True)


def by_averages(problem: PlanningProblem, models: Mapping[WorkerKind, LatencyModel], rate_per_s: float) -> Layout:
    """The layout with the fewest GPUs whose capacity in a steady state is the rate."""
    roles: tuple[Role, ...] = ("prefill", "decode", "both")
    held = {
        (role, kind): rate
        for role, (kind, model) in product(roles, models.items())
        if (rate := _capacity_per_s(role, model, problem.workload, problem))
    }
    made = list(_layouts(held, rate_per_s))
    return min((one for one in made if one.fits(problem.fleet)), key=lambda one: (one.num_gpus, len(one.sets)))


def _layouts(held: Mapping[tuple[Role, WorkerKind], float], rate_per_s: float) -> Iterator[Layout]:
    def workers(role: Role) -> list[WorkerSet]:
        return [WorkerSet(role, one, math.ceil(rate_per_s / rate)) for (of, one), rate in held.items() if of == role]

    yield from (Layout((one,)) for one in workers("both"))
    yield from (Layout(pair) for pair in product(workers("prefill"), workers("decode")))


def _capacity_per_s(role: Role, model: LatencyModel, workload: Workload, problem: PlanningProblem) -> float:
    """Capacity of one worker always busy with requests of mean length; 0 if it misses a target even so."""
    prompt, output = float(workload.prompt_tokens.mean()), float(workload.output_tokens.mean())
    prefill_s, context = model.prefill_s(prompt), prompt + output / 2
    most = min(problem.rules.limits[role].max_running, int(model.kv_tokens / (prompt + output)))
    batches = [one for one in range(1, most + 1) if _step_s(model, one, context) <= problem.goal.gap_s]
    if prefill_s > (problem.goal.targets.ttft_s or math.inf) or not batches:
        return 0.0
    decode_s = output * min(_step_s(model, one, context) / one for one in batches)
    return 1 / {"prefill": prefill_s, "decode": decode_s, "both": prefill_s + decode_s}[role]


def _step_s(model: LatencyModel, batch: int, context: float) -> float:
    base_s, slope_s = model.cycle(batch)
    return base_s + slope_s * batch * context
