"""The prompts that a step computes: the rules of the engine's `Scheduler`, on counts instead of tokens.

`tests/sim/test_scheduler_agreement.py` holds the two against each other.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from operator import itemgetter
from typing import NamedTuple, Protocol

from halfmoon.kv.kv_policy import num_at_once
from halfmoon.policy.nested_step import OuterStep, admit_nested
from halfmoon.policy.preemption import Turns, in_turn
from halfmoon.policy.shared_step import ToAdmit, is_long, share_out, shorter_ones
from halfmoon.sim.worker.job import Job


class PromptChunk(NamedTuple):
    """`num_tokens` of a job after `cached` ones, in one attempt."""

    job: Job
    attempt: int
    cached: int
    num_tokens: int

    @property
    def is_last(self) -> bool:
        """Whether the prompt is complete with it, so that a token is sampled."""
        return self.cached + self.num_tokens == self.job.target


class Admission(Protocol):
    """What the queue needs of the worker's memory."""

    def admit(self, job: Job, now_s: float) -> bool:
        """Takes blocks and a slot for a waiting job; False if there are not enough."""

    def room(self) -> tuple[int, int]:
        """Available blocks and free slots."""

    def to_admit(self, job: Job) -> ToAdmit:
        """What a waiting job needs."""

    def num_blocks(self, job: Job) -> int:
        """Blocks of a waiting job's tokens, wherever they are."""


class PromptQueue:
    """Owns the order of prompts on one worker, whether they wait for memory or are being computed. Knows nothing of
    time.
    """

    __slots__ = ("_memory", "_num_pausable", "_step_tokens", "is_short", "newcomers", "prefilling", "turns", "waiting")

    def __init__(self, memory: Admission, step_tokens: int) -> None:
        """`step_tokens`: those of a whole step."""
        self._memory = memory
        self._step_tokens = step_tokens
        self.waiting: list[Job] = []  # by rank
        self.newcomers: list[Job] = []  # of these, in order: since a step began, or `nested` looked at them
        self.prefilling: list[Job] = []  # by rank
        self._num_pausable = 0  # jobs that may have risen above their class
        self.turns: Turns[Job] | None = None  # of the next step; None: nobody is paused, or may be
        self.is_short = False  # the last step left a job waiting for memory or for a slot

    def add(self, job: Job) -> None:
        """Queues a job by its rank."""
        job.state = "waiting"
        self._num_pausable += job.pauses.max_pause_s > 0
        _insert(self.waiting, job)
        self.newcomers.append(job)

    def remove(self, job: Job) -> None:
        """Removes a job that leaves this worker."""
        self._num_pausable -= job.pauses.max_pause_s > 0
        _take_out(self.waiting if job.state == "waiting" else self.prefilling, job)
        if job in self.newcomers:
            self.newcomers.remove(job)

    def last_tokens(self, now_s: float) -> list[PromptChunk]:
        """Prompts with a single token left, which a step treats as decodes."""
        for job in self.prefilling:
            _end_fetch(job)
        return [_chunk(job, 1, now_s) for job in self.prefilling if _ready(job) == 1 == job.uncomputed]

    def chunks(self, budget: int, now_s: float, most: Callable[[Job], int] | None = None) -> list[PromptChunk]:
        """Chunks of at most `budget` prompt tokens, by rank. They count as computed from now on.

        `most`: bounds the budget by the first job; None: beside no decodes.

        A long prompt shares the step with shorter ones behind it (`shared_step`). After the first job that cannot be
        admitted no other one is. A job whose prefix is being fetched computes what comes before it; then it is skipped.
        """
        chosen: list[PromptChunk] = []
        in_turn_only = self.turns is not None or self._num_pausable
        queue = self._in_turn(now_s) if in_turn_only else self._by_rank()
        while queue and budget > 0:
            job = queue.popleft()
            if job.state == "waiting":
                self.is_short = self.is_short or self._is_barred(job) or not self.begin(job, now_s)
                if self.is_short:
                    if not self.prefilling:
                        break
                    continue
            _end_fetch(job)
            ready = _ready(job)
            if not ready:
                continue
            if most is not None:
                budget, most = min(budget, most(job)), None
            num_tokens = min(ready, budget)
            if is_long(ready, budget, self._step_tokens, is_awaited=bool(job.rounds)):
                shorter = self._shorter(job.priority, ready, queue)
                share, others = share_out(ready, shorter, itemgetter(0), budget, self._step_tokens)
                if others and num_at_once(job.policy, job.prompt, job.computed, share) <= share:
                    num_tokens, budget = share, share + sum(num for _, num in others)
                    queue = deque(other for (_, other), _ in others)
            num_tokens = num_at_once(job.policy, job.prompt, job.computed, num_tokens)
            budget -= num_tokens
            chosen.append(_chunk(job, num_tokens, now_s))
        return chosen

    def nested(self, outer: OuterStep, now_s: float) -> list[PromptChunk]:
        """All that is to be computed of the newcomers that run in the middle of a step; each is looked at once."""
        newcomers, self.newcomers = [job for job in self.newcomers if _can_nest(job)], []
        if not newcomers or self.turns is not None or not self._has_room_for_waiting():
            return []
        priority = min(job.priority for job in (*self.waiting, *self.prefilling))
        able = in_turn([job for job in newcomers if job.priority == priority], now_s)

        def tokens_of(job: Job) -> int:
            return job.target - (self._memory.to_admit(job).num_cached if job.state == "waiting" else job.computed)

        admitted = admit_nested(outer, able, tokens_of, lambda job: self.begin(job, now_s))
        return [_chunk(job, job.uncomputed, now_s) for job in admitted]

    def _has_room_for_waiting(self) -> bool:
        """Whether all that wait have slots and memory, whatever the prefix cache has of them."""
        blocks, places = self._memory.room()
        wanted = sum(map(self._memory.num_blocks, self.waiting))
        return not self.is_short and wanted <= blocks and len(self.waiting) <= places

    def _in_turn(self, now_s: float) -> deque[Job]:
        return deque(in_turn([*self.prefilling, *self.waiting], now_s))

    def _by_rank(self) -> deque[Job]:
        """Jobs that a step can reach. None is admitted once memory or slots run out."""
        blocks, places = self._memory.room()
        waiting = self.waiting[: max(min(blocks, places), 0) + 1]
        if waiting and self.prefilling and waiting[0].rank < self.prefilling[-1].rank:
            return deque(sorted([*self.prefilling, *waiting], key=_rank))
        return deque([*self.prefilling, *waiting])

    def _shorter(self, priority: int, num_tokens: int, later: deque[Job]) -> list[tuple[int, Job]]:
        """See `shorter_ones`: those of that priority."""

        def to_admit(job: Job) -> ToAdmit | None:
            return None if self._is_barred(job) else self._memory.to_admit(job)

        def tokens_of(job: Job, num_cached: int) -> int:
            return _ready(job, num_cached) if job.priority == priority else 0

        blocks, places = self._memory.room()
        return shorter_ones(num_tokens, later, blocks, 0 if self.is_short else places, to_admit, tokens_of)

    def _is_barred(self, job: Job) -> bool:
        return self.turns is not None and self.turns.is_barred(job)

    def begin(self, job: Job, now_s: float) -> bool:
        """Gives a waiting job its room, if there is enough."""
        if not self._memory.admit(job, now_s):
            return False
        _take_out(self.waiting, job)
        job.state = "prefilling"
        _insert(self.prefilling, job)
        return True


