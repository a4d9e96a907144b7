"""Running answers that go on at another worker in a simulation: of workers that leave, and of busy ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from halfmoon.policy.placement.hot_spots import LOOK_S, HotSpots
from halfmoon.policy.values import Placement
from halfmoon.sim.cluster.kv_transfers import KvTransfers
from halfmoon.sim.cluster.worker_steps import WorkerSteps
from halfmoon.sim.event_queue import EventQueue
from halfmoon.sim.routers.policy_router import PolicyRouter
from halfmoon.sim.worker.job import Job
from halfmoon.sim.worker.worker import SimWorker

_AT_ONCE = 4  # answers of a worker that are copied at a time, as live
_LOOK_S = 1.0  # between looks for a worker with room, as live


class _Copy(NamedTuple):
    """The KV of an answer on its way to another worker, ahead of the answer."""

    job: Job
    source: SimWorker
    target: SimWorker
    ready_s: float
    step_s: float  # of the new worker


class DecodeMoves:
    """Owns the copies under way. An answer changes over between two steps, when its KV is there, as live ones do."""

    def __init__(
        self,
        workers: Sequence[SimWorker],
        events: EventQueue,
        router: PolicyRouter,
        steps: WorkerSteps,
        transfers: KvTransfers,
    ) -> None:
        self._by_name = {worker.name: worker for worker in workers}
        self._events = events
        self._router = router
        self._steps = steps
        self._transfers = transfers
        self._copies: dict[int, _Copy] = {}

    def leave(self, worker: SimWorker) -> None:
        """Begins copies of the answers of a worker that they are to leave. Short rests stay."""
        for job in list(worker.queues.decodes.jobs.values()):
            length = worker.queues.decodes.length(job)
            num_left = job.output - (length - job.prompt)
            if job.index in self._copies or num_left <= worker.block_tokens or not self.may_copy(worker):
                continue
            placement = self._router.move_target(job, worker, length, num_left, self._events.now_s)
            if placement is None:
                self._events.at(self._events.now_s + _LOOK_S, self._steps.wake, worker)
            else:
                self.begin(job, worker, placement)

    def may_copy(self, worker: SimWorker) -> bool:
        """Whether another answer of this worker may be copied now."""
        return sum(copy.source is worker for copy in self._copies.values()) < _AT_ONCE

    def begin(self, job: Job, worker: SimWorker, placement: Placement) -> None:
        """Begins to copy an answer's KV to the placement's decode worker."""
        target = self._by_name[placement.decode.worker_id]
        ready_s = self._transfers.copied_s(worker, target, worker.queues.decodes.length(job))
        self._copies[job.index] = _Copy(job, worker, target, ready_s, placement.tbt_s)
        self._events.at(ready_s, self._steps.wake, worker)

    def after_step(self, worker: SimWorker) -> None:
        """Changes over the answers whose KV is there, between two steps of the worker."""
        for index, copy in list(self._copies.items()):
            if copy.source is not worker:
                continue
            if worker.queues.decodes.jobs.get(copy.job.rank) is not copy.job:  # it has ended, or is computed again
                del self._copies[index]
            elif self._events.now_s >= copy.ready_s:
                del self._copies[index]
                self._change_over(copy)

    def _change_over(self, copy: _Copy) -> None:
        job, worker, target, now_s = copy.job, copy.source, copy.target, self._events.now_s
        kept, job.target = job.target, worker.queues.decodes.length(job) - 1
        if target.group.role == "prefill" or not target.is_alive or not target.reserve(job, now_s):
            job.target = kept
            self._events.at(now_s + _LOOK_S, self._steps.wake, worker)
            return
        worker.queues.decodes.drop(job)
        worker.queues.blocks.leave(job)
        self._router.moved(job, worker, target, now_s)
        job.decode = job.at = target.number
        job.state = "placed"
        self._steps.schedule(target)
        self._events.at(now_s + copy.step_s, self._on_arrived, job, target, job.attempt)

    def _on_arrived(self, job: Job, target: SimWorker, attempt: int) -> None:
        if job.attempt == attempt:
            job.state = "arrived"
            target.queues.arrived.append(job)
            self._steps.wake(target)


class HotSpotControl:
    """Owns when answers moved off busy workers last. Looks every second, as live."""

    def __init__(
        self, workers: Sequence[SimWorker], events: EventQueue, router: PolicyRouter, moves: DecodeMoves
    ) -> None:
        self._workers = workers
        self._events = events
        self._router = router
        self._moves = moves
        self._policy = HotSpots()
        events.at(LOOK_S, self._on_tick)

    def _on_tick(self) -> None:
        now_s = self._events.now_s
        running = {
            str(job.index): (job, worker)
            for worker in self._workers
            if worker.is_alive and worker.group.role != "prefill"
            for job in worker.queues.decodes.jobs.values()
        }
        for move in self._router.hot_moves(self._policy, running.values(), now_s):
            job, worker = running[move.name]
            if self._moves.may_copy(worker):
                self._moves.begin(job, worker, move.placement)
        self._events.at(now_s + LOOK_S, self._on_tick)
