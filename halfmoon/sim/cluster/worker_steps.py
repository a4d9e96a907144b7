"""The steps of all workers as events: a step ends, its products move on, and the next step begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from halfmoon.sim.cluster.load_reports import LoadReports
from halfmoon.sim.cluster.shared_cores import SharedCores
from halfmoon.sim.event_queue import EventQueue
from halfmoon.sim.worker.job import Job, Outcome
from halfmoon.sim.worker.prompt_queue import PromptChunk
from halfmoon.sim.worker.worker import SimWorker


class Requests(Protocol):
    """Handles what steps produce: the simulation."""

    def prefilled(self, job: Job, worker: SimWorker) -> None:
        """Handles a computed prompt and its sampled token."""

    def end(self, job: Job, outcome: Outcome) -> None:
        """Handles a request that has all its tokens."""

    def pull(self, worker: SimWorker) -> None:
        """Lets waiting KV move to a worker that has room again."""

    def after_step(self, worker: SimWorker) -> None:
        """Handles a worker between two steps."""


class WorkerSteps:
    """Owns the scheduled wake-up of each worker. Knows nothing of requests."""

    def __init__(
        self,
        events: EventQueue,
        reports: LoadReports,
        workers: Sequence[SimWorker],
        cores: SharedCores | None,
        requests: Requests,
    ) -> None:
        """`cores`: CPU cores that workers share; None: each worker has its own."""
        self._events = events
        self._reports = reports
        self._cores = cores
        self._requests = requests
        self._scheduled = [worker.steps.version for worker in workers]  # the version whose wake-up event is queued

    def wake(self, worker: SimWorker) -> None:
        """Checks a worker that may have something new to do."""
        self._reports.note(worker)
        if not worker.is_alive:
            return
        if worker.steps.wake_s is None:
            self._start(worker)
        else:
            worker.interrupt(self._events.now_s)
            worker.nest(self._events.now_s)
            self.schedule(worker)

    def schedule(self, worker: SimWorker) -> None:
        """Schedules the end of a worker's step, and of colocated steps that it moves."""
        if self._cores is not None:
            for moved in self._cores.changed(worker, self._events.now_s):
                self._schedule_wake(moved)
        self._schedule_wake(worker)

    def _start(self, worker: SimWorker) -> None:
        chunks = worker.start(self._events.now_s)
        if chunks:
            self._events.at(worker.steps.passage_s, self._on_passed, worker, chunks)
        self.schedule(worker)

    def _schedule_wake(self, worker: SimWorker) -> None:
        steps = worker.steps
        if steps.wake_s is not None and self._scheduled[worker.number] != steps.version:
            self._scheduled[worker.number] = steps.version
            self._events.at(steps.wake_s, self._on_wake, worker, steps.version)

    def _on_wake(self, worker: SimWorker, version: int) -> None:
        if worker.steps.version != version:
            return
        finished = worker.finish(self._events.now_s)
        for job in finished.prompts:
            self._requests.prefilled(job, worker)
        for job in finished.ended:
            self._requests.end(job, "completed")
        self._reports.note(worker)
        has_room = finished.ended or finished.prompts  # a preempted job may end with its prompt
        if worker.queues.backlog and (has_room or worker.queues.allows_pauses):
            self._requests.pull(worker)
        if worker.steps.wake_s is None:
            self._requests.after_step(worker)
        if worker.steps.wake_s is None:
            self._start(worker)
        else:  # the outer step of one that has ended goes on
            worker.nest(self._events.now_s)
            self.schedule(worker)

    def _on_passed(self, worker: SimWorker, chunks: list[PromptChunk]) -> None:
        for job in worker.queues.computed(chunks):
            self._requests.prefilled(job, worker)
        self.wake(worker)