def _chunk(job: Job, num_tokens: int, now_s: float) -> PromptChunk:
    if job.rounds:
        job.computed = max(job.computed, _round(job).start)  # layers of what is before arrive during the step
    chunk = PromptChunk(job, job.attempt, job.computed, num_tokens)
    job.computed += num_tokens
    if job.begun_s < 0:
        job.begun_s = now_s
    return chunk


def _can_nest(job: Job) -> bool:
    """Whether all of a prompt that waits can run at once, whatever else runs, and is handed over."""
    return job.decode != job.at and job.policy is None and is_plain(job)


def is_plain(job: Job) -> bool:
    """Whether all of the job's prompt is computed here, but for what was cached: nothing is loaded."""
    return job.front_end < 0 and not job.rounds


def _end_fetch(job: Job) -> None:
    """Counts what was fetched as computed, once all before it is."""
    if 0 <= job.front_end <= job.computed and not job.is_loading and not job.rounds:
        job.computed, job.front_end = job.load_end, -1


def _ready(job: Job, num_cached: int = 0) -> int:
    """Tokens that can be computed now, without those fetched meanwhile. `num_cached`: of a job that has not begun."""
    computed = max(job.computed, num_cached)
    if job.rounds:
        part = _round(job)
        return 0 if job.is_loading else max(part.stop - max(computed, part.start), 0)
    if job.front_end < 0:
        return job.target - computed
    front_end = max(job.front_end, computed)
    if job.is_loading or computed < front_end:
        return front_end - computed
    return job.target - max(job.load_end, front_end)


def _round(job: Job) -> range:
    """The tokens of a shared prompt that this worker computes next."""
    return next(part for part in job.rounds if part.stop > job.computed)


def _rank(job: Job) -> int:
    return job.rank


def _insert(jobs: list[Job], job: Job) -> None:
    if not jobs or jobs[-1].rank < job.rank:
        jobs.append(job)
    else:
        jobs.insert(bisect_left(jobs, job.rank, key=_rank), job)


def _take_out(jobs: list[Job], job: Job) -> None:
    at = bisect_left(jobs, job.rank, key=_rank)
    assert jobs[at] is job, "the job is not here"
    del jobs[at]
