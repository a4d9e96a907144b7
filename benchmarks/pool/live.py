"""A trace, live, against simulated workers that share a pool of stores: what each placement makes of it.

Everything is real but the computing and the size of KV: gateway, HTTP, gRPC, stores, block index, restores. Runs of the
placements take turns, so that what else the machine does meets all of them; medians and ranges of all rounds come last.
A run says something of the placement only where nothing failed, requests were sent in time, and processes hardly waited
for a core.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from benchmarks.live_system import running_system
from halfmoon.policy.placement.ranking import PlacementMode
from halfmoon.replay.cluster import discover_gateway
from halfmoon.replay.outcome import ReplayTargets, Summary, summarized
from halfmoon.replay.player import played
from halfmoon.sim.latency_sources.worker_profile import DEFAULT_PROFILE
from halfmoon.sim.workloads.traces import read_workload
from halfmoon.sim.workloads.workload import Workload

MODES: tuple[PlacementMode, ...] = ("kvcache-centric", "cache-aware", "least-loaded", "random")
_TARGETS = ReplayTargets(ttft_s=30.0, tbt_s=0.1)
_BLOCK_TOKENS = 512  # as in Mooncake's traces
_BLOCK_BYTES = 4 * _BLOCK_TOKENS  # in the protocol
_FILE_BYTES = 3072  # that a store's disk counts for a block; a disk that holds nothing costs stores much more time
_JUDGED = ("services.gateway", "services.simulation")


@dataclass(frozen=True, slots=True)
class Cluster:
    """The workers and stores of one run."""

    num_prefill: int
    num_decode: int
    num_stores: int
    speed: float
    link_bytes_per_s: float  # of each worker, each way
    store_blocks: int  # of each store
    settings: Sequence[str] = ()  # further options of `halfmoon up`

    def arguments(self, mode: str, directory: Path) -> list[str]:
        """Options of `halfmoon up`; writes the workers' profile into the directory."""
        profile = directory / "profile.json"
        profile.write_text(json.dumps({"like": DEFAULT_PROFILE, "link_bytes_per_s": self.link_bytes_per_s}))
        named = {
            "--engine": "sim",
            "--stores": self.num_stores,
            "--prefill": self.num_prefill,
            "--decode": self.num_decode,
            "--sim-time-scale": self.speed,
            "--sim-profile": profile,
            "--dram-bytes": self.store_blocks * _BLOCK_BYTES,
            "--disk-bytes": self.store_blocks * _FILE_BYTES,
            "--placement": mode,
            "--block-tokens": _BLOCK_TOKENS,
            "--admission": "off",
        }
        return [*(str(part) for pair in named.items() for part in pair), *self.settings]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this measurement, and what runs it."""
    parser.add_argument("trace", type=Path)
    parser.add_argument("--modes", nargs="+", default=list(MODES))
    parser.add_argument("--requests", type=int, default=1400)
    parser.add_argument("--load", type=float, default=1.5, help="multiplies the trace's rate")
    parser.add_argument("--speed", type=float, default=2.5)
    parser.add_argument("--link-gb-s", type=float, default=25.0, help="gigabytes a second of each worker, each way")
    parser.add_argument("--store-blocks", type=int, default=1000, help="of each store, in memory and on disk")
    parser.add_argument("--prefill", type=int, default=8)
    parser.add_argument("--decode", type=int, default=8)
    parser.add_argument("--stores", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each mode, in turn")
    parser.add_argument("--set", action="append", default=[], help="as for `halfmoon up`")
    parser.set_defaults(run=_from_arguments)


async def _from_arguments(options: argparse.Namespace) -> None:
    workload = read_workload(options.trace).scaled(options.load).first(options.requests)
    settings = [part for one in options.set for part in ("--set", one)]
    numbers = options.prefill, options.decode, options.stores, options.speed
    cluster = Cluster(*numbers, options.link_gb_s * 1e9, options.store_blocks, settings)
    await show(workload, cluster, options.modes, options.rounds)


async def show(workload: Workload, cluster: Cluster, modes: Sequence[str], num_rounds: int) -> None:
    """Prints one line for each run, what was predicted of it, and at last one line for each mode."""
    print(f"{len(workload)} requests, {cluster}")
    columns = ("round", "TTFT mean", "p50", "p90", "p99", "hit", "failed", "sent late", "core wait")
    print(f"{'placement':16}" + "".join(f"{column:>10}" for column in columns) + "  prefixes from, parts in s")
    runs: dict[str, list[Summary]] = {mode: [] for mode in modes}
    for number in range(num_rounds):
        for mode in modes:
            found, waited, placements = await _run(workload, cluster, mode)
            runs[mode].append(found)
            ttft = found.ttft_s
            figures = [f"{value:.2f}" for value in (ttft.mean, ttft.p50, ttft.p90, ttft.p99)]
            figures += [f"{found.cached_share:.1%}", str(found.num_failed), f"{found.sent_late_p99_s:.2f}"]
            line = f"{mode:16}{number:>10}" + "".join(f"{figure:>10}" for figure in (*figures, f"{waited:.0%}"))
            print(f"{line}  {_parts(placements, cluster.speed)}", flush=True)
    print(f"{'medians':16}{'TTFT mean':>10}{'range':>14}{'hit':>8}")
    for mode, summaries in runs.items():
        means = sorted(one.ttft_s.mean for one in summaries)
        hit = statistics.median(one.cached_share for one in summaries)
        print(f"{mode:16}{statistics.median(means):>10.2f}{means[0]:>8.2f}-{means[-1]:.2f}{hit:>8.1%}")


async def _run(workload: Workload, cluster: Cluster, mode: str) -> tuple[Summary, float, list[dict[str, Any]]]:
    """What came of it, the share of time that its busiest process waited for a core, and the latest placements."""
    with tempfile.TemporaryDirectory() as directory:
        num_workers = cluster.num_prefill + cluster.num_decode
        async with running_system(cluster.arguments(mode, Path(directory)), Path(directory), num_workers) as url:
            gateway = await discover_gateway(url, cluster.speed)
            before, began_s = _waited_s(), time.monotonic()
            outcomes = await played(workload, gateway, lambda: None)
            took_s = time.monotonic() - began_s
            waited = max(waited_s - before.get(pid, 0.0) for pid, waited_s in _waited_s().items()) / took_s
            recent = f"{url}/halfmoon/v1/placements?limit=500"
            async with aiohttp.ClientSession() as session, session.get(recent) as got:
                placements = await got.json()
    return summarized(outcomes, _TARGETS, workload.duration_s), waited, placements


def _waited_s() -> dict[int, float]:
    """Seconds that the gateway and the workers' process were ready to run and did not, by process id."""
    found: dict[int, float] = {}
    for process in psutil.Process().children(recursive=True):
        try:
            if any(name in process.cmdline() for name in _JUDGED):
                found[process.pid] = int(Path(f"/proc/{process.pid}/schedstat").read_text().split()[1]) / 1e9
        except (psutil.NoSuchProcess, OSError):
            continue  # it has just ended
    return found


