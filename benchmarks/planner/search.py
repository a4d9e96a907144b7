"""Layouts found by the planner for DistServe's cases, with the paper's; the table of docs/evaluation/planner.md.

    python -m benchmarks.planner.search [--case NAME ...] [--requests N] [--jobs N] [--lengths FILE] [--phases]

`--phases` instead prints what each phase alone sustains per GPU by its parallelism, and what the paper's placement
sustains as a whole.

Uses DistServe's coefficients (A100-80G) and its simulator's rules: whole prompts as batches, prompts first on colocated
workers, KV pulled within a node. DistServe compared itself with colocated vLLM, which has slower coefficients, so there
is a column for these. Lengths are the fits of `halfmoon simulate`, cut at 2,048 tokens, or those of a file of rows
(start_time, prompt_len, output_len).
"""

from __future__ import annotations

import argparse
import time
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

from halfmoon.plan.layout import Layout, Parallelism, Rules, WorkerKind, WorkerSet
from halfmoon.plan.layout_trial import layout_trial
from halfmoon.plan.node_pools import Fleet, NodePool
from halfmoon.plan.problem import PlanningProblem
from halfmoon.plan.search.feasible import NoLayout, feasible_models, options
from halfmoon.plan.search.goodput import Goal, goodput_per_s
from halfmoon.plan.search.objective import Rated
from halfmoon.plan.search.phases import phase_trial
from halfmoon.plan.search.search import search
from halfmoon.policy.view.worker_view import Role
from halfmoon.sim.cluster.cluster_spec import BatchLimits, Network, SloTargets
from halfmoon.sim.latency_sources.distserve import DistServeCoefficients, Engine
from halfmoon.sim.latency_sources.hardware import device
from halfmoon.sim.latency_sources.model_catalogue import MODELS
from halfmoon.sim.result import Criterion
from halfmoon.sim.workloads.drawn_workload import synthetic_workload
from halfmoon.sim.workloads.lengths import named_lengths
from halfmoon.sim.workloads.traces import read_workload
from halfmoon.sim.workloads.workload import Workload

CONTEXT_TOKENS = 2048  # of OPT
GPU = device("a100-80g")
ROLES: tuple[Role, Role] = ("prefill", "decode")
ENGINES: tuple[Engine, ...] = ("distserve", "vllm")


@dataclass(frozen=True, slots=True)
class Case:
    """One of the paper's cases, on a node of eight or four GPUs, with its published results."""

    model: str
    lengths: str
    targets: SloTargets
    num_gpus: int
    published: str
    prefill: Parallelism  # the paper's, as `decode`
    decode: Parallelism


_OF_13B = Parallelism(2, 1), Parallelism(1, 1)
_OF_66B = Parallelism(4, 1), Parallelism(2, 2)
CASES = {
    "13b-chat-4": Case(
        "opt-13b", "chat", SloTargets(0.2, 0.1), 4, "prefill TP2 + decode TP1, 2.2; colocated TP4, 1.6", *_OF_13B
    ),
    "13b-chat": Case("opt-13b", "chat", SloTargets(0.25, 0.1), 8, "prefill TP2 + decode TP1", *_OF_13B),
    "66b-chat": Case("opt-66b", "chat", SloTargets(2.5, 0.15), 8, "prefill TP4 + decode TP2xPP2", *_OF_66B),
    "66b-code": Case("opt-66b", "code", SloTargets(0.125, 0.2), 8, "prefill TP4 + decode TP2xPP2", *_OF_66B),
    "66b-summarization": Case(
        "opt-66b", "summarization", SloTargets(15, 0.15), 8, "prefill TP4 + decode TP2xPP2", *_OF_66B
    ),
}


def rules() -> Rules:
    """Rules of simdistserve."""
    whole = BatchLimits(1 << 17, 1 << 17, 1 << 20, "prefill-first")
    roles: tuple[Role, ...] = ("prefill", "decode", "both")
    network = Network(GPU.network_bytes_per_s, node_bytes_per_s=GPU.link_bytes_per_s, handover="pull")
    return Rules(dict.fromkeys(roles, whole), {GPU.name: network})


