"""Choices of AIConfigurator's planner and ours under steady load: `python -m benchmarks.planner steady`.

Llama-3.1-8B on up to eight GPUs, constant lengths, Poisson arrivals, both with AIConfigurator's times of vLLM. Every
layout is simulated at the requested rate.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from typing import NamedTuple

from benchmarks.planner.peer import recommended
from halfmoon.plan.layout import Layout, first_of_each_kind
from halfmoon.plan.layout_trial import layout_trial
from halfmoon.plan.node_pools import read_fleet
from halfmoon.plan.problem import PlanningProblem, default_rules
from halfmoon.plan.search.evaluation import evaluate
from halfmoon.plan.search.feasible import feasible_models
from halfmoon.plan.search.goodput import Goal
from halfmoon.plan.search.search import search
from halfmoon.sim.cluster.cluster_spec import SloTargets
from halfmoon.sim.latency_sources.latency_source import latency_source
from halfmoon.sim.latency_sources.model_catalogue import MODELS
from halfmoon.sim.workloads.drawn_workload import synthetic_workload
from halfmoon.sim.workloads.lengths import named_lengths

_MODEL = "llama-3.1-8b"
_MAX_RUNNING = 256


class _Case(NamedTuple):
    gpu: str
    lengths: str
    rate_per_s: float
    targets: SloTargets


_QUESTIONS = (
    _Case("h200", "in=1024,out=256", 40.0, SloTargets(ttft_s=0.3, tpot_s=0.02)),
    _Case("h200", "in=4096,out=256", 8.0, SloTargets(ttft_s=0.5, tpot_s=0.02)),
    _Case("h100", "in=512,out=512", 30.0, SloTargets(ttft_s=0.3, tpot_s=0.015)),
)


def show_steady(pool: Executor) -> None:
    """Prints the cheapest layout of each kind by each planner."""
    print("| problem (TTFT / TPOT, s) | planned by | layout | GPUs | attainment | TTFT p50 / p99, TPOT p50 (ms) |")
    print("|---|---|---|---|---|---|")
    for case in _QUESTIONS:
        problem = _question(case)
        models, targets = feasible_models(problem), case.targets
        text = f"{case.gpu}, {case.lengths}, {case.rate_per_s:g}/s, {targets.ttft_s} / {targets.tpot_s}"
        for who, layout in _answers(problem, pool):
            evaluation = evaluate(layout_trial(problem, models, layout), case.rate_per_s)
            times = (
                f"{_ms(evaluation.ttft_s['p50'])} / {_ms(evaluation.ttft_s['p99'])}, {_ms(evaluation.tpot_s['p50'])}"
            )
            share = f"{evaluation.attainment.joint:.1%}"
            print(f"| {text} | {who} | {layout} | {layout.num_gpus} | {share} | {times} |", flush=True)


def _question(case: _Case) -> PlanningProblem:
    fleet = read_fleet(case.gpu, 1, 8, {})
    sources = {case.gpu: latency_source(f"aiconfigurator-vllm:{_MODEL}")}
    workload = synthetic_workload(named_lengths(case.lengths), 1000, case.rate_per_s, seed=1)
    goal, rules = Goal(case.targets, 0.9), default_rules(fleet, sources, _MAX_RUNNING)
    return PlanningProblem(
        sources, fleet, workload, goal, rules, shape=MODELS[_MODEL], rate_per_s=case.rate_per_s, objective="gpus"
    )


def _answers(problem: PlanningProblem, pool: Executor) -> Iterator[tuple[str, Layout]]:
    best = [one.layout for one in search(problem, pool).best]
    for together, layout in first_of_each_kind(best, lambda one: one).items():
        yield f"halfmoon plan, {'together' if together else 'apart'}", layout
    for kind, layout in recommended(problem, problem.rate_per_s or 0.0).items():
        yield f"aiconfigurator,{kind}", layout


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.1f}"
