"""The sequences that decode on one worker. A batch needs no event between two changes, however many steps it runs."""

from __future__ import annotations

import heapq
import math

from halfmoon.kv.kv_policy import Bound, bound_of
from halfmoon.sim.latency_sources.host_memory import Cycle
from halfmoon.sim.token_times import StepEnds
from halfmoon.sim.worker.job import Job


class DecodeBatch:
    """Owns the decoding sequences, the number of finished steps, and the step at which each sequence ends. Knows
    nothing of the clock or of free memory.

    The next step computes K and V of a sequence's newest token. A sequence of length `L` (with that token) therefore
    needs a new block when `L - 1` is a multiple of the block size. `_offsets` counts sequences by `(L - 1 - steps) %
    block_tokens`, which is constant while they decode. Sequences that a policy bounds are not counted there: from some
    length on they need no more blocks, and attend to as many tokens as before.
    """

    __slots__ = (
        "_block_tokens",
        "_bound_from",
        "_bounds",
        "_ends",
        "_ends_s",
        "_offsets",
        "context",
        "jobs",
        "num_growing",
        "num_pausable",
        "size",
        "steps",
    )

    def __init__(self, block_tokens: int, *, keeps_times: bool = True) -> None:
        """`keeps_times`: record the time of every token in `Job.later_s`."""
        self._block_tokens = block_tokens
        self._offsets = [0] * block_tokens
        self._ends: list[tuple[int, int, int, Job]] = []  # last step, rank, attempt
        self._bounds: list[tuple[int, int]] = []  # step from which on a job is bounded, rank
        self._bound_from: dict[int, int] = {}  # the same of those that are here, by rank
        self._ends_s = StepEnds() if keeps_times else None
        self.jobs: dict[int, Job] = {}  # by rank
        self.size = 0
        self.num_growing = 0  # jobs that attend to one more token in each step
        self.num_pausable = 0  # jobs whose class allows pauses
        self.context = 0  # tokens that the next step attends to
        self.steps = 0

    def add(self, job: Job, length: int) -> None:
        """Adds a job, which decodes from the next step on and needs at least one more token."""
        job.join_step, job.join_length = self.steps, length
        bound = self._bound(job)
        if bound is not None and length > bound.most_tokens:
            self.context += bound.mean_seen
        else:
            self._count(length, 1)
            if bound is not None:
                self._bound_from[job.rank] = self.steps + bound.most_tokens + 1 - length
                heapq.heappush(self._bounds, (self._bound_from[job.rank], job.rank))
        heapq.heappush(self._ends, (self.steps + job.num_left, job.rank, job.attempt, job))
        self.jobs[job.rank] = job
        self.size += 1
        self.num_pausable += job.pauses.max_pause_s > 0

    def length(self, job: Job) -> int:
        """Length of a decoding job, including its newest token."""
        return job.join_length + self.steps - job.join_step

    def drop(self, job: Job) -> None:
        """Removes a job, which keeps the tokens that it has."""
        length = self.length(job)
        if self._ends_s is not None and self.steps > job.join_step:
            job.later_s.append(self._ends_s.since(job.join_step))
        job.generated += self.steps - job.join_step
        job.join_step, job.join_length = self.steps, length
        bound = self._bound(job)
        if bound is not None and length > bound.most_tokens:
            self.context -= bound.mean_seen
        else:
            self._count(length, -1)
            self._bound_from.pop(job.rank, None)
        del self.jobs[job.rank]
        self.size -= 1
        self.num_pausable -= job.pauses.max_pause_s > 0

    def steps_left(self) -> int:
        """Steps until the first job has all its tokens; the batch must not be empty."""
        while True:
            end_step, rank, attempt, job = self._ends[0]
            if self.jobs.get(rank) is job and job.attempt == attempt and end_step == self._end_step(job):
                return end_step - self.steps
            heapq.heappop(self._ends)

    def most_alike(self, num_steps: int) -> int:
        """Of the next `num_steps`, at least one, how many run before a policy bounds another sequence."""
        while self._bounds and self._bound_from.get(self._bounds[0][1]) != self._bounds[0][0]:
            heapq.heappop(self._bounds)  # of one that has left, or joined again since
        return max(min(num_steps, self._bounds[0][0] - self.steps), 1) if self._bounds else num_steps

    def new_blocks(self, first: int, last: int) -> int:
        """Blocks needed by the steps from `first` up to, not including, `last`, counted from now."""
        whole, rest = divmod(last - first, self._block_tokens)
        # the offset that needs a block at `first`; each later step needs the one below
        start = -(self.steps + first) % self._block_tokens
        result = whole * self.num_growing
        if rest:
            offsets = self._offsets
            low = start - rest + 1
            result += sum(offsets[max(low, 0) : start + 1]) + (sum(offsets[low:]) if low < 0 else 0)
        return result

    def affordable_steps(self, most: int, num_blocks: int) -> int:
        """How many of the next `most` steps fit into `num_blocks`, the first step being paid for already; at least
        1.
        """
        if self.new_blocks(1, most) <= num_blocks:
            return most
        low, high = 1, most  # `low` steps fit, `high` steps do not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.new_blocks(1, middle) <= num_blocks else (low, middle)
        return low

    def needs_block(self, job: Job) -> bool:
        """Whether the job's next step begins a block."""
        length, bound = self.length(job), self._bound(job)
        return (length - 1) % self._block_tokens == 0 and (bound is None or length <= bound.most_tokens)

    def advance(self, end_s: float) -> list[Job]:
        """Ends one step at `end_s`; returns the jobs that now have all their tokens, by rank, and removes them."""
        if self._ends_s is not None:
            self._make_room(self._ends_s, 1)
            self._ends_s.add(end_s)
        return self._advance(1)

    def advance_run(self, num_steps: int, begun_s: float, cycle: Cycle) -> list[Job]:
        """Ends `num_steps` back-to-back steps begun at `begun_s`, as `advance` does. The batch must not have changed
        meanwhile.
        """
        if self._ends_s is not None:
            self._make_room(self._ends_s, num_steps)
            first_s, growth_s = cycle.base_s + cycle.slope_s * self.context, cycle.slope_s * self.num_growing
            self._ends_s.add_run(begun_s, num_steps, Cycle(first_s, growth_s))
        return self._advance(num_steps)

    def _advance(self, num_steps: int) -> list[Job]:
        self.steps += num_steps
        self.context += num_steps * self.num_growing
        while self._bounds and self._bounds[0][0] <= self.steps:
            step, rank = heapq.heappop(self._bounds)
            if self._bound_from.get(rank) == step:
                del self._bound_from[rank]
                self._stop_growing(self.jobs[rank])
        ended: list[Job] = []
        while self.size and self.steps_left() == 0:
            job = heapq.heappop(self._ends)[3]
            self.drop(job)
            ended.append(job)
        return ended

    def duration_s(self, num_steps: int, cycle: Cycle) -> float:
        """Seconds of the next `num_steps` steps of an unchanged batch."""
        first_s = cycle.base_s + cycle.slope_s * self.context
        return num_steps * first_s + cycle.slope_s * self.num_growing * (num_steps * (num_steps - 1) // 2)

    def steps_begun(self, elapsed_s: float, cycle: Cycle) -> int:
        """How many of the next steps have begun after `elapsed_s`, at least one; this is also the number of the running
        step.
        """
        first_s = cycle.base_s + cycle.slope_s * self.context
        growth_s = cycle.slope_s * self.num_growing
        if growth_s <= 0:
            result = elapsed_s / first_s
        else:
            half = first_s - growth_s / 2
            result = 2 * elapsed_s / (half + math.sqrt(half * half + 2 * growth_s * elapsed_s))
        num = max(int(result), 1)
        while self.duration_s(num, cycle) < elapsed_s:
            num += 1
        while num > 1 and self.duration_s(num - 1, cycle) >= elapsed_s:
            num -= 1
        return num

    def _bound(self, job: Job) -> Bound | None:
        return None if job.policy is None else bound_of(job.policy, self._block_tokens)

    def _stop_growing(self, job: Job) -> None:
        """Counts a job as bounded, whose length has just passed its bound."""
        bound = self._bound(job)
        assert bound is not None
        self._count(self.length(job), -1)
        self.context += bound.mean_seen

    def _count(self, length: int, change: int) -> None:
        self._offsets[(length - 1 - self.steps) % self._block_tokens] += change
        self.num_growing += change
        self.context += change * length

    def _make_room(self, ends_s: StepEnds, num_steps: int) -> None:
        if not ends_s.has_room(num_steps):
            oldest = min((job.join_step for job in self.jobs.values()), default=self.steps)
            ends_s.keep_from(oldest, num_steps)

    def _end_step(self, job: Job) -> int:
        return job.join_step + job.num_left
