"""The simulator, calibrated by `halfmoon profile`, compared with the live system on the same requests.

    python -m benchmarks.planner.live --directory live [--layout 1p1d] [--rate 0.6 --rate 1] [--requests 100]

Starts `halfmoon up` with the demo model in each layout on this host. For each rate it measures a profile
(LAYOUT-RATE.json in `--directory`, reused if present), since the speed of a shared machine drifts by the minute. It
then plays Poisson arrivals of equal requests, whose prompts share nothing, through the HTTP API. Then `halfmoon.sim`
simulates the same arrivals and lengths with that profile and nothing else. Each worker computes with its share of the
cores (OMP_NUM_THREADS, unless set). Attainment is shown for targets that are multiples of an idle system's latencies by
the profile.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.live_system import running_system
from halfmoon.errors import NoCapacity
from halfmoon.profiling.profiler import ProfileOptions, profiled
from halfmoon.profiling.sweep import SweepLimits
from halfmoon.replay.cluster import discover_gateway
from halfmoon.replay.outcome import Outcome
from halfmoon.replay.player import played
from halfmoon.sim.cluster.cluster_spec import ClusterSpec, SloTargets
from halfmoon.sim.cluster.spec_file import read_cluster
from halfmoon.sim.latency_sources.measured_profile import MeasuredProfile, read_profile, write_profile
from halfmoon.sim.simulation import simulate
from halfmoon.sim.workloads.drawn_workload import synthetic_workload
from halfmoon.sim.workloads.lengths import named_lengths
from halfmoon.sim.workloads.workload import Floats, Prefixes, Workload

LAYOUTS = {
    "1p1d": (("--prefill", "1", "--decode", "1"), [("prefill", 1), ("decode", 1)]),
    "2both": (("--both", "2"), [("both", 2)]),
}
MULTIPLES = ((1.5, 1.5), (2.0, 1.5), (3.0, 2.0), (5.0, 3.0))  # multiples of the idle TTFT and TPOT
LIMITS = SweepLimits(longest_prompt=512, largest_batch=8, longest_context=256, repeats=5)
BLOCK_TOKENS = 64
NUM_WARM = 4
_IDLE_S = 600.0  # limit on waiting for idle workers, profiling included


def main() -> None:
    """Prints a table of predicted and measured figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, required=True, help="directory of profiles, state and results")
    parser.add_argument("--layout", action="append", choices=sorted(LAYOUTS))
    parser.add_argument("--rate", action="append", type=float, help="requests a second")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--work", default="in=200,out=32")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--gateway", help="URL of a system running in the one --layout, with OMP_NUM_THREADS as above")
    parser.add_argument("--run", default="", help="suffix of file names, to keep several runs of the same work")
    parser.add_argument("--only-simulate", action="store_true", help="use results of earlier runs in the directory")
    args = parser.parse_args()
    args.directory.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 2) // 2, 1)))
    for layout in args.layout or LAYOUTS:
        rates = args.rate or (0.6, 1.0, 1.4)
        if not args.only_simulate:
            asyncio.run(_measure(args, layout, rates))
        for rate in rates:
            _print_rate(args, layout, rate)


async def _measure(args: argparse.Namespace, layout: str, rates: Sequence[float]) -> None:
    """Measures a profile and a file of outcomes for each rate."""
    async with _system(args, layout) as url:
        gateway = await discover_gateway(url)
        await played(_workload(args, 1.0, NUM_WARM, block=_unseen()), gateway, lambda: None)
        for rate in rates:
            path = _profile_file(args, layout, rate)
            if not path.exists():
                write_profile(path, await _profiled_when_idle(url))
            work = _workload(args, rate, args.requests, block=_unseen())
            outcomes = await played(work, gateway, lambda: None)
            rows = [
                [outcome.ttft_s, outcome.tbt_s, outcome.num_cached_tokens, outcome.sent_late_s]
                for outcome in outcomes
                if _is_good(outcome)
            ]
            _outcomes_file(args, layout, rate).write_text(json.dumps(rows))


async def _profiled_when_idle(url: str) -> MeasuredProfile:
    """Profiles once workers report that they are idle, which takes some time after a request's end."""
    async with asyncio.timeout(_IDLE_S):
        while True:
            with suppress(NoCapacity):
                return await profiled(ProfileOptions(url, limits=LIMITS), lambda what, done, total: None)
            await asyncio.sleep(1)


def _system(args: argparse.Namespace, layout: str) -> AbstractAsyncContextManager[str]:
    if args.gateway:
        return nullcontext(args.gateway)
    return running_system(LAYOUTS[layout][0], args.directory / f"state-{layout}", num_workers=2)


def _unseen() -> int:
    """First of a range of block numbers that no run used before: an earlier store may still hold that run's blocks."""
    return random.SystemRandom().getrandbits(40) << 16


