"""Attempts of each request: placed, retried elsewhere, waiting for a worker, or given up."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from halfmoon.errors import NoCapacity, Unavailable
from halfmoon.policy.placement.place import ContextLengthExceeded
from halfmoon.policy.retries import FailedAttempt, Reason, Retries, retry_ms_when_full
from halfmoon.policy.values import Placement
from halfmoon.policy.wait_limits import MAY_RETURN_S, WaitLimits
from halfmoon.sim.event_queue import EventQueue
from halfmoon.sim.worker.job import Job, Outcome
from halfmoon.sim.worker.worker import SimWorker


class Places(Protocol):
    """Places requests: the router."""

    def place(self, job: Job, exclude: tuple[str, ...], now_s: float) -> Placement:
        """Raises Refused, ContextLengthExceeded or Unavailable."""


class _Waiting(NamedTuple):
    """A request without a worker."""

    job: Job
    outcome: Outcome  # unless a worker joins in time
    until_s: float


class Attempts:
    """Owns the requests that wait for a worker, and the retries. Knows nothing of the work on workers.

    The rules are those of the live gateway: `policy/retries.py`, `policy/wait_limits.py`.
    """

    def __init__(
        self,
        events: EventQueue,
        router: Places,
        workers: Sequence[SimWorker],
        longest_output: int,
        begin: Callable[[Job, Placement], bool],
        end: Callable[[Job, Outcome], None],
    ) -> None:
        """`begin` puts a request on its workers; it returns False if the decode worker has no room. `end` is called for
        requests that are given up. `longest_output` is what clients send as `max_tokens`.
        """
        self._events = events
        self._router = router
        self._workers = workers
        self._longest_output = longest_output
        self._begin = begin
        self._end = end
        self._wait_limits = WaitLimits()
        self._waiting: dict[int, _Waiting] = {}
        self._left_s = -math.inf  # when a worker was last lost

    @property
    def waiting(self) -> list[Job]:
        """Requests that wait for a worker now."""
        return [waiting.job for waiting in self._waiting.values()]

    def place(self, job: Job) -> None:
        """Makes the first or the next attempt: on other workers if there are any, otherwise on any worker after a
        pause.
        """
        self._go(job, None, is_anywhere=job.retries is None)

    def lost(self, job: Job, reason: Reason) -> None:
        """Handles the death of one of the request's workers."""
        if self._may_go_on(job, reason):
            self.place(job)
        else:
            self._end(job, "failed")

    def note_left(self) -> None:
        """Notes that a worker is gone; it may be back soon."""
        self._left_s = self._events.now_s

    def note_joined(self) -> None:
        """Places waiting requests now that a worker has joined."""
        for waiting in list(self._waiting.values()):
            del self._waiting[waiting.job.index]
            self._go(waiting.job, waiting.until_s, is_anywhere=True)

    def _may_go_on(self, job: Job, reason: Reason, retry_after_ms: int | None = None) -> bool:
        assert job.prefill is not None
        assert job.decode is not None
        job.retries = job.retries or Retries()
        gave_tokens = job.generated > job.num_before
        prefill, decode = self._workers[job.prefill], self._workers[job.decode]
        failed = FailedAttempt(reason, prefill.name, decode.name, gave_tokens, retry_after_ms)
        job.place()
        return job.retries.add(failed)

    def _go(self, job: Job, until_s: float | None, *, is_anywhere: bool) -> None:
        """`until_s`: when the request stops waiting for a worker; None: it has not started to wait."""
        placement = self._placement(job, until_s, is_anywhere=is_anywhere)
        while placement is not None and not self._begin(job, placement):
            assert job.decode is not None
            if not self._may_go_on(job, "no room", self._room_in_ms(self._workers[job.decode])):
                self._end(job, "refused")
                return
            placement = self._placement(job, None, is_anywhere=False)

    def _placement(self, job: Job, until_s: float | None, *, is_anywhere: bool) -> Placement | None:
        """A placement; None if the request waits or is refused."""
        retries, now_s = None if is_anywhere else job.retries, self._events.now_s
        for exclude in [()] if retries is None else retries.exclusions():
            try:
                return self._router.place(job, exclude, now_s)
            except (Unavailable, ContextLengthExceeded) as error:
                outcome: Outcome = "refused" if isinstance(error, ContextLengthExceeded) else "failed"
            except NoCapacity:
                self._end(job, "refused")
                return None
        if retries is None:
            self._wait(job, outcome, until_s)
        else:
            retries.note_pause()
            self._events.at(now_s + retries.pause_s, partial(self._go, is_anywhere=True), job, None)
        return None

    def _wait(self, job: Job, outcome: Outcome, until_s: float | None) -> None:
        now_s = self._events.now_s
        if until_s is None:
            is_inside = job.generated > 0 or (job.retries is not None and job.retries.has_lost)
            until_s = now_s + self._wait_limits.seconds(
                is_inside=is_inside, expects_worker=now_s - self._left_s <= MAY_RETURN_S
            )
            self._events.at(until_s, self._give_up, job, until_s)
        self._waiting[job.index] = _Waiting(job, outcome, until_s)

    def _give_up(self, job: Job, until_s: float) -> None:
        waiting = self._waiting.get(job.index)
        if waiting is not None and waiting.until_s == until_s:
            del self._waiting[job.index]
            self._end(job, waiting.outcome)

    def _room_in_ms(self, worker: SimWorker) -> int:
        """Milliseconds until there is room, as the worker's engine estimates it from the longest possible answers."""
        decodes, steps, now_s = worker.queues.decodes, worker.steps, self._events.now_s
        num_done = steps.num_begun(now_s) - 1 if steps.num_planned else 0  # of the current run
        step_s = worker.group.latency.policy_step.seconds(decodes.size, worker.progress(now_s)[0])
        given = (decodes.length(job) + num_done - job.prompt for job in decodes.jobs.values())
        return retry_ms_when_full(step_s, (self._longest_output - num for num in given))
