"""The simulator compared with published measurements; the tables of docs/evaluation/.

    python -m benchmarks.planner distserve
    python -m benchmarks.planner roofline [--splitwise perf_model.csv]
    python -m benchmarks.planner placement --trace conversation_trace.jsonl [--requests N] [--seeds 3]
    python -m benchmarks.planner capacity  --trace conversation_trace.jsonl [--requests N]
    python -m benchmarks.planner ratio     --trace conversation_trace.jsonl [--requests N]
    python -m benchmarks.planner effective --trace conversation_trace.jsonl [--requests N]
    python -m benchmarks.planner bursts    --trace AzureLLMInferenceTrace_code.csv [--requests N] [--latency \
                                           aiconfigurator-vllm:llama-2-70b]
    python -m benchmarks.planner kernels | steady

Llama-2-70B on 8 x A100-80G per worker (Mooncake's paper: a model of that shape on 8 x A800), with the roofline or
with Splitwise's measurements (`--latency perf_model.csv:llama-2-70b`). Rates are multiples of the trace's own.
`kernels` needs `pip install aiconfigurator-core`; `steady`, and `bursts` by AIConfigurator's times, ask its planner,
which is in `pip install aiconfigurator`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import get_args

import numpy as np

from benchmarks.planner.bursts import show_bursts
from benchmarks.planner.effective import show_effective
from benchmarks.planner.kernels import show_kernels
from benchmarks.planner.peer import recommended
from benchmarks.planner.steady import show_steady
from halfmoon.plan.node_pools import read_fleet
from halfmoon.plan.problem import PlanningProblem, default_rules
from halfmoon.plan.search.goodput import Goal
from halfmoon.policy.placement.ranking import PlacementMode
from halfmoon.sim.cluster.cluster_spec import (
    Batching,
    BatchLimits,
    ClusterSpec,
    Network,
    SloTargets,
    Stores,
    TbtOf,
    WorkerGroup,
)
from halfmoon.sim.latency_sources.aiconfigurator import KernelTimes
from halfmoon.sim.latency_sources.distserve import DistServeCoefficients
from halfmoon.sim.latency_sources.latency_model import LatencyModel, median_error
from halfmoon.sim.latency_sources.latency_source import latency_source
from halfmoon.sim.latency_sources.model_catalogue import MODELS, model_shape
from halfmoon.sim.latency_sources.roofline import OF_2023, Efficiency, Roofline
from halfmoon.sim.latency_sources.splitwise import read_splitwise
from halfmoon.sim.result import SimResult, quantiles
from halfmoon.sim.simulation import simulate
from halfmoon.sim.workloads.drawn_workload import synthetic_workload
from halfmoon.sim.workloads.lengths import named_lengths
from halfmoon.sim.workloads.traces import read_workload
from halfmoon.sim.workloads.workload import Workload

MODEL = "roofline:llama-2-70b@a100-80g"
NETWORK = Network(bytes_per_s=100e9)
KV_TOKENS = 325_000  # of a worker, where stores are compared
STORE_TOKENS = 2_500 * 512
TTFT_S = 30.0  # Mooncake's target
ATTAINMENT = 0.9
MAX_RUNNING = 256


def big_worker(latency: str) -> LatencyModel:
    """A worker with eight A100."""
    return latency_source(latency).model("a100-80g", 8, 1)


def split(model: LatencyModel, num_prefill: int, num_decode: int) -> ClusterSpec:
    """A disaggregated cluster."""
    limits = BatchLimits(max_running=MAX_RUNNING)
    groups = WorkerGroup("prefill", num_prefill, model, limits), WorkerGroup("decode", num_decode, model, limits)
    return ClusterSpec(groups, NETWORK)


def colocated(model: LatencyModel, num: int, batching: Batching, max_batch_tokens: int = 2048) -> ClusterSpec:
    """A cluster of colocated workers."""
    limits = BatchLimits(max_batch_tokens, 512, MAX_RUNNING, batching)
    return ClusterSpec((WorkerGroup("both", num, model, limits),), NETWORK)


def capacities(spec: ClusterSpec, workload: Workload, wanted: Sequence[SloTargets]) -> list[float]:
    """For each of the targets, the highest multiple of the trace's rate at which enough requests meet them."""

    @cache
    def run(factor: float) -> SimResult:
        return simulate(spec, workload.scaled(factor))

    def holds(targets: SloTargets, factor: float) -> bool:
        return run(factor).attainment(targets).joint >= ATTAINMENT

    return [_capacity(partial(holds, targets)) for targets in wanted]


