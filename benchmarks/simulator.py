"""Requests simulated per second, alone and compared with DistServe's simulator on the same work.

    python -m benchmarks.simulator [--peer CHECKOUT] [--trace conversation_trace.jsonl] [--million]

`--peer` is a checkout of github.com/LLMServe/DistServe (with simpy and tqdm installed). Its `simdistserve` gets the
same 500 requests, the same latency coefficients (OPT-13B, one prefill and one decode worker of one A100), and whole
prompts as batches. Both are measured alternately in processor time. Printed are medians, their ratio, and TTFT and TPOT
of both: theirs has no transfers and divides by one token more for TPOT.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from halfmoon.sim.cluster.cluster_spec import BatchLimits, ClusterSpec, Network, WorkerGroup
from halfmoon.sim.latency_sources.distserve import DistServeCoefficients
from halfmoon.sim.latency_sources.latency_source import latency_source
from halfmoon.sim.result import SimResult
from halfmoon.sim.simulation import simulate
from halfmoon.sim.workloads.drawn_workload import synthetic_workload
from halfmoon.sim.workloads.lengths import named_lengths
from halfmoon.sim.workloads.traces import read_workload
from halfmoon.sim.workloads.workload import Workload

NUM_REQUESTS, REPEATS = 500, 5
WORK = (("in=512,out=64", 1.0), ("in=512,out=64", 4.0), ("chat", 1.0), ("chat", 3.0))
INSTANT = Network(bytes_per_s=1e15, node_bytes_per_s=1e15, latency_s=0.0, handover="pull")


def pair_of_opt() -> ClusterSpec:
    """One prefill and one decode worker with whole prompts, as in simdistserve."""
    model = DistServeCoefficients("opt-13b").model(None, 1, 1)
    limits = BatchLimits(model.kv_tokens, model.kv_tokens, 1 << 24)
    return ClusterSpec((WorkerGroup("prefill", 1, model, limits), WorkerGroup("decode", 1, model, limits)), INSTANT)


def processor_s(run: Callable[[], Any]) -> tuple[float, Any]:
    """Processor seconds of `run`, and its result."""
    began_s = time.process_time()
    result = run()
    return time.process_time() - began_s, result


def peer_runner(checkout: Path, workload: Workload, rate: float) -> Callable[[], Any]:
    """Prepares a run of simdistserve that returns its table of latencies."""
    sys.path.insert(0, str(checkout))
    from simdistserve.benchmarks.simulate_dist import main, parse_args

    rows = [
        {"start_time": float(at_s), "prompt_len": int(prompt), "output_len": int(output)}
        for at_s, prompt, output in zip(workload.start_s, workload.prompt_tokens, workload.output_tokens, strict=True)
    ]
    with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as file:
        json.dump(rows, file)
    options = ["--arrival", "custom", "--N", str(len(workload)), "--rate", str(rate), "--workload", file.name]

    def run() -> Any:
        outputs: dict[str, Any] = {}
        main(parse_args([*options, "--model", "facebook/opt-13b"]), outputs)
        return outputs["per_request_latency_df"]

    return run


def compare_with_peer(checkout: Path) -> None:
    """Prints the table of ratios."""
    warnings.simplefilter("ignore")
    speeds = f"{'peer req/s':>11} {'ours req/s':>11} {'ratio':>6}"
    print(f"{'work':16} {'rate':>5} {speeds}   TTFT p50/p90, TPOT p50 (ms): theirs | ours")
    for name, rate in WORK:
        workload = synthetic_workload(named_lengths(name), NUM_REQUESTS, rate, seed=1, most_tokens=2048)
        peer, spec = peer_runner(checkout, workload, rate), pair_of_opt()
        theirs_s, ours_s = [], []
        for _ in range(REPEATS):
            seconds, table = processor_s(peer)
            theirs_s.append(seconds)
            seconds, result = processor_s(partial(simulate, spec, workload))
            ours_s.append(seconds)
        their_s, our_s = statistics.median(theirs_s), statistics.median(ours_s)
        first = table.first_token_latency
        theirs = f"{first.quantile(0.5):.1f}/{first.quantile(0.9):.1f}, {table.tpot.quantile(0.5):.1f}"
        speeds = f"{NUM_REQUESTS / their_s:11.0f} {NUM_REQUESTS / our_s:11.0f} {their_s / our_s:6.1f}"
        print(f"{name:16} {rate:5.1f} {speeds}   {theirs} | {_times(result)}")


def _times(result: SimResult) -> str:
    p50, p90 = 1000 * np.percentile(result.ttft_s, [50, 90])
    return f"{p50:.1f}/{p90:.1f}, {1000 * np.nanmedian(result.tpot_s):.1f}"


def report(name: str, spec: ClusterSpec, workload: Workload) -> None:
    """Prints one line about our own speed."""
    began_s = time.perf_counter()
    seconds, result = processor_s(lambda: simulate(spec, workload))
    wall_s = time.perf_counter() - began_s
    done = int(result.is_completed.sum())
    print(
        f"{name:42} {len(workload):>9} requests, {done} completed: {seconds:.1f} s of processor, {wall_s:.1f} s, "
        f"{len(workload) / seconds:.0f} requests/s"
    )


def main() -> None:
    """Prints the requested tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", type=Path)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--million", action="store_true", help="a million requests over a thousand workers")
    args = parser.parse_args()
    if args.peer:
        compare_with_peer(args.peer)
    report("1 + 1 workers, OPT-13B, chat", pair_of_opt(), synthetic_workload(named_lengths("chat"), 5_000, 3.0, seed=1))
    if args.trace:
        model = latency_source("roofline:llama-2-70b@a100-80g").model(None, 8, 1)
        groups = WorkerGroup("prefill", 16, model), WorkerGroup("decode", 16, model)
        report(
            "16 + 16 workers, a trace with prefixes",
            ClusterSpec(groups),
            read_workload(args.trace),
        )
    if args.million:
        model = latency_source("roofline:llama-3-8b@h100").model(None, 1, 1)
        groups = WorkerGroup("prefill", 300, model), WorkerGroup("decode", 700, model, BatchLimits(max_running=256))
        workload = synthetic_workload(named_lengths("chat"), 1_000_000, 4_000.0, seed=1)
        report("300 + 700 workers, Llama-3-8B, chat", ClusterSpec(groups), workload)


if __name__ == "__main__":
    main()
