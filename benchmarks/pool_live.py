"""A trace, live, against simulated workers that share a pool of stores: what each placement makes of it.

Everything is real but the computing and the size of KV: gateway, HTTP, gRPC, stores, block index, restores.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.live_system import running_system
from halfmoon.policy.placement.ranking import PlacementMode
from halfmoon.replay.cluster import found_gateway
from halfmoon.replay.outcome import ReplayTargets, Summary, summarized
from halfmoon.replay.player import played
from halfmoon.sim.workloads.traces import read_workload
from halfmoon.sim.workloads.workload import Workload

MODES: tuple[PlacementMode, ...] = ("kvcache-centric", "cache-aware", "least-loaded", "random")
_TARGETS = ReplayTargets(ttft_s=30.0, tbt_s=0.1)
_BLOCK_TOKENS = 512  # as in Mooncake's traces


@dataclass(frozen=True, slots=True)
class Cluster:
    """The workers and stores of one run."""

    num_prefill: int
    num_decode: int
    num_stores: int
    speed: float
    settings: Sequence[str] = ()  # further options of `halfmoon up`

    def arguments(self, mode: str) -> list[str]:
        """Options of `halfmoon up`."""
        named = {
            "--engine": "sim",
            "--stores": self.num_stores,
            "--prefill": self.num_prefill,
            "--decode": self.num_decode,
            "--sim-time-scale": self.speed,
            "--placement": mode,
            "--block-tokens": _BLOCK_TOKENS,
            "--admission": "off",
        }
        return [*(str(part) for pair in named.items() for part in pair), *self.settings]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this measurement, and what runs it."""
    parser.add_argument("trace", type=Path)
    parser.add_argument("--modes", nargs="+", default=list(MODES))
    parser.add_argument("--requests", type=int, default=900)
    parser.add_argument("--load", type=float, default=1.0, help="multiplies the trace's rate")
    parser.add_argument("--speed", type=float, default=3.0)
    parser.add_argument("--prefill", type=int, default=8)
    parser.add_argument("--decode", type=int, default=8)
    parser.add_argument("--stores", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2, help="runs of each mode, in turn")
    parser.add_argument("--set", action="append", default=[], help="as for `halfmoon up`")
    parser.set_defaults(run=_from_arguments)


async def _from_arguments(options: argparse.Namespace) -> None:
    workload = read_workload(options.trace).scaled(options.load).first(options.requests)
    settings = [part for one in options.set for part in ("--set", one)]
    cluster = Cluster(options.prefill, options.decode, options.stores, options.speed, settings)
    await show(workload, cluster, options.modes, options.rounds)


async def show(workload: Workload, cluster: Cluster, modes: Sequence[str], num_rounds: int) -> None:
    """Prints one line for each run."""
    print(f"{len(workload)} requests, {cluster}")
    columns = ("round", "TTFT mean", "p50", "p90", "p99", "hit", "in time", "failed", "sent late", "load")
    print(f"{'placement':16}" + "".join(f"{column:>10}" for column in columns))
    for number in range(num_rounds):
        for mode in modes:
            found = await _run(workload, cluster, mode)
            ttft = found.ttft_s
            figures = [f"{value:.2f}" for value in (ttft.mean, ttft.p50, ttft.p90, ttft.p99)]
            figures += [f"{found.cached_share:.1%}", f"{found.attainment:.1%}", str(found.num_failed)]
            figures += [f"{found.sent_late_p99_s:.2f}", f"{os.getloadavg()[0]:.1f}"]
            print(f"{mode:16}{number:>10}" + "".join(f"{figure:>10}" for figure in figures), flush=True)


async def _run(workload: Workload, cluster: Cluster, mode: str) -> Summary:
    with tempfile.TemporaryDirectory() as directory:
        num_workers = cluster.num_prefill + cluster.num_decode
        async with running_system(cluster.arguments(mode), Path(directory), num_workers) as url:
            gateway = await found_gateway(url, cluster.speed)
            outcomes = await played(workload, gateway, lambda: None)
    return summarized(outcomes, _TARGETS, workload.duration_s)