def _capacity(holds: Callable[[float], bool], least: float = 1 / 16, most: float = 64.0) -> float:
    """The highest factor that holds, within 2 %; 0 if even `least` does not hold."""
    low, high = 0.0, 1.0
    while high <= most and holds(high):
        low, high = high, 2 * high
    if low == 0.0:
        low = least
        if not holds(low):
            return 0.0
    while high / low > 1.02:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def show_distserve(args: argparse.Namespace) -> None:
    """Prints the p50 TTFT of constant prompts at a low rate; 75.2 and 78.2 ms are published."""
    for pp, known_ms in ((1, 75.2), (2, 78.2)):
        model = DistServeCoefficients("opt-13b").model(None, 1, pp)
        limits = BatchLimits(model.kv_tokens, model.kv_tokens, 1 << 24)
        groups = WorkerGroup("prefill", 1, model, limits), WorkerGroup("decode", 1, model, limits)
        workload = synthetic_workload(named_lengths("in=512,out=64"), 500, 0.3, seed=1)
        result = simulate(ClusterSpec(groups, replace(NETWORK, handover="pull")), workload)  # as DistServe does
        p50_ms = 1000 * np.median(result.ttft_s)
        print(f"OPT-13B TP1 x PP{pp}, 512 in, 64 out: p50 TTFT {p50_ms:.2f} ms, published {known_ms} ms")


def show_roofline(args: argparse.Namespace) -> None:
    """Prints the roofline's median relative error against measured tables, none of which it was fitted to."""
    prompts, batches = (128, 256, 512, 1024, 2048), (1, 4, 16, 64)
    measured: list[tuple[str, str, str, int, LatencyModel]] = []
    for name, tps in (("opt-13b", (1, 2, 4)), ("opt-66b", (2, 4, 8))):
        measured += [("DistServe", name, "a100-80g", tp, DistServeCoefficients(name).model(None, tp, 1)) for tp in tps]
    if args.splitwise:
        table = read_splitwise(args.splitwise, "llama-2-70b")
        for gpu in ("a100-80g", "h100"):
            measured += [("Splitwise", "llama-2-70b", gpu, tp, table.model(gpu, tp, 1)) for tp in (4, 8)]
    print("| measured by | model | GPU | TP | their fit error | roofline's error prefill / step | roofline-2023's |")
    print("|---|---|---|---|---|---|---|")
    for who, name, gpu, tp, theirs in measured:
        cells = []
        for efficiency in (Efficiency(), OF_2023):
            ours = Roofline(model_shape(name), efficiency).model(gpu, tp, 1)
            prefill = median_error([ours.prefill_s(n) for n in prompts], [theirs.prefill_s(n) for n in prompts])
            step = median_error(
                [ours.stage_s(0, 0, b, 600 * b) for b in batches], [theirs.stage_s(0, 0, b, 600 * b) for b in batches]
            )
            cells.append(f"{prefill:.0%} / {step:.0%}")
        fits = " / ".join("not published" if error is None else f"{error:.1%}" for error in theirs.error)
        print(f"| {who} | {name} | {gpu} | {tp} | {fits} | {' | '.join(cells)} |")


