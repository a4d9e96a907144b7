"""What workers do in the course of events: a step ends, what it brings is told, and the next one begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from halfmoon.sim.cluster.contention import SharedCores
from halfmoon.sim.cluster.job import Job, Outcome
from halfmoon.sim.cluster.load_reports import LoadReports
from halfmoon.sim.cluster.prompt_queue import PromptChunk
from halfmoon.sim.cluster.worker import SimWorker
from halfmoon.sim.event_queue import EventQueue


class Requests(Protocol):
    """Who is told what steps bring."""

    def prefilled(self, job: Job, worker: SimWorker) -> None:
        """A prompt is computed, and a token drawn."""

    def end(self, job: Job, outcome: Outcome) -> None:
        """It has all its tokens."""

    def pull(self, worker: SimWorker) -> None:
        """There is room for who waits for it."""


class WorkerSteps:
    """Owns which worker's next wake-up is among the events. Knows of requests only whom to tell."""

    def __init__(
        self,
        events: EventQueue,
        reports: LoadReports,
        workers: Sequence[SimWorker],
        cores: SharedCores | None,
        requests: Requests,
    ) -> None:
        """`cores`: that workers share; None: each has its own."""
        self._events = events
        self._reports = reports
        self._cores = cores
        self._requests = requests
        self._told = [worker.steps.version for worker in workers]  # of which a wake event is in the queue

    def wake(self, worker: SimWorker) -> None:
        """There may be something new to do for it."""
        self._reports.note(worker)
        if not worker.is_alive:
            return
        if worker.steps.wake_s is None:
            self._start(worker)
        else:
            worker.interrupt(self._events.now_s)
            self.schedule(worker)

    def schedule(self, worker: SimWorker) -> None:
        """Its step may end at another time, and so those of its neighbours."""
        if self._cores is not None:
            for one in self._cores.changed(worker, self._events.now_s):
                self._tell(one)
        self._tell(worker)

    def _start(self, worker: SimWorker) -> None:
        chunks = worker.start(self._events.now_s)
        if chunks:
            self._events.at(worker.steps.passage_s, self._on_passed, worker, chunks)
        self.schedule(worker)

    def _tell(self, worker: SimWorker) -> None:
        steps = worker.steps
        if steps.wake_s is not None and self._told[worker.number] != steps.version:
            self._told[worker.number] = steps.version
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
        if worker.backlog and (finished.ended or finished.prompts):  # a preempted one may end with its prompt
            self._requests.pull(worker)
        if worker.steps.wake_s is None:
            self._start(worker)

    def _on_passed(self, worker: SimWorker, chunks: list[PromptChunk]) -> None:
        for job in worker.computed(chunks):
            self._requests.prefilled(job, worker)
        self.wake(worker)
