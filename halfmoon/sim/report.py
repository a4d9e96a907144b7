"""Converts a simulation's result to the plain values that `halfmoon simulate --json` prints."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import numpy as np

from halfmoon.sim.cluster.cluster_spec import ClusterSpec, SloTargets
from halfmoon.sim.result import OUTCOMES, Criterion, SimResult, quantiles
from halfmoon.sim.workloads.workload import Workload


def simulation_summary(
    spec: ClusterSpec, result: SimResult, targets: SloTargets, attainment: float, criterion: Criterion
) -> dict[str, Any]:
    """Everything except the requests. `attainment` is the share of requests that must meet the targets."""
    shares = result.attainment(targets)
    goodput = result.goodput_per_s(targets)
    return {
        "num_requests": len(result.start_s),
        "outcomes": {name: int((result.outcome == index).sum()) for index, name in enumerate(OUTCOMES)},
        "duration_s": result.duration_s,
        "ttft_s": quantiles(result.ttft_s),
        "tpot_s": quantiles(result.tpot_s),
        "longest_gap_s": quantiles(result.longest_gap_s),
        "tail_gap_s": quantiles(result.tail_gap_s),
        "targets": asdict(targets),
        "criterion": criterion,
        "attainment": shares.value(criterion),
        "attainment_ttft": shares.ttft,
        "attainment_tpot": shares.tpot,
        "attainment_tbt": shares.tbt,
        "is_met": shares.value(criterion) >= attainment,
        "goodput_per_s": goodput,
        "goodput_per_s_per_gpu": goodput / spec.num_devices,
        "num_gpus": spec.num_devices,
        "price_per_hour": spec.price_per_hour,
        "cached_tokens": int(result.cached_tokens.sum()),
        "handover_bytes": result.handover_bytes,
        "workers": [
            {
                "name": name,
                "busy": float(busy_s / result.duration_s) if result.duration_s else 0.0,
                "num_steps": int(num_steps),
                "num_preempted": int(num_preempted),
                "peak_kv": float(peak_kv),
            }
            for name, busy_s, num_steps, num_preempted, peak_kv in zip(*_columns(result), strict=True)
        ],
        "latency": [
            {"source": group.latency.source, "fit_error": group.latency.error._asdict()} for group in spec.groups
        ],
    }


def _columns(result: SimResult) -> tuple[Any, ...]:
    workers = result.workers
    return workers.names, workers.busy_s, workers.num_steps, workers.num_preempted, workers.peak_kv


def request_rows(workload: Workload, result: SimResult) -> list[dict[str, Any]]:
    """One row per request, in the order of the workload's file, with times from the first arrival on; null for a
    missing time.
    """
    asked = {
        "start_time": workload.start_s,
        "prompt_len": workload.prompt_tokens,
        "output_len": workload.output_tokens,
    }
    names = "ttft_s", "tpot_s", "longest_gap_s", "tail_gap_s", "end_s", "wait_s", "cached_tokens"
    columns = asked | {name: getattr(result, name) for name in names}
    order = slice(None) if workload.file_rows is None else np.argsort(workload.file_rows)
    rows = zip(*(column[order].tolist() for column in columns.values()), result.outcome[order].tolist(), strict=True)
    return [
        {**{name: _number(value) for name, value in zip(columns, row, strict=False)}, "outcome": OUTCOMES[row[-1]]}
        for row in rows
    ]


def _number(value: float) -> float | None:
    return None if isinstance(value, float) and math.isnan(value) else value
