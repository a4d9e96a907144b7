"""Which prompts a step computes: the rules of the engine's `Scheduler`, on counts instead of tokens.

`tests/sim/test_scheduler_agreement.py` holds the two against each other.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from typing import NamedTuple, Protocol

from halfmoon.sim.cluster.job import Job


class PromptChunk(NamedTuple):
    """So many tokens of a job, in one attempt of it, after `cached` ones."""

    job: Job
    attempt: int
    cached: int
    num_tokens: int


class Admission(Protocol):
    """What the queue asks of the worker's memory."""

    def admit(self, job: Job) -> bool:
        """Takes pages for all that a waiting job has to compute, and a place; False where there are not enough."""
        ...

    def room(self) -> tuple[int, int]:
        """Pages available and places free."""
        ...

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold so many tokens."""
        ...


class PromptQueue:
    """Owns the order of prompts on one worker: waiting without memory, or being computed."""

    __slots__ = ("_memory", "is_short", "prefilling", "waiting")

    def __init__(self, memory: Admission) -> None:
        self._memory = memory
        self.waiting: list[Job] = []  # by rank
        self.prefilling: list[Job] = []  # by rank
        self.is_short = False  # the last step left somebody waiting for memory or for a place

    def add(self, job: Job) -> None:
        """Queues a job behind those before it in rank."""
        job.state = "waiting"
        _insert(self.waiting, job)

    def remove(self, job: Job) -> None:
        """It is elsewhere from now on."""
        _take_out(self.waiting if job.state == "waiting" else self.prefilling, job)

    def last_tokens(self, now_s: float) -> list[PromptChunk]:
        """Prompts of which one token is left: to a step they are decodes."""
        return [_chunk(job, 1, now_s) for job in self.prefilling if _ready(job) == 1 == job.uncomputed]

    def chunks(self, budget: int, now_s: float) -> list[PromptChunk]:
        """At most `budget` tokens of prompts, by rank; they count as computed from now on.

        What a long prompt leaves to shorter ones goes to the shortest first; after the first that cannot be admitted
        no other is. A job whose prefix is on its way computes what comes before it, and is passed over then.
        """
        chosen: list[PromptChunk] = []
        queue = self._by_rank()
        while queue and budget > 0:
            job = queue.popleft()
            if job.state == "waiting":
                self.is_short = self.is_short or not self._admitted(job)
                if self.is_short:
                    if not self.prefilling:
                        break
                    continue
            ready = _ready(job)
            if not ready:
                continue
            room = budget
            if ready > budget:
                shorter = self._shorter(ready, queue)
                if shorter:
                    room -= min(sum(map(_ready, shorter)), budget // 2)
                    overtaking = {one.index for one in shorter}
                    queue = deque([*shorter, *(one for one in queue if one.index not in overtaking)])
            num_tokens = min(ready, room)
            budget -= num_tokens
            chosen.append(_chunk(job, num_tokens, now_s))
        return chosen

    def _by_rank(self) -> deque[Job]:
        """Those that a step may come to: nobody can be admitted once memory or places are out."""
        pages, places = self._memory.room()
        waiting = self.waiting[: max(min(pages, places), 0) + 1]
        if waiting and self.prefilling and waiting[0].index < self.prefilling[-1].index:
            return deque(sorted([*self.prefilling, *waiting], key=_rank))
        return deque([*self.prefilling, *waiting])

    def _shorter(self, ready: int, later: deque[Job]) -> list[Job]:
        """Those that share the step with a prompt of `ready` tokens, too long for it: less to do, and room for them."""
        pages, places = self._memory.room()
        shorter = []
        for job in later:
            if job.state == "waiting":
                pages -= self._memory.pages_for(job.target)
                places -= 1
                if self.is_short or pages < 0 or places < 0:
                    break
            if 0 < _ready(job) < ready:
                shorter.append(job)
        return sorted(shorter, key=_ready)

    def _admitted(self, job: Job) -> bool:
        if not self._memory.admit(job):
            return False
        _take_out(self.waiting, job)
        job.state = "prefilling"
        _insert(self.prefilling, job)
        return True


def _chunk(job: Job, num_tokens: int, now_s: float) -> PromptChunk:
    chunk = PromptChunk(job, job.attempt, job.computed, num_tokens)
    job.computed += num_tokens
    if job.begun_s < 0:
        job.begun_s = now_s
    return chunk


def _ready(job: Job) -> int:
    """Tokens that can be computed now; what was fetched meanwhile is skipped."""
    if job.front_end < 0:
        return job.target - job.computed
    if job.is_loading or job.computed < job.front_end:
        return job.front_end - job.computed
    job.computed, job.front_end = job.load_end, -1
    return job.target - job.computed


def _rank(job: Job) -> int:
    return job.index


def _insert(jobs: list[Job], job: Job) -> None:
    if not jobs or jobs[-1].index < job.index:
        jobs.append(job)
    else:
        jobs.insert(bisect_left(jobs, job.index, key=_rank), job)


def _take_out(jobs: list[Job], job: Job) -> None:
    at = bisect_left(jobs, job.index, key=_rank)
    assert jobs[at] is job, "the job is not here"
    del jobs[at]
