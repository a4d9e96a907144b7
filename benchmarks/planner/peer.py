"""Asks NVIDIA's own planner our question: `aiconfigurator cli recommend`, as a call.

It takes mean lengths, a rate and targets, and returns the best replica of each kind and how many the rate needs. Its
batch sizes are not adopted: workers here batch more when more requests arrive, which favours it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from time import process_time
from typing import Any

from halfmoon.plan.layout import Layout, Parallelism, WorkerKind, WorkerSet
from halfmoon.plan.problem import PlanningProblem
from halfmoon.policy.view.worker_view import Role
from halfmoon.sim.latency_sources.aiconfigurator import SYSTEMS, KernelTimes, llama_config


def recommended(problem: PlanningProblem, rate_per_s: float) -> Mapping[str, Layout]:
    """Its best colocated and its best disaggregated layout, on the first kind of GPU."""
    gpu = problem.fleet.pools[0].gpu.name
    source, targets = problem.sources[gpu], problem.goal.targets
    if not isinstance(source, KernelTimes) or targets.ttft_s is None or targets.tpot_s is None:
        raise SystemExit("its planner needs its own times, a TTFT and a TPOT target")
    began_s = process_time()
    with TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(llama_config(source.shape)))
        answer = import_module("aiconfigurator.cli").cli_recommend(
            directory,
            SYSTEMS[gpu],
            target_request_rate=rate_per_s,
            backend=source.backend,
            database_mode="SILICON",
            isl=round(float(problem.workload.prompt_tokens.mean())),
            osl=round(float(problem.workload.output_tokens.mean())),
            ttft=1000 * targets.ttft_s,
            tpot=1000 * targets.tpot_s,
        )
    print(f"aiconfigurator answered for {rate_per_s:.2f}/s in {process_time() - began_s:.1f} s of processor time")
    both, pair = (answer.best_configs[kind].iloc[0] for kind in ("agg", "disagg"))
    return {
        " together": Layout((_workers("both", gpu, both, "", 1),)),
        " apart": Layout(
            (
                _workers("prefill", gpu, pair, "(p)", int(pair["(p)workers"])),
                _workers("decode", gpu, pair, "(d)", int(pair["(d)workers"])),
            )
        ),
    }


def _workers(role: Role, gpu: str, row: Mapping[str, Any], prefix: str, in_replica: int) -> WorkerSet:
    kind = WorkerKind(gpu, Parallelism(int(row[f"{prefix}tp"]), int(row[f"{prefix}pp"])))
    return WorkerSet(role, kind, in_replica * int(row["replicas_needed"]))