def requests_of(case: Case, num: int, lengths: Path | None) -> Workload:
    """Requests of a case, cut at OPT's context."""
    if lengths is not None:
        found = read_workload(lengths)
    else:
        found = synthetic_workload(named_lengths(case.lengths), num, 1.0, seed=0)
    return replace(found, prefixes=None).within(CONTEXT_TOKENS).first(num)


def main() -> None:
    """Prints one row per case and criterion."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--lengths", type=Path)
    parser.add_argument("--phases", action="store_true")
    args = parser.parse_args()
    if args.phases:
        with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
            for name in args.case or CASES:
                show_phases(name, requests_of(CASES[name], args.requests, args.lengths), pool)
        return
    print("| case | criterion | best disaggregated | best colocated | colocated, vLLM | published | seconds |")
    print("|---|---|---|---|---|---|---|")
    criteria: tuple[Criterion, ...] = ("joint", "marginal")
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        for name in args.case or CASES:
            case = CASES[name]
            workload = requests_of(case, args.requests, args.lengths)
            for criterion in criteria:
                began_s = time.perf_counter()
                ours, of_vllm = (best_layouts(engine, case, workload, criterion, pool) for engine in ENGINES)
                cells = [cell(best) for best in (ours[0], ours[1], of_vllm[1])]
                row = name, criterion, *cells, case.published, f"{time.perf_counter() - began_s:.0f}"
                print("|", " | ".join(row), "|", flush=True)


def show_phases(name: str, workload: Workload, pool: Executor) -> None:
    """Prints requests/s per GPU of one worker alone, by parallelism; "-" if no request is in time."""
    case = CASES[name]
    problem = problem_of("distserve", case, workload, "joint")
    models = feasible_models(problem)
    workers = options(problem, models)
    trials = [phase_trial(problem, models, worker) for worker in workers]
    rates = pool.map(goodput_per_s, trials, [worker.bound.typical_per_s for worker in workers])
    per_gpu = {
        (worker.role, worker.kind.parallelism): min(rate, worker.bound.most_per_s) / worker.kind.num_devices
        for worker, rate in zip(workers, rates, strict=True)
    }
    print(f"| {name}, alone | " + " | ".join(str(kind.parallelism) for kind in models), "|")
    print("|---" * (len(models) + 1) + "|")
    for role in ("prefill", "decode", "both"):
        cells = (per_gpu.get((role, kind.parallelism)) for kind in models)
        print(f"| {role} |", " | ".join("-" if rate is None else f"{rate:.2f}" for rate in cells), "|", flush=True)
    kinds = [WorkerKind(GPU.name, parallelism) for parallelism in (case.prefill, case.decode)]
    for nums in ((1, 1), (1, 2), (2, 1)):
        sets = tuple(WorkerSet(role, kind, num) for role, kind, num in zip(ROLES, kinds, nums, strict=False))
        layout = Layout(sets, is_paired=True)
        rate = goodput_per_s(layout_trial(problem, models, layout), float(layout.num_gpus))
        print(f"{name}: {layout}: {rate / layout.num_gpus:.2f}", flush=True)


def best_layouts(
    engine: Engine, case: Case, workload: Workload, criterion: Criterion, pool: Executor
) -> tuple[Rated | None, Rated | None]:
    """The best disaggregated and the best colocated layout with one engine's coefficients."""
    try:
        result = search(problem_of(engine, case, workload, criterion), pool)
    except NoLayout:
        return None, None
    return result.disaggregated, result.colocated


def problem_of(engine: Engine, case: Case, workload: Workload, criterion: Criterion) -> PlanningProblem:
    """Planning problem of a case on one node, as in the paper's algorithm 2."""
    fleet = Fleet((NodePool(GPU, 1, case.num_gpus),))
    source = DistServeCoefficients(case.model, engine)
    goal = Goal(case.targets, 0.9, criterion)
    return PlanningProblem({GPU.name: source}, fleet, workload, goal, rules(), shape=MODELS[case.model])


def cell(best: Rated | None) -> str:
    """One cell: the layout and its goodput per GPU."""
    return "none" if best is None else f"{best.layout}: {best.per_gpu:.2f}"


if __name__ == "__main__":
    main()
