"""A sweep over request rates: seeded requests in an open loop at each, and the highest rate that keeps the targets."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from halfmoon.plan.search.bisect import highest_feasible
from halfmoon.replay.client import Gateway
from halfmoon.replay.outcome import ReplayTargets, Summary, summarized
from halfmoon.replay.player import played
from halfmoon.sim.workloads.drawn_workload import synthetic_workload
from halfmoon.sim.workloads.lengths import Lengths

_LEAST_REQUESTS = 20  # at each rate, so that a share of nine tenths means something
_LOWEST = 1 / 64  # of the rate that a search starts at
_REQUESTS_APART = 1 << 20  # between seeds: prompts of different seeds share nothing


@dataclass(frozen=True, slots=True)
class SweepLoad:
    """What is sent at each rate."""

    lengths: Lengths
    seconds: float  # of arrivals, at least
    seed: int
    targets: ReplayTargets
    attainment: float  # share of requests in time that makes a rate one that is kept


@dataclass(frozen=True, slots=True)
class RatePoint:
    """One rate, and how well it was served."""

    rate_per_s: float
    is_kept: bool
    summary: Summary

    def as_json(self) -> dict[str, Any]:
        """JSON values."""
        return {"rate_per_s": self.rate_per_s, "is_kept": self.is_kept, **self.summary.as_json()}


@dataclass(slots=True)
class Sweep:
    """Owns the points measured so far. Every prompt is new: a cache helps no rate."""

    gateway: Gateway
    load: SweepLoad
    on_begin: Callable[[float, int], None] = lambda rate_per_s, num_requests: None
    on_done: Callable[[], None] = lambda: None
    points: list[RatePoint] = field(default_factory=list)
    _num_sent: int = 0

    def measure(self, rate_per_s: float) -> RatePoint:
        """Sends as many requests as arrive in `load.seconds`, and waits for all answers."""
        load = self.load
        num_requests = max(math.ceil(rate_per_s * load.seconds), _LEAST_REQUESTS)
        workload = synthetic_workload(load.lengths, num_requests, rate_per_s, seed=load.seed)
        self.on_begin(rate_per_s, num_requests)
        first = load.seed * _REQUESTS_APART + self._num_sent
        outcomes = asyncio.run(played(workload, self.gateway, self.on_done, first))
        self._num_sent += num_requests
        summary = summarized(outcomes, load.targets, max(workload.duration_s, num_requests / rate_per_s))
        point = RatePoint(rate_per_s, summary.attainment >= load.attainment, summary)
        self.points.append(point)
        return point

    def search(self, guess_per_s: float, tolerance: float, most_per_s: float = math.inf) -> float | None:
        """Measures rates until the highest one that is kept is known within a factor of `tolerance`.

        None: not even a small part of the guess is.
        """

        def kept(rate_per_s: float) -> RatePoint | None:
            point = self.measure(rate_per_s)
            return point if point.is_kept else None

        found = highest_feasible(kept, guess_per_s, tolerance, least=guess_per_s * _LOWEST, most=most_per_s)
        return None if found is None else found.value


def highest_kept(points: Sequence[RatePoint]) -> RatePoint | None:
    """The point with the highest rate that was kept."""
    return max((point for point in points if point.is_kept), key=lambda point: point.rate_per_s, default=None)


def markdown_table(points: Sequence[RatePoint]) -> str:
    """The points in order of their rates. Percentiles are those of answered requests."""
    head = (
        "rate/s",
        "requests",
        "in time",
        "goodput/s",
        "TTFT p50 / p90 / p99, s",
        "TPOT p50 / p90 / p99, ms",
        "failed",
    )
    rows = [head, ("---",) * len(head)]
    for point in sorted(points, key=lambda one: one.rate_per_s):
        found = point.summary
        ttft, tbt = found.ttft_s, found.tbt_s
        rows.append(
            (
                f"{point.rate_per_s:.3g}",
                str(found.num_requests),
                f"{found.attainment:.1%}",
                f"{found.goodput_per_s:.3g}",
                f"{ttft.p50:.3f} / {ttft.p90:.3f} / {ttft.p99:.3f}",
                f"{1000 * tbt.p50:.1f} / {1000 * tbt.p90:.1f} / {1000 * tbt.p99:.1f}",
                str(found.num_refused + found.num_failed),
            )
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"
