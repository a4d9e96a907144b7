"""What a simulation found: columns with one row per request, and the figures that follow from them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from halfmoon.sim.cluster.cluster_spec import ClusterSpec, SloTargets
from halfmoon.sim.token_times import gaps
from halfmoon.sim.worker.job import Job
from halfmoon.sim.worker.worker import SimWorker
from halfmoon.sim.workloads.workload import Floats, Ints, Workload

Criterion = Literal["joint", "marginal"]
OUTCOMES = ("completed", "refused", "failed")


class Attainment(NamedTuple):
    """Shares of all requests that met a target. A refused or failed request met none."""

    joint: float
    ttft: float
    tpot: float
    tbt: float

    def value(self, criterion: Criterion) -> float:
        """joint: the share that met every target. marginal: the smallest share over the targets."""
        return self.joint if criterion == "joint" else min(self.ttft, self.tpot, self.tbt)


@dataclass(frozen=True, slots=True, eq=False)
class WorkerFigures:
    """Figures of each worker: [num_workers]."""

    names: tuple[str, ...]
    busy_s: Floats
    num_steps: Ints
    num_preempted: Ints
    num_paused: Ints
    peak_kv: Floats  # share of its memory


@dataclass(frozen=True, slots=True, eq=False)
class SimResult:
    """One simulation. A time is NaN if it does not exist: no such token, or TPOT and gaps of a single-token answer."""

    start_s: Floats  # [num_requests], like every column
    ttft_s: Floats
    tpot_s: Floats  # (last token - first token) / (tokens - 1)
    longest_gap_s: Floats  # between two of its tokens
    tail_gap_s: Floats  # mean of the longest tenth of its gaps, at least one
    end_s: Floats
    wait_s: Floats  # until its computation began
    outcome: NDArray[np.int8]  # index into OUTCOMES
    cached_tokens: Ints
    num_retries: Ints
    workers: WorkerFigures
    handover_bytes: float = 0.0
    has_gaps: bool = True  # False: no gap is known

    def rows(self, begin: int, end: int) -> SimResult:
        """The requests from `begin` to `end`. Figures of the whole run, such as the workers', stay."""
        columns = {
            field.name: getattr(self, field.name)[begin:end]
            for field in fields(self)
            if isinstance(getattr(self, field.name), np.ndarray)
        }
        return replace(self, **columns)

    @property
    def is_completed(self) -> NDArray[np.bool_]:
        """Whether each request got all its tokens."""
        completed: NDArray[np.bool_] = self.outcome == 0
        return completed

    @property
    def duration_s(self) -> float:
        """From the first arrival to the last end."""
        return float(np.nanmax(self.end_s) - self.start_s[0]) if len(self.start_s) else 0.0

    def attainment(self, targets: SloTargets) -> Attainment:
        """Shares of requests that met their targets. A single-token answer cannot miss TPOT or TBT."""
        assert self.has_gaps or targets.tbt_s is None, "a TBT target needs a simulation with gaps"
        done = self.is_completed
        gap_s = self.longest_gap_s if targets.tbt_of == "longest" else self.tail_gap_s
        ttft = done & (self.ttft_s <= _limit(targets.ttft_s))
        tpot = done & (np.isnan(self.tpot_s) | (self.tpot_s <= _limit(targets.tpot_s)))
        tbt = done & (np.isnan(gap_s) | (gap_s <= _limit(targets.tbt_s)))
        shares = [float(met.mean()) if len(met) else 1.0 for met in (ttft & tpot & tbt, ttft, tpot, tbt)]
        return Attainment(*shares)

    def goodput_per_s(self, targets: SloTargets) -> float:
        """Requests that met all targets per second of arrivals, or per second of the run if all arrived at once."""
        arriving_s = float(self.start_s[-1] - self.start_s[0]) if len(self.start_s) else 0.0
        seconds = arriving_s or self.duration_s
        return self.attainment(targets).joint * len(self.start_s) / seconds if seconds else 0.0


def quantiles(column: Floats) -> dict[str, float | None]:
    """Mean, p50, p90 and p99 of the numbers in a column; None if it has none."""
    result = column[~np.isnan(column)]
    if not len(result):
        return dict.fromkeys(("mean", "p50", "p90", "p99"))
    p50, p90, p99 = np.percentile(result, [50, 90, 99])
    return {"mean": float(result.mean()), "p50": float(p50), "p90": float(p90), "p99": float(p99)}


