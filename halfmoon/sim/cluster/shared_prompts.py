"""Prompts that several simulated prefill workers compute together: each its segments, a little behind the one before.

A worker's step computes its segment of a round and counts what the others compute of it as arrived. The KV that they
send to each other is a part of the plan's times, and takes no port. A helper that is late, because other prompts have
come before, or that dies, does not delay the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise

from halfmoon.policy.models.segments import SegmentPlan
from halfmoon.policy.values import Placement
from halfmoon.sim.event_queue import EventQueue
from halfmoon.sim.worker.job import Job
from halfmoon.sim.worker.worker import SimWorker


class SharedPrompts:
    """Owns the parts of shared prompts at helpers, by request."""

    def __init__(
        self, workers: Mapping[str, SimWorker], events: EventQueue, wake: Callable[[SimWorker], None], num_passes: int
    ) -> None:
        """workers: by name; num_passes: parts in which a segment's layers travel."""
        self._workers = workers
        self._events = events
        self._wake = wake
        self._num_passes = num_passes
        self._parts: dict[int, list[tuple[SimWorker, Job]]] = {}

    def begin(self, job: Job, placement: Placement, plan: SegmentPlan) -> None:
        """Sends the helpers' parts to them, and has the job compute its own part only."""
        rounds = _rounds(plan, placement.cached_tokens)
        parts = self._parts[job.index] = []
        for number, helper in enumerate(placement.helpers):
            part, worker = job.help_with(rounds[number][-1].stop), self._workers[helper.worker_id]
            part.rounds = rounds[number]
            parts.append((worker, part))
            self._start_after(number * plan.round_s / self._num_passes, part, worker)
            worker.queues.prompts.add(part)
            self._wake(worker)
        job.rounds = rounds[-1]
        behind_s = (plan.degree - 1) * plan.round_s / self._num_passes
        self._start_after(behind_s, job, self._workers[placement.prefill.worker_id])

    def computed(self, part: Job, worker: SimWorker) -> None:
        """Frees a part whose worker has computed it: by then the others have nearly all of it."""
        worker.queues.blocks.release(part)
        parts = self._parts.get(part.index, [])
        if (worker, part) in parts:
            parts.remove((worker, part))

    def end(self, job: Job) -> None:
        """Lets the helpers go: the prompt is computed, or its worker was lost."""
        for worker, part in self._parts.pop(job.index, ()):
            part.attempt += 1
            worker.queues.withdraw(part)
            self._wake(worker)

    def lost(self, worker: SimWorker) -> None:
        """Forgets the parts of a worker that died: the others go on as if it had computed them."""
        for parts in self._parts.values():
            parts[:] = [(helper, part) for helper, part in parts if helper is not worker]

    def _start_after(self, seconds: float, job: Job, worker: SimWorker) -> None:
        if seconds > 0:
            job.is_loading = True
            self._events.at(self._events.now_s + seconds, self._on_start, job, worker, job.attempt)

    def _on_start(self, job: Job, worker: SimWorker, attempt: int) -> None:
        if job.attempt == attempt:
            job.is_loading = False
            self._wake(worker)


def _rounds(plan: SegmentPlan, num_cached: int) -> list[tuple[range, ...]]:
    """The tokens that each worker computes."""
    segments = [range(start, end) for start, end in pairwise((min(num_cached, plan.ends[0] - 1), *plan.ends))]
    return [tuple(segments[number :: plan.degree]) for number in range(plan.degree)]