def _is_good(outcome: Outcome) -> bool:
    return outcome.end == "answered"


def _profile_file(args: argparse.Namespace, layout: str, rate: float) -> Path:
    path: Path = args.directory / f"{layout}-{rate:g}{args.run}.json"
    return path


def _outcomes_file(args: argparse.Namespace, layout: str, rate: float) -> Path:
    path: Path = args.directory / f"{layout}-{args.work}-{rate:g}-{args.seed}{args.run}.json"
    return path


def _workload(args: argparse.Namespace, rate: float, num: int, block: int) -> Workload:
    """Workload whose blocks are numbered from `block` on, so that no prompt was seen before."""
    drawn = synthetic_workload(named_lengths(args.work), num, rate, seed=args.seed)
    counts = -(-drawn.prompt_tokens // BLOCK_TOKENS)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    return replace(drawn, prefixes=Prefixes(BLOCK_TOKENS, block + np.arange(offsets[-1]), offsets))


def _cluster(args: argparse.Namespace, layout: str, rate: float) -> ClusterSpec:
    """Cluster file as a user would write it: everything except the layout comes from the profile."""
    workers = [
        {"role": role, "count": count, "workers_per_node": count, "first_node": 0} for role, count in _groups(layout)
    ]
    path = args.directory / f"cluster-{layout}.json"
    path.write_text(json.dumps({"latency": str(_profile_file(args, layout, rate)), "workers": workers}))
    return read_cluster(path)


def _groups(layout: str) -> list[tuple[str, int]]:
    return LAYOUTS[layout][1]


def _print_rate(args: argparse.Namespace, layout: str, rate: float) -> None:
    spec = _cluster(args, layout, rate)
    idle = simulate(spec, _workload(args, 0.01, 5, block=0))
    ttft_s, tpot_s = float(np.median(idle.ttft_s)), float(np.median(idle.tpot_s))
    _print_profile(read_profile(_profile_file(args, layout, rate)))
    print(f"{layout}, {args.work}, {rate:g}/s; idle TTFT {1000 * ttft_s:.0f} ms, TPOT {1000 * tpot_s:.1f} ms")
    multiples = " | ".join(f"{a:g}x/{b:g}x" for a, b in MULTIPLES)
    print(f"| rate/s | | mean TTFT ms | p90 | mean TPOT ms | p90 | met {multiples} |")
    rows = np.array(json.loads(_outcomes_file(args, layout, rate).read_text()))
    result = simulate(spec, _workload(args, rate, args.requests, block=0), args.seed)
    assert not rows[:, 2].any(), "prompts were cached: nothing is compared with what was simulated"
    targets = [SloTargets(a * ttft_s, b * tpot_s) for a, b in MULTIPLES]
    predicted = _figures(result.ttft_s, result.tpot_s, [result.attainment(target).joint for target in targets])
    met = [
        float(((rows[:, 0] <= target.ttft_s) & (rows[:, 1] <= target.tpot_s)).sum() / args.requests)
        for target in targets
    ]
    measured = _figures(rows[:, 0], rows[:, 1], met)
    _print_row(f"{rate:g}", "predicted", predicted)
    _print_row("", "measured", measured)
    differences = [f"{before / after - 1:+.1%}" for before, after in zip(predicted[:4], measured[:4], strict=True)]
    differences += [f"{100 * (b - a):+.0f}" for b, a in zip(predicted[4:], measured[4:], strict=True)]
    late_ms = 1000 * float(rows[:, 3].max())
    print(f"| | difference | {' | '.join(differences)} |   {len(rows)} answered, sent at most {late_ms:.0f} ms late")


def _print_profile(profile: MeasuredProfile) -> None:
    error = profile.whole.error
    beside = ", ".join(f"{pair.work} beside {pair.neighbour} x{pair.slowdown:.2f}" for pair in profile.beside)
    print(
        f"profile: error {error.prefill:.1%} / {error.step:.1%} held out; {beside}; "
        f"a request {1000 * profile.request_s:.1f} ms"
    )


def _figures(ttft_s: Floats, tpot_s: Floats, met: Sequence[float]) -> list[float]:
    """Means and p90 in milliseconds, then shares."""
    return [
        1000 * figure
        for values in (ttft_s, tpot_s)
        for figure in (float(np.nanmean(values)), float(np.nanpercentile(values, 90)))
    ] + list(met)


def _print_row(rate: str, kind: str, figures: Sequence[float]) -> None:
    times = [f"{figure:.0f}" if figure >= 100 else f"{figure:.1f}" for figure in figures[:4]]
    shares = [f"{figure:.0%}" for figure in figures[4:]]
    print(f"| {rate} | {kind} | {' | '.join([*times, *shares])} |")


if __name__ == "__main__":
    main()