def show_placement(args: argparse.Namespace) -> None:
    """Prints the TTFT of the four placements without stores, with four, and with four that have a disk."""
    workload, (prefill, decode) = _trace(args), split(big_worker(args.latency), 8, 8).groups
    groups = replace(prefill, kv_tokens=KV_TOKENS), replace(decode, kv_tokens=KV_TOKENS)
    memory = Stores(4, STORE_TOKENS)
    disk = Stores(4, STORE_TOKENS // 4, STORE_TOKENS)
    rows = [
        (mode, name, ClusterSpec(groups, placement=mode, stores=stores))
        for name, stores in (("none", Stores()), ("four", memory), ("four, a quarter in memory", disk))
        for mode in get_args(PlacementMode)
    ]
    print(f"| placement | stores | mean TTFT s of {args.seeds} seeds | p50 | p90 | p99 | cached tokens |")
    print("|---|---|---|---|---|---|---|")
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        runs = [[pool.submit(simulate, spec, workload, seed) for seed in range(args.seeds)] for *_, spec in rows]
        for (mode, name, _), futures in zip(rows, runs, strict=True):
            results = [future.result() for future in futures]
            ttft = {
                key: [quantiles(one.ttft_s)[key] or 0.0 for one in results] for key in ("mean", "p50", "p90", "p99")
            }
            p50, p90, p99 = (f"{np.mean(ttft[key]):.2f}" for key in ("p50", "p90", "p99"))
            mean = f"{np.mean(ttft['mean']):.2f} ({min(ttft['mean']):.2f}-{max(ttft['mean']):.2f})"
            hit = np.mean([one.cached_tokens.sum() for one in results]) / workload.prompt_tokens.sum()
            print(f"| {mode} | {name} | {mean} | {p50} | {p90} | {p99} | {hit:.1%} |", flush=True)


def show_capacity(args: argparse.Namespace) -> None:
    """Compares disaggregated and colocated clusters of equal size at three TBT targets, with two definitions of TBT."""
    workload, model = _trace(args), big_worker(args.latency)
    wanted = [SloTargets(TTFT_S, tbt_s=ms / 1000, tbt_of=of) for of in get_args(TbtOf) for ms in (100, 200, 300)]
    specs = split(model, 10, 10), colocated(model, 20, "prefill-first", 1 << 17), colocated(model, 20, "chunked")
    columns = [capacities(spec, workload, wanted) for spec in specs]
    print("| TBT of | target ms | 10P + 10D | 20 both, prompts first | chunked | gain |")
    print("|---|---|---|---|---|---|")
    for targets, factors in zip(wanted, zip(*columns, strict=True), strict=True):
        gains = [f"{factors[0] / factor - 1:+.0%}" if factor else "–" for factor in factors[1:]]
        cells = " | ".join(f"{factor:.2f}" for factor in factors)
        print(f"| {targets.tbt_of} | {1000 * (targets.tbt_s or 0):.0f} | {cells} | {', '.join(gains)} |", flush=True)


def show_ratio(args: argparse.Namespace) -> None:
    """Prints capacity by the division of sixteen workers."""
    workload, model = _trace(args), big_worker(args.latency)
    wanted = [SloTargets(TTFT_S, tbt_s=ms / 1000, tbt_of="longest-tenth") for ms in (100, 200, 300)]
    print("| P : D | capacity at 30 s and 100 ms | 200 ms | 300 ms |")
    print("|---|---|---|---|")
    for num_prefill in (4, 6, 8, 10, 12, 14):
        factors = capacities(split(model, num_prefill, 16 - num_prefill), workload, wanted)
        cells = " | ".join(f"{factor:.2f}" for factor in factors)
        print(f"| {num_prefill} : {16 - num_prefill} | {cells} |", flush=True)


def show_effective_requests(args: argparse.Namespace) -> None:
    """Compares eight workers of each phase with sixteen like vLLM 0.5.1, one option at a time as in the paper."""
    model = big_worker(args.latency)
    engines = {
        "16 both, prompts first": _apart(colocated(model, 16, "prefill-first", 1 << 17), has_cache=False),
        "the same, prefix caches": _apart(colocated(model, 16, "prefill-first", 1 << 17), has_cache=True),
        "16 both, chunks of 512": _apart(colocated(model, 16, "chunked", 512), has_cache=False),
    }
    show_effective({"8P + 8D": split(model, 8, 8), **engines}, _trace(args), TTFT_S)


def _apart(spec: ClusterSpec, *, has_cache: bool) -> ClusterSpec:
    """Engines that know nothing of each other, behind a balancer that does not know their caches."""
    groups = tuple(replace(group, prefix_cache=has_cache) for group in spec.groups)
    return replace(spec, groups=groups, placement="least-loaded")


def show_averages_and_bursts(args: argparse.Namespace) -> None:
    """Plans Llama-2-70B on up to 32 H100."""
    fleet = read_fleet("h100", 4, 8, {})
    sources = {"h100": latency_source("roofline:llama-2-70b" if args.latency == MODEL else args.latency)}
    goal = Goal(SloTargets(ttft_s=1.0, tpot_s=0.1), ATTAINMENT)
    rules = default_rules(fleet, sources, MAX_RUNNING)
    problem = PlanningProblem(sources, fleet, _trace(args), goal, rules, shape=MODELS["llama-2-70b"])
    peers = {"aiconfigurator": recommended} if isinstance(sources["h100"], KernelTimes) else {}
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        show_bursts(problem, pool, peers)


def show_steady_questions(args: argparse.Namespace) -> None:
    """Plans Llama-3.1-8B on up to eight H100 or H200."""
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        show_steady(pool)


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
    "effective": show_effective_requests,
    "bursts": show_averages_and_bursts,
    "kernels": lambda args: show_kernels(),
    "steady": show_steady_questions,
}


def main() -> None:
    """Prints one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", choices=SHOWS)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--latency", default=MODEL, help="of the workers that serve the trace")
    parser.add_argument("--splitwise", type=Path)
    parser.add_argument("--requests", type=int, help="of the trace, the first")
    parser.add_argument("--seeds", type=int, default=3, help="of ties, in the table of placements")
    parser.add_argument("--jobs", type=int, default=2, help="processes of a search")
    args = parser.parse_args()
    SHOWS[args.table](args)


if __name__ == "__main__":
    main()
