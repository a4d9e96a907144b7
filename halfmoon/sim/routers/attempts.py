"""Where requests go, and go on where their workers refused or lost them: tried again, waiting, or given up."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

from halfmoon.errors import NoCapacity, Unavailable
from halfmoon.policy.placement.place import ContextLengthExceeded
from halfmoon.policy.retries import FailedAttempt, Reason, Retries, retry_ms_when_full
from halfmoon.policy.values import Placement
from halfmoon.policy.wait_limits import MAY_RETURN_S, WaitLimits
from halfmoon.sim.cluster.job import Job, Outcome
from halfmoon.sim.cluster.worker import SimWorker
from halfmoon.sim.event_queue import EventQueue


class Places(Protocol):
    """Who says where a request goes."""

    def place(self, job: Job, exclude: tuple[str, ...], now_s: float) -> Placement:
        """Raises Refused, ContextLengthExceeded or Unavailable."""


class _Waiting(NamedTuple):
    """A request for which there is no worker."""

    job: Job
    outcome: Outcome  # unless one comes in time
    until_s: float


class Attempts:
    """Owns who waits for a worker, and who is placed again. What happens on workers is others' to know.

    The rules are those of the live gateway: `policy/retries.py`, `policy/wait_limits.py`.
    """

    def __init__(
        self,
        events: EventQueue,
        gateway: Places,
        longest_output: int,
        begin: Callable[[Job, Placement], bool],
        end: Callable[[Job, Outcome], None],
    ) -> None:
        """`begin` puts a request on its workers, False where the decode worker has no room; `end` is told of those
        that are given up. `longest_output`: what clients give as `max_tokens`."""
        self._events = events
        self._gateway = gateway
        self._longest_output = longest_output
        self._begin = begin
        self._end = end
        self._patience = WaitLimits()
        self._waiting: dict[int, _Waiting] = {}
        self._left_s = -math.inf  # when a worker was lost the last time

    @property
    def waiting(self) -> list[Job]:
        """Who waits for a worker now."""
        return [one.job for one in self._waiting.values()]

    def place(self, job: Job) -> None:
        """The first attempt, or the next one: elsewhere if there is an elsewhere, else after a pause anywhere."""
        self._go(job, None, is_anywhere=job.retries is None)

    def lost(self, job: Job) -> None:
        """A worker of it died."""
        if self._may_go_on(job, "lost"):
            self.place(job)
        else:
            self._end(job, "failed")

    def note_left(self) -> None:
        """A worker is gone: it may be back soon."""
        self._left_s = self._events.now_s

    def note_joined(self) -> None:
        """A worker is there."""
        for waiting in list(self._waiting.values()):
            del self._waiting[waiting.job.index]
            self._go(waiting.job, waiting.until_s, is_anywhere=True)

    def _may_go_on(self, job: Job, reason: Reason, retry_after_ms: int | None = None) -> bool:
        assert job.prefill is not None
        assert job.decode is not None
        job.retries = job.retries or Retries()
        gave_tokens = job.generated > job.num_before
        failed = FailedAttempt(reason, job.prefill.name, job.decode.name, gave_tokens, retry_after_ms)
        job.place()
        return job.retries.add(failed)

    def _go(self, job: Job, until_s: float | None, *, is_anywhere: bool) -> None:
        """`until_s`: when it gives up waiting for a worker; None: it has not begun to."""
        placement = self._placement(job, until_s, is_anywhere=is_anywhere)
        while placement is not None and not self._begin(job, placement):
            assert job.decode is not None
            if not self._may_go_on(job, "no room", self._room_in_ms(job.decode)):
                self._end(job, "refused")
                return
            placement = self._placement(job, None, is_anywhere=False)

    def _placement(self, job: Job, until_s: float | None, *, is_anywhere: bool) -> Placement | None:
        """None where it waits or is refused."""
        retries, now_s = None if is_anywhere else job.retries, self._events.now_s
        for exclude in [()] if retries is None else retries.exclusions():
            try:
                return self._gateway.place(job, exclude, now_s)
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
            is_inside = job.generated > 0 or (job.retries is not None and job.retries.last_reason == "lost")
            until_s = now_s + self._patience.seconds(
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
        """As its engine says, which knows of answers how long they may become."""
        decodes, steps, now_s = worker.decodes, worker.steps, self._events.now_s
        num_done = steps.num_begun(now_s) - 1 if steps.num_planned else 0  # of the run under way
        step_s = worker.group.latency.policy_step.seconds(decodes.size, worker.progress(now_s)[0])
        given = (decodes.length(job) + num_done - job.prompt for job in decodes.jobs.values())
        return retry_ms_when_full(step_s, (self._longest_output - num for num in given))
