"""The sequences that decode on one worker, many steps at a time: between two changes a batch needs no events."""

from __future__ import annotations

import heapq
import math

from halfmoon.sim.cluster.job import Job
from halfmoon.sim.latency_sources.latency_model import Cycle
from halfmoon.sim.token_times import StepEnds


class DecodeBatch:
    """Owns who decodes, the steps done, and when each sequence ends. Knows nothing of the clock and of free memory.

    A sequence of length `L` (the newest token included, whose K and V the next step computes) needs a new page for
    that step if `L - 1` is a multiple of the page. `_phases` counts sequences by `(L - 1 - steps) % page_tokens`,
    which does not change while they decode.
    """

    __slots__ = ("_ends", "_ends_s", "_page_tokens", "_phases", "context", "jobs", "size", "steps")

    def __init__(self, page_tokens: int, *, keeps_times: bool = True) -> None:
        """`keeps_times`: of every token, in `Job.later_s`."""
        self._page_tokens = page_tokens
        self._phases = [0] * page_tokens
        self._ends: list[tuple[int, int, int, Job]] = []  # step after which, rank, attempt
        self._ends_s = StepEnds() if keeps_times else None
        self.jobs: dict[int, Job] = {}  # by rank
        self.size = 0
        self.context = 0  # tokens that the next step attends to
        self.steps = 0

    def add(self, job: Job, length: int) -> None:
        """It decodes from the next step on until it has all its tokens, at least one more."""
        job.join_step, job.join_length = self.steps, length
        self._phases[(length - 1 - self.steps) % self._page_tokens] += 1
        heapq.heappush(self._ends, (self.steps + job.num_left, job.index, job.attempt, job))
        self.jobs[job.index] = job
        self.size += 1
        self.context += length

    def length(self, job: Job) -> int:
        """Of one of them, its newest token included."""
        return job.join_length + self.steps - job.join_step

    def drop(self, job: Job) -> None:
        """It decodes no more, and has what it got until now."""
        length = self.length(job)
        if self._ends_s is not None and self.steps > job.join_step:
            job.later_s.append(self._ends_s.since(job.join_step))
        job.generated += self.steps - job.join_step
        job.join_step, job.join_length = self.steps, length
        self._phases[(length - 1 - self.steps) % self._page_tokens] -= 1
        del self.jobs[job.index]
        self.size -= 1
        self.context -= length

    def steps_left(self) -> int:
        """Steps until somebody has all tokens; there must be somebody."""
        while True:
            end_step, index, attempt, job = self._ends[0]
            if self.jobs.get(index) is job and job.attempt == attempt and end_step == self._end_step(job):
                return end_step - self.steps
            heapq.heappop(self._ends)

    def new_pages(self, first: int, last: int) -> int:
        """Pages to be taken for the steps from `first` to before `last`, counted from now."""
        whole, rest = divmod(last - first, self._page_tokens)
        start = -(self.steps + first) % self._page_tokens  # the phase that needs a page at `first`; then the one below
        found = whole * self.size
        if rest:
            phases = self._phases
            low = start - rest + 1
            found += sum(phases[max(low, 0) : start + 1]) + (sum(phases[low:]) if low < 0 else 0)
        return found

    def affordable_steps(self, most: int, num_pages: int) -> int:
        """How many of the next `most` steps `num_pages` are enough for, beside those of the first one; at least 1."""
        if self.new_pages(1, most) <= num_pages:
            return most
        low, high = 1, most  # enough for `low`, not for `high`
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.new_pages(1, middle) <= num_pages else (low, middle)
        return low

    def needs_page(self, job: Job) -> bool:
        """Whether its next step begins a page."""
        return (self.length(job) - 1) % self._page_tokens == 0

    def advance(self, end_s: float) -> list[Job]:
        """A step ended then; who has all tokens by that, in the order of rank. They decode no more."""
        if self._ends_s is not None:
            self._make_room(self._ends_s, 1)
            self._ends_s.add(end_s)
        return self._advance(1)

    def advance_run(self, num_steps: int, begun_s: float, cycle: Cycle) -> list[Job]:
        """The same after so many steps, back to back from `begun_s` on, with nobody coming or going."""
        if self._ends_s is not None:
            self._make_room(self._ends_s, num_steps)
            first_s, growth_s = cycle.base_s + cycle.slope_s * self.context, cycle.slope_s * self.size
            self._ends_s.add_run(begun_s, num_steps, Cycle(first_s, growth_s))
        return self._advance(num_steps)

    def _advance(self, num_steps: int) -> list[Job]:
        self.steps += num_steps
        self.context += num_steps * self.size
        ended: list[Job] = []
        while self.size and self.steps_left() == 0:
            job = heapq.heappop(self._ends)[3]
            self.drop(job)
            ended.append(job)
        return ended

    def duration_s(self, num_steps: int, cycle: Cycle) -> float:
        """Of the next so many steps, with nobody coming or going."""
        first_s = cycle.base_s + cycle.slope_s * self.context
        return num_steps * first_s + cycle.slope_s * self.size * (num_steps * (num_steps - 1) // 2)

    def steps_begun(self, elapsed_s: float, cycle: Cycle) -> int:
        """How many of the next steps have begun after so long, at least one: the number of the one under way."""
        first_s = cycle.base_s + cycle.slope_s * self.context
        growth_s = cycle.slope_s * self.size
        if growth_s <= 0:
            found = elapsed_s / first_s
        else:
            half = first_s - growth_s / 2
            found = 2 * elapsed_s / (half + math.sqrt(half * half + 2 * growth_s * elapsed_s))
        num = max(int(found), 1)
        while self.duration_s(num, cycle) < elapsed_s:
            num += 1
        while num > 1 and self.duration_s(num - 1, cycle) >= elapsed_s:
            num -= 1
        return num

    def _make_room(self, ends_s: StepEnds, num_steps: int) -> None:
        if not ends_s.has_room(num_steps):
            oldest = min((job.join_step for job in self.jobs.values()), default=self.steps)
            ends_s.keep_from(oldest, num_steps)

    def _end_step(self, job: Job) -> int:
        return job.join_step + job.num_left
