"""What a run comes to: figures of requests and of workers, and of those that are still inside."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from halfmoon.sim.cluster.cluster_spec import ClusterSpec
from halfmoon.sim.cluster.job import Job
from halfmoon.sim.cluster.worker import SimWorker
from halfmoon.sim.ended_requests import EndedRequests
from halfmoon.sim.result import SimResult, WorkerFigures
from halfmoon.sim.token_times import gaps
from halfmoon.sim.workloads.workload import Workload


def end_so_far(inside: Iterable[Job], workers: Iterable[SimWorker], now_s: float) -> None:
    """Those that have a first token end with the tokens of the steps that are done."""
    for worker in workers:
        worker.steps.abort(now_s)
    for job in inside:
        if job.state == "decoding" and job.decode is not None:
            job.decode.decodes.drop(job)
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
    """Of the requests that came."""
    num, answer_s = num_arrived, spec.answer_s
    start_s, first_s, begun_s = workload.start_s[:num], ended.first_s[:num], ended.begun_s[:num]
    end_s, outputs, outcome = ended.end_s[:num], ended.num_output[:num], ended.outcome[:num]
    with np.errstate(invalid="ignore", divide="ignore"):
        tpot_s = np.where(outputs > 1, (end_s - first_s) / (outputs - 1), np.nan)
    longest_gap_s, tail_gap_s = ended.longest_gap_s[:num], ended.tail_gap_s[:num]
    if not has_gaps:  # then they may be known all the same, and cost nothing
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
        spec.num_devices,
        _figures(workers),
        handover_bytes,
        has_gaps,
    )


def _figures(workers: Sequence[SimWorker]) -> WorkerFigures:
    return WorkerFigures(
        tuple(worker.name for worker in workers),
        np.array([worker.busy_s for worker in workers]),
        np.array([worker.num_steps for worker in workers]),
        np.array([worker.num_preempted for worker in workers]),
        np.array([worker.kv.peak_pages / worker.kv.num_pages for worker in workers]),
    )
