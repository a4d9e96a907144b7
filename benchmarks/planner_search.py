"""Which layouts the planner finds for DistServe's cases, beside the paper's; the table of docs/planner.md.

    python -m benchmarks.planner_search [--case NAME ...] [--requests N] [--jobs N] [--lengths FILE]

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

from halfmoon.plan.feasible import NoLayout
from halfmoon.plan.fleet import Fleet, NodePool
from halfmoon.plan.goodput import Goal
from halfmoon.plan.layout import Rules
from halfmoon.plan.question import Question
from halfmoon.plan.ranking import Rated
from halfmoon.plan.search import search
from halfmoon.policy.cluster_view import Role
from halfmoon.sim.cluster import BatchLimits, Network, Targets
from halfmoon.sim.distserve import DistServeCoefficients, Engine
from halfmoon.sim.hardware import device
from halfmoon.sim.lengths import named_lengths
from halfmoon.sim.model_catalogue import MODELS
from halfmoon.sim.result import Criterion
from halfmoon.sim.synthetic import synthetic_workload
from halfmoon.sim.traces import read_workload
from halfmoon.sim.workload import Workload

CONTEXT_TOKENS = 2048  # of OPT
GPU = device("a100-80g")
ENGINES: tuple[Engine, ...] = ("distserve", "vllm")


@dataclass(frozen=True, slots=True)
class Case:
    """One of the paper's, on nodes of eight or four GPUs, and what is known of it."""

    model: str
    lengths: str
    targets: Targets
    num_gpus: int
    known: str


CASES = {
    "13b-chat-4": Case("opt-13b", "chat", Targets(0.2, 0.1), 4, "prefill TP2 + decode TP1, 2.2; colocated TP4, 1.6"),
    "13b-chat": Case("opt-13b", "chat", Targets(0.25, 0.1), 8, "prefill TP2 + decode TP1"),
    "66b-chat": Case("opt-66b", "chat", Targets(2.5, 0.15), 8, "prefill TP4 + decode TP2xPP2"),
    "66b-code": Case("opt-66b", "code", Targets(0.125, 0.2), 8, "prefill TP4 + decode TP2xPP2"),
    "66b-summarization": Case("opt-66b", "summarization", Targets(15, 0.15), 8, "prefill TP4 + decode TP2xPP2"),
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
    args = parser.parse_args()
    print(
        "| case | criterion | best disaggregated | best colocated | colocated, vLLM's coefficients | known | seconds |"
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
                row = name, criterion, *cells, case.known, f"{time.perf_counter() - began_s:.0f}"
                print("|", " | ".join(row), "|", flush=True)


def found_with(
    engine: Engine, case: Case, workload: Workload, criterion: Criterion, pool: Executor
) -> tuple[Rated | None, Rated | None]:
    """The best disaggregated and the best colocated layout with one engine's coefficients."""
    try:
        found = search(asked(engine, case, workload, criterion), pool)
    except NoLayout:
        return None, None
    return found.disaggregated, found.colocated


def asked(engine: Engine, case: Case, workload: Workload, criterion: Criterion) -> Question:
    """One node, as in the paper's algorithm 2."""
    fleet = Fleet((NodePool(GPU, 1, case.num_gpus),))
    source = DistServeCoefficients(case.model, engine)
    goal = Goal(case.targets, 0.9, criterion)
    return Question({GPU.name: source}, fleet, workload, goal, rules(), shape=MODELS[case.model])


def shown(one: Rated | None) -> str:
    """A cell: the layout and its goodput for each GPU."""
    return "none" if one is None else f"{one.layout}: {one.per_gpu:.2f}"


if __name__ == "__main__":
    main()