def _limit(target_s: float | None) -> float:
    return np.inf if target_s is None else target_s


class EndedRequests:
    """Owns the figures of each ended request, by its index. A time that does not exist is -1 or NaN. Knows nothing of
    workers.
    """

    def __init__(self, num_requests: int) -> None:
        self.first_s: Floats = np.full(num_requests, -1.0)  # of the first token
        self.begun_s: Floats = np.full(num_requests, -1.0)
        self.end_s: Floats = np.full(num_requests, -1.0)
        self.longest_gap_s: Floats = np.full(num_requests, math.nan)
        self.tail_gap_s: Floats = np.full(num_requests, math.nan)
        self.num_output: Ints = np.zeros(num_requests, dtype=np.int64)
        self.outcome = np.zeros(num_requests, dtype=np.int8)  # index into OUTCOMES
        self.cached_tokens: Ints = np.zeros(num_requests, dtype=np.int64)
        self.num_failovers: Ints = np.zeros(num_requests, dtype=np.int64)

    def add(self, job: Job) -> None:
        """Records a job. One without an outcome counts as failed."""
        row = job.index
        self.first_s[row] = job.first_s
        self.begun_s[row] = job.begun_s
        self.end_s[row] = job.end_s
        self.longest_gap_s[row] = job.longest_gap_s
        self.tail_gap_s[row] = job.tail_gap_s
        self.num_output[row] = job.generated
        self.outcome[row] = OUTCOMES.index(job.outcome or "failed")
        self.cached_tokens[row] = job.cached_tokens
        self.num_failovers[row] = job.num_failovers


def end_so_far(inside: Iterable[Job], workers: Sequence[SimWorker], now_s: float) -> None:
    """Ends the jobs that have a first token, with the tokens of finished steps."""
    for worker in workers:
        worker.steps.abort(now_s)
    for job in inside:
        if job.state == "decoding" and job.decode is not None:
            workers[job.decode].queues.decodes.drop(job)
        if job.first_s >= 0:
            job.outcome, job.end_s = "completed", now_s
        if job.later_s:
            job.longest_gap_s, job.tail_gap_s = gaps(job.first_s, job.later_s)


def run_result(
    spec: ClusterSpec,
    workload: Workload,
    ended: EndedRequests,
    num_arrived: int,
    workers: Sequence[SimWorker],
    handover_bytes: float,
    *,
    has_gaps: bool,
) -> SimResult:
    """The result of the requests that arrived."""
    num, answer_s = num_arrived, spec.answer_s
    start_s, first_s, begun_s = workload.start_s[:num], ended.first_s[:num], ended.begun_s[:num]
    end_s, outputs, outcome = ended.end_s[:num], ended.num_output[:num], ended.outcome[:num]
    with np.errstate(invalid="ignore", divide="ignore"):
        tpot_s = np.where(outputs > 1, (end_s - first_s) / (outputs - 1), np.nan)
    longest_gap_s, tail_gap_s = ended.longest_gap_s[:num], ended.tail_gap_s[:num]
    if not has_gaps:  # gaps may be known anyway, at no cost
        longest_gap_s, tail_gap_s = np.full(num, np.nan), np.full(num, np.nan)
    return SimResult(
        start_s,
        np.where(first_s >= 0, first_s + answer_s - start_s, np.nan),
        np.where(outcome == 0, tpot_s, np.nan),
        longest_gap_s,
        tail_gap_s,
        end_s + answer_s,
        np.where(begun_s >= 0, begun_s - start_s, np.nan),
        outcome,
        ended.cached_tokens[:num],
        ended.num_failovers[:num],
        _figures(workers),
        handover_bytes,
        has_gaps,
    )


def _figures(workers: Sequence[SimWorker]) -> WorkerFigures:
    return WorkerFigures(
        tuple(worker.name for worker in workers),
        np.array([worker.busy_s for worker in workers]),
        np.array([worker.num_steps for worker in workers]),
        np.array([worker.queues.num_preempted for worker in workers]),
        np.array([worker.queues.paused.num_begun for worker in workers]),
        np.array([worker.kv.peak_blocks / worker.kv.num_blocks for worker in workers]),
    )
