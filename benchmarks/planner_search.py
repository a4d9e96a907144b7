"""Which layouts the planner finds for DistServe's cases, beside the paper's; the table of docs/evaluation/planner.md.

    python -m benchmarks.planner_search [--case NAME ...] [--requests N] [--jobs N] [--lengths FILE] [--halves]

`--halves` prints, instead, what each half alone holds for each GPU by its parallelism, and what the paper's placement
holds as a whole.

With DistServe's coefficients (A100-80G) and its simulator's rules: whole prompts as batches, prompts first where
workers do both, KV pulled within a node. DistServe compared itself with colocated vLLM, which has slower coefficients,
so there is a column of these. Lengths are the fits of `halfmoon simulate`, cut at 2,048 tokens, or those of a file of
rows (start_time, prompt_len, output_len).
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
    """One of the paper's, on nodes of eight or four GPUs, and what is models of it."""

    model: str
    lengths: str
    targets: SloTargets
    num_gpus: int
    models: str
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
    """Those of simdistserve."""
    whole = BatchLimits(1 << 17, 1 << 17, 1 << 20, "prefill-first")
    roles: tuple[Role, ...] = ("prefill", "decode", "both")
    network = Network(GPU.network_bytes_per_s, node_bytes_per_s=GPU.link_bytes_per_s, handover="pull")
    return Rules(dict.fromkeys(roles, whole), {GPU.name: network})


def requests_of(case: Case, num: int, lengths: Path | None) -> Workload:
    """Cut off where OPT's context ends."""
    if lengths is not None:
        found = read_workload(lengths)
    else:
        found = synthetic_workload(named_lengths(case.lengths), num, 1.0, seed=0)
    return replace(found, prefixes=None).within(CONTEXT_TOKENS).first(num)


def main() -> None:
    """Prints one row a case and criterion."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--lengths", type=Path)
    parser.add_argument("--halves", action="store_true")
    args = parser.parse_args()
    if args.halves:
        with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
            for name in args.case or CASES:
                show_halves(name, requests_of(CASES[name], args.requests, args.lengths), pool)
        return
    print(
        "| case | criterion | best disaggregated | best colocated | colocated, vLLM's coefficients | models | seconds |"
    )
    print("|---|---|---|---|---|---|---|")
    criteria: tuple[Criterion, ...] = ("joint", "marginal")
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        for name in args.case or CASES:
            case = CASES[name]
            workload = requests_of(case, args.requests, args.lengths)
            for criterion in criteria:
                began_s = time.perf_counter()
                ours, of_vllm = (found_with(engine, case, workload, criterion, pool) for engine in ENGINES)
                cells = [shown(one) for one in (ours[0], ours[1], of_vllm[1])]
                row = name, criterion, *cells, case.models, f"{time.perf_counter() - began_s:.0f}"
                print("|", " | ".join(row), "|", flush=True)


def show_halves(name: str, workload: Workload, pool: Executor) -> None:
    """Requests/s for each GPU of one worker whose other half takes no time, by parallelism; - where none is in time."""
    case = CASES[name]
    problem = asked("distserve", case, workload, "joint")
    models = feasible_models(problem)
    found = options(problem, models)
    trials = [phase_trial(problem, models, one) for one in found]
    rates = pool.map(goodput_per_s, trials, [one.bound.typical_per_s for one in found])
    per_gpu = {
        (one.role, one.kind.parallelism): min(rate, one.bound.most_per_s) / one.kind.num_devices
        for one, rate in zip(found, rates, strict=True)
    }
    print(f"| {name}, alone | " + " | ".join(str(one.parallelism) for one in models), "|")
    print("|---" * (len(models) + 1) + "|")
    for role in ("prefill", "decode", "both"):
        cells = (per_gpu.get((role, one.parallelism)) for one in models)
        print(f"| {role} |", " | ".join("-" if one is None else f"{one:.2f}" for one in cells), "|", flush=True)
    kinds = [WorkerKind(GPU.name, one) for one in (case.prefill, case.decode)]
    for nums in ((1, 1), (1, 2), (2, 1)):
        sets = tuple(WorkerSet(role, kind, num) for role, kind, num in zip(ROLES, kinds, nums, strict=False))
        layout = Layout(sets, is_paired=True)
        rate = goodput_per_s(layout_trial(problem, models, layout), float(layout.num_gpus))
        print(f"{name}: {layout}: {rate / layout.num_gpus:.2f}", flush=True)


def found_with(
    engine: Engine, case: Case, workload: Workload, criterion: Criterion, pool: Executor
) -> tuple[Rated | None, Rated | None]:
    """The best disaggregated and the best colocated layout with one engine's coefficients."""
    try:
        found = search(asked(engine, case, workload, criterion), pool)
    except NoLayout:
        return None, None
    return found.disaggregated, found.colocated


def asked(engine: Engine, case: Case, workload: Workload, criterion: Criterion) -> PlanningProblem:
    """One node, as in the paper's algorithm 2."""
    fleet = Fleet((NodePool(GPU, 1, case.num_gpus),))
    source = DistServeCoefficients(case.model, engine)
    goal = Goal(case.targets, 0.9, criterion)
    return PlanningProblem({GPU.name: source}, fleet, workload, goal, rules(), shape=MODELS[case.model])


def shown(one: Rated | None) -> str:
    """A cell: the layout and its goodput for each GPU."""
    return "none" if one is None else f"{one.layout}: {one.per_gpu:.2f}"


if __name__ == "__main__":
    main()
