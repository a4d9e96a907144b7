"""The simulator against what others measured; the tables of docs/planner.md.

    python -m benchmarks.planner distserve
    python -m benchmarks.planner roofline [--splitwise perf_model.csv]
    python -m benchmarks.planner placement --trace conversation_trace.jsonl [--requests N]
    python -m benchmarks.planner capacity  --trace conversation_trace.jsonl [--requests N]
    python -m benchmarks.planner ratio     --trace conversation_trace.jsonl [--requests N]

Llama-2-70B on 8 x A100-80G a worker by the roofline, where Mooncake's paper had a model of that shape on 8 x A800.
Rates are multiples of the trace's own.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np

from halfmoon.policy.placement import PlacementMode
from halfmoon.sim.cluster import BatchLimits, ClusterSpec, Network, Targets, WorkerGroup
from halfmoon.sim.distserve import DistServeCoefficients
from halfmoon.sim.latency import LatencyModel, median_error
from halfmoon.sim.latency_sources import latency_source
from halfmoon.sim.lengths import named_lengths
from halfmoon.sim.model_shape import model_shape
from halfmoon.sim.result import quantiles
from halfmoon.sim.roofline import Roofline
from halfmoon.sim.simulation import simulate
from halfmoon.sim.splitwise import read_splitwise
from halfmoon.sim.synthetic import synthetic_workload
from halfmoon.sim.traces import read_workload
from halfmoon.sim.workload import Workload

MODEL = "roofline:llama-2-70b@a100-80g"
NETWORK = Network(bytes_per_s=100e9, handover="pull", can_fetch=True)
TTFT_S = 30.0  # Mooncake's target
ATTAINMENT = 0.9
MAX_RUNNING = 256


def big_worker() -> LatencyModel:
    """Eight A100."""
    return latency_source(MODEL).model(None, 8, 1)


def split(num_prefill: int, num_decode: int) -> ClusterSpec:
    """A disaggregated cluster."""
    model, limits = big_worker(), BatchLimits(max_running=MAX_RUNNING)
    groups = WorkerGroup("prefill", num_prefill, model, limits), WorkerGroup("decode", num_decode, model, limits)
    return ClusterSpec(groups, NETWORK)


def colocated(num: int, batching: str, max_batch_tokens: int = 2048) -> ClusterSpec:
    """As many workers that do both."""
    limits = BatchLimits(max_batch_tokens, 512, MAX_RUNNING, batching)
    return ClusterSpec((WorkerGroup("both", num, big_worker(), limits),), NETWORK)


def capacity(spec: ClusterSpec, workload: Workload, targets: Targets, most: float = 64.0) -> float:
    """The highest multiple of the trace's rate at which enough requests meet both targets, within 2 %."""

    def holds(factor: float) -> bool:
        return simulate(spec, workload.scaled(factor)).attainment(targets).joint >= ATTAINMENT

    low, high = 0.0, 1.0
    while high <= most and holds(high):
        low, high = high, 2 * high
    if low == 0.0:
        low = 1 / 16
        if not holds(low):
            return 0.0
    while high / low > 1.02:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def show_distserve(args: argparse.Namespace) -> None:
    """p50 TTFT of constant prompts at a low rate; 75.2 and 78.2 ms are known."""
    for pp, known_ms in ((1, 75.2), (2, 78.2)):
        model = DistServeCoefficients("opt-13b").model(None, 1, pp)
        limits = BatchLimits(model.kv_tokens, model.kv_tokens, 1 << 24)
        groups = WorkerGroup("prefill", 1, model, limits), WorkerGroup("decode", 1, model, limits)
        workload = synthetic_workload(named_lengths("in=512,out=64"), 500, 0.3, seed=1)
        found = simulate(ClusterSpec(groups, replace(NETWORK, can_fetch=False)), workload)
        p50_ms = 1000 * np.median(found.ttft_s)
        print(f"OPT-13B TP1 x PP{pp}, 512 in, 64 out: p50 TTFT {p50_ms:.2f} ms, known {known_ms} ms")


