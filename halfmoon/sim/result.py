"""What a simulation found: columns, one row a request, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from halfmoon.sim.cluster.cluster_spec import SloTargets
from halfmoon.sim.workloads.workload import Floats, Ints

Criterion = Literal["joint", "marginal"]
OUTCOMES = ("completed", "refused", "failed")


class Attainment(NamedTuple):
    """Shares of all requests that met a target; who was refused or failed met none."""

    joint: float
    ttft: float
    tpot: float
    tbt: float

    def value(self, criterion: Criterion) -> float:
        """joint: who met all. marginal: the smallest of the shares, each taken for itself."""
        return self.joint if criterion == "joint" else min(self.ttft, self.tpot, self.tbt)


@dataclass(frozen=True, slots=True, eq=False)
class WorkerFigures:
    """Of each worker: [num_workers]."""

    names: tuple[str, ...]
    busy_s: Floats
    num_steps: Ints
    num_preempted: Ints
    peak_kv: Floats  # of its memory


@dataclass(frozen=True, slots=True, eq=False)
class SimResult:
    """Times are NaN where there is none: of a request without that token; TPOT and gaps of an answer of one token."""

    start_s: Floats  # [num_requests], as all of these
    ttft_s: Floats
    tpot_s: Floats  # (last token - first token) / (tokens - 1)
    longest_gap_s: Floats  # between two of its tokens
    tail_gap_s: Floats  # mean of the longest tenth of its gaps, one at least
    end_s: Floats
    wait_s: Floats  # until computing began
    outcome: NDArray[np.int8]  # index into OUTCOMES
    cached_tokens: Ints
    num_retries: Ints
    num_devices: int
    workers: WorkerFigures
    handover_bytes: float = 0.0
    has_gaps: bool = True  # else no gap is known

    def rows(self, begin: int, end: int) -> SimResult:
        """The requests from one to another; what is of the whole run, as the workers' figures, stays."""
        columns = {
            one.name: getattr(self, one.name)[begin:end]
            for one in fields(self)
            if isinstance(getattr(self, one.name), np.ndarray)
        }
        return replace(self, **columns)

    @property
    def is_completed(self) -> NDArray[np.bool_]:
        """Which requests got all their tokens."""
        completed: NDArray[np.bool_] = self.outcome == 0
        return completed

    @property
    def duration_s(self) -> float:
        """From the first arrival to the last end."""
        return float(np.nanmax(self.end_s) - self.start_s[0]) if len(self.start_s) else 0.0

    def attainment(self, targets: SloTargets) -> Attainment:
        """An answer of one token has no TPOT and no TBT to miss."""
        assert self.has_gaps or targets.tbt_s is None, "a TBT target needs a simulation with gaps"
        done = self.is_completed
        gap_s = self.longest_gap_s if targets.tbt_of == "longest" else self.tail_gap_s
        ttft = done & (self.ttft_s <= _limit(targets.ttft_s))
        tpot = done & (np.isnan(self.tpot_s) | (self.tpot_s <= _limit(targets.tpot_s)))
        tbt = done & (np.isnan(gap_s) | (gap_s <= _limit(targets.tbt_s)))
        shares = [float(met.mean()) if len(met) else 1.0 for met in (ttft & tpot & tbt, ttft, tpot, tbt)]
        return Attainment(*shares)

    def goodput_per_s(self, targets: SloTargets) -> float:
        """Requests that met all targets, for each second of arrivals (of the whole run, where all came at once)."""
        arriving_s = float(self.start_s[-1] - self.start_s[0]) if len(self.start_s) else 0.0
        seconds = arriving_s or self.duration_s
        return self.attainment(targets).joint * len(self.start_s) / seconds if seconds else 0.0


def quantiles(column: Floats) -> dict[str, float | None]:
    """Mean, p50, p90 and p99 of what is a number; None where nothing is."""
    found = column[~np.isnan(column)]
    if not len(found):
        return dict.fromkeys(("mean", "p50", "p90", "p99"))
    p50, p90, p99 = np.percentile(found, [50, 90, 99])
    return {"mean": float(found.mean()), "p50": float(p50), "p90": float(p90), "p99": float(p99)}


def _limit(target_s: float | None) -> float:
    return np.inf if target_s is None else target_s
