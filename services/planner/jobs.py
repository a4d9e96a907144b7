"""Runs jobs: each waits for its turn, then runs in its process, both within one deadline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeAlias

from halfmoon.errors import DeadlineExceeded
from halfmoon.rpc.context import bounded_deadline_s
from services.planner.job import JobProgress, JobResult, PlanJob
from services.planner.job_queue import JobQueue


@dataclass(frozen=True, slots=True)
class JobWaits:
    """The job waits behind others."""

    num_ahead: int


JobUpdate: TypeAlias = JobWaits | JobProgress | JobResult
RunJob: TypeAlias = Callable[[PlanJob, Mapping[str, bytes]], AsyncGenerator[JobProgress | JobResult, None]]


class Jobs:
    """Owns the queue of jobs. `run` runs a job whose turn it is; closing its iterator ends the job."""

    def __init__(self, queue: JobQueue, deadline_s: float, run: RunJob) -> None:
        self._queue = queue
        self._deadline_s = deadline_s
        self._run = run

    async def updates(self, job: PlanJob, files: Mapping[str, bytes]) -> AsyncGenerator[JobUpdate, None]:
        """Yields the updates of a job, its result last. Closing the iterator ends the job.

        Raises NoCapacity, DeadlineExceeded, and the job's errors.
        """
        deadline_s = bounded_deadline_s(self._deadline_s)
        deadline_at_s = asyncio.get_running_loop().time() + deadline_s
        with self._queue.ticket() as ticket:
            while num_ahead := self._queue.num_ahead(ticket):
                ticket.moved.clear()
                yield JobWaits(num_ahead)
                try:
                    async with asyncio.timeout_at(deadline_at_s):
                        await ticket.moved.wait()
                except TimeoutError as error:
                    raise _overdue(deadline_s) from error
            async with aclosing(self._run(job, files)) as events:
                while True:
                    try:
                        async with asyncio.timeout_at(deadline_at_s):
                            event = await anext(events)
                    except TimeoutError as error:
                        raise _overdue(deadline_s) from error
                    yield event
                    if isinstance(event, JobResult):
                        return


def _overdue(deadline_s: float) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"not done within {deadline_s:.0f} s: ask for fewer requests or GPUs, or give it more time with --deadline-s"
    )