def show_roofline(args: argparse.Namespace) -> None:
    """Median relative error of the roofline against measured tables; none of it is fitted to one of them."""
    prompts, batches = (128, 256, 512, 1024, 2048), (1, 4, 16, 64)
    measured: list[tuple[str, str, str, int, LatencyModel]] = []
    for name, tps in (("opt-13b", (1, 2, 4)), ("opt-66b", (2, 4, 8))):
        measured += [("DistServe", name, "a100-80g", tp, DistServeCoefficients(name).model(None, tp, 1)) for tp in tps]
    if args.splitwise:
        table = read_splitwise(args.splitwise, "llama-2-70b")
        for gpu in ("a100-80g", "h100"):
            measured += [("Splitwise", "llama-2-70b", gpu, tp, table.model(gpu, tp, 1)) for tp in (4, 8)]
    print("| measured by | model | GPU | TP | their fit error prefill / step | roofline's error prefill / step |")
    print("|---|---|---|---|---|---|")
    for who, name, gpu, tp, theirs in measured:
        ours = Roofline(model_shape(name)).model(gpu, tp, 1)
        prefill = median_error([ours.prefill_s(n) for n in prompts], [theirs.prefill_s(n) for n in prompts])
        step = median_error(
            [ours.stage_s(0, 0, b, 600 * b) for b in batches], [theirs.stage_s(0, 0, b, 600 * b) for b in batches]
        )
        fits = " / ".join("not published" if one is None else f"{one:.1%}" for one in theirs.error)
        print(f"| {who} | {name} | {gpu} | {tp} | {fits} | {prefill:.0%} / {step:.0%} |")


def show_placement(args: argparse.Namespace) -> None:
    """Mean TTFT of the four placements."""
    workload = _trace(args)
    print("| placement | mean TTFT s | p90 | p99 | cached tokens |")
    print("|---|---|---|---|---|")
    for mode in get_args(PlacementMode):
        found = simulate(replace(split(8, 8), placement=mode), workload)
        ttft = quantiles(found.ttft_s)
        hit = found.cached_tokens.sum() / workload.prompt_tokens.sum()
        print(f"| {mode} | {ttft['mean']:.2f} | {ttft['p90']:.2f} | {ttft['p99']:.2f} | {hit:.1%} |", flush=True)


def show_capacity(args: argparse.Namespace) -> None:
    """Disaggregated against colocated, of equal size, at three TBT targets."""
    workload = _trace(args)
    print(
        "| TBT target ms | 10P + 10D | 20 both, prompts first | 20 both, chunked | gain over prompts first, chunked |"
    )
    print("|---|---|---|---|---|")
    for target_ms in (100, 200, 300):
        targets = Targets(TTFT_S, target_ms / 1000)
        found = [
            capacity(spec, workload, targets)
            for spec in (split(10, 10), colocated(20, "prefill-first", 1 << 17), colocated(20, "chunked"))
        ]
        gains = [f"{found[0] / one - 1:+.0%}" if one else "–" for one in found[1:]]
        cells = " | ".join(f"{one:.2f}" for one in found)
        print(f"| {target_ms} | {cells} | {', '.join(gains)} |", flush=True)


def show_ratio(args: argparse.Namespace) -> None:
    """Capacity by how sixteen workers are divided."""
    workload = _trace(args)
    print("| P : D | capacity at 30 s, 100 ms |")
    print("|---|---|")
    for num_prefill in (4, 6, 8, 10, 12, 14):
        found = capacity(split(num_prefill, 16 - num_prefill), workload, Targets(TTFT_S, 0.1))
        print(f"| {num_prefill} : {16 - num_prefill} | {found:.2f} |", flush=True)


def _trace(args: argparse.Namespace) -> Workload:
    if args.trace is None:
        raise SystemExit("this table needs --trace")
    workload = read_workload(args.trace)
    return workload if args.requests is None else workload.first(args.requests)


SHOWS: dict[str, Callable[[argparse.Namespace], None]] = {
    "distserve": show_distserve,
    "roofline": show_roofline,
    "placement": show_placement,
    "capacity": show_capacity,
    "ratio": show_ratio,
}


def main() -> None:
    """Prints one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", choices=SHOWS)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--splitwise", type=Path)
    parser.add_argument("--requests", type=int, help="of the trace, the first")
    args = parser.parse_args()
    SHOWS[args.table](args)


if __name__ == "__main__":
    main()
