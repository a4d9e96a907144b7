"""The autopilot against fixed ratios of roles and an oracle, on three workers that compute the demo model here.

    python -m benchmarks.scaling_real [--seconds 30] [--cycle bursts] [--load 0.75]

Each worker has one thread, so that it is one device where the host has cores enough. Rates and targets follow what the
machine does: of each kind of traffic a closed loop says how many requests the better one of 1:2:0 and 2:1:0 answers a
second, and how soon; phases ask for `--load` of that rate, within a multiple of those times. One system serves all rows
one after the other; the oracle sets the ratio that did best in each phase.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from statistics import mean
from typing import NamedTuple

from benchmarks.scaling import Phase, Phased, all_splits, phased
from benchmarks.scaling_live import Live, Row, cycle_of, live, print_head, print_row, split_of
from halfmoon.policy.scaling.observation import Split
from halfmoon.replay.outcome import ReplayTargets

PROMPTS = Phase("prompts", 1.0, 700, 8)
ANSWERS = Phase("answers", 1.0, 40, 70)
BURSTS = Phase("bursts", 1.0, 250, 40, "gamma", 2.5)
NUM_WORKERS = 3
AT_ONCE = {PROMPTS: 4, ANSWERS: 12, BURSTS: 8}  # requests of the closed loop
TTFT_TIMES, TPOT_TIMES = 2.0, 1.5  # targets, over the longest means of the closed loops


class Capacity(NamedTuple):
    """What one ratio of roles does with one kind of traffic."""

    rate_per_s: float
    ttft_s: float
    tpot_s: float


async def capacity(system: Live, split: Split, phase: Phase, num_requests: int) -> Capacity:
    """Measures it in a closed loop. Raises RuntimeError if requests fail."""
    workload = phased([phase._replace(rate_per_s=num_requests)], 1.0, 7).workload.first(num_requests)
    started_s = time.monotonic()
    outcomes = await system.at_once(split, workload, AT_ONCE[phase])
    took_s = time.monotonic() - started_s
    if any(outcome.end != "answered" for outcome in outcomes):
        raise RuntimeError(f"requests of {phase.name} failed: {outcomes[0].reason or outcomes[0].text}")
    ttft_s, tpot_s = (mean(getattr(one, name) for one in outcomes) for name in ("ttft_s", "tbt_s"))
    return Capacity(len(outcomes) / took_s, ttft_s, tpot_s)


async def sized(system: Live, num_requests: int) -> tuple[tuple[Phase, Phase, Phase], ReplayTargets]:
    """The phases at the rates that the better ratio holds, and targets."""
    best = {}
    for phase in (PROMPTS, ANSWERS, BURSTS):
        by_split = {split: await capacity(system, split, phase, num_requests) for split in (Split(1, 2), Split(2, 1))}
        best[phase] = max(by_split.values())
        figures = ", ".join(f"{split} {one.rate_per_s:.2f}/s" for split, one in by_split.items())
        print(f"{phase.name}: {figures}; {best[phase].ttft_s:.2f} s, {1000 * best[phase].tpot_s:.0f} ms", flush=True)
    targets = ReplayTargets(
        round(TTFT_TIMES * max(one.ttft_s for one in best.values()), 1),
        round(TPOT_TIMES * max(one.tpot_s for one in best.values()), 3),
    )
    prompts, answers, bursts = (phase._replace(rate_per_s=one.rate_per_s) for phase, one in best.items())
    return (prompts, answers, bursts), targets


async def rows(args: argparse.Namespace, splits: Sequence[Split]) -> None:
    """Prints the table."""
    settings = {"workers": {"all": {"num_threads": 1, "kv_memory": "256MiB"}}}
    async with live(settings, (), NUM_WORKERS) as system:
        await capacity(system, Split(1, 2), BURSTS, args.probes)  # warms up
        phases, targets = await sized(system, args.probes)
        work = cycle_of(phases, args, args.load)
        await system.set_targets(targets)
        print_head(work, targets)
        shares: dict[Split, list[float]] = {}
        for split in splits:
            row = Row(str(split), split)
            figures = await system.row(row, work)
            shares[split] = figures[0]
            print_row(row, *figures)
        for row in (Row("autopilot", Split(1, 2), acts=True), _oracle(work, shares)):
            print_row(row, *await system.row(row, work))


def _oracle(work: Phased, shares: dict[Split, list[float]]) -> Row:
    """The best ratio of each phase; of equal ones that which is best over all, so that nothing changes for nothing."""
    phases = range(len(work.phases))
    best = [max(shares, key=lambda split: (shares[split][number], shares[split][-1])) for number in phases]
    changes = tuple(zip([max(start_s - 1.0, 0.0) for start_s in work.starts_s], best, strict=True))
    return Row("oracle", best[0], changes[1:])


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cycle", choices=("phases", "bursts"), default="bursts")
    parser.add_argument("--seconds", type=float, default=30.0, help="of a phase")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--load", type=float, default=0.9, help="share of what the better ratio holds")
    parser.add_argument("--probes", type=int, default=24, help="requests of each closed loop")
    parser.add_argument("--ratio", type=split_of, action="append", help="PREFILL:DECODE:BOTH; all by default")
    args = parser.parse_args()
    asyncio.run(rows(args, args.ratio or all_splits(NUM_WORKERS)))


if __name__ == "__main__":
    main()