def _parts(placements: list[dict[str, Any]], speed: float) -> str:
    """Where prefixes came from, and predicted and measured parts of prompts that were to load, in the trace's seconds.

    A measured load begins when holders are asked, and hides in the queue as far as that lasts.
    """
    rows = [row for row in placements if row["measured"] and row["measured"]["prefill_s"] is not None]
    loading = [row for row in rows if row["predicted"]["transfer_s"]]
    if not loading:
        return f"none of {len(rows)} loads"
    chosen = [next(c for c in row["candidates"] if c["worker_id"] == row["prefill_worker"]) for row in loading]
    predicted = {
        "queue": [candidate["queue_s"] for candidate in chosen],
        "prefill": [candidate["restore_s"] + candidate["compute_s"] for candidate in chosen],
        "load": [candidate["transfer_s"] for candidate in chosen],
    }
    measured = {"queue": "queue_s", "prefill": "prefill_s", "load": "transfer_s"}
    shown = (
        f"{part} {speed * statistics.mean(seconds):.2f}/"
        f"{speed * statistics.mean(row['measured'][measured[part]] or 0.0 for row in loading):.2f}"
        for part, seconds in predicted.items()
    )
    return f"{len(loading)} of {len(rows)} load: {', '.join(shown)} (predicted/measured)"
