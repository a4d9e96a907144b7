"""Jobs whose decoding gives way to higher classes, as the engine's `PausedSequences`, on counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from halfmoon.policy.preemption import last_in_turn
from halfmoon.sim.worker.job import Job
from halfmoon.sim.worker.job_blocks import JobBlocks


class PausedJobs:
    """Owns one worker's paused jobs. They keep their blocks until others need them, and get new ones then.

    Host memory has room for all that moves out, and copies take no time.
    """

    __slots__ = ("_blocks", "_jobs", "num_begun")

    def __init__(self, blocks: JobBlocks) -> None:
        self.num_begun = 0
        self._blocks = blocks
        self._jobs: dict[Job, bool] = {}  # whether it has moved out

    def __iter__(self) -> Iterator[Job]:
        return iter(tuple(self._jobs))

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, job: Job, now_s: float) -> None:
        """Begins a pause of a job that left the batch."""
        job.pauses.pause(now_s)
        job.state = "paused"
        self._jobs[job] = False
        self.num_begun += 1

    def resume(self, job: Job, now_s: float) -> None:
        """Ends a pause; takes blocks for what moved out, which must be available."""
        if self._jobs.pop(job):
            self._blocks.move_in(job)
        job.state = "decoding"
        job.pauses.resume(now_s)

    def clear(self, now_s: float) -> None:
        """Ends all pauses, and forgets the jobs with their memory."""
        for job in self._jobs:
            job.pauses.resume(now_s)
        self._jobs.clear()

    def lacks(self, job: Job) -> int:
        """Blocks that a job needs to go on with what it has computed."""
        return self._blocks.num_held(job, job.join_length - 1) if self._jobs[job] else 0

    def num_needed(self, job: Job, uses: Counter[int]) -> int:
        """Blocks that a job needs for its next token, besides those that stay in use anyway."""
        needed = self._blocks.num_held(job, job.join_length)
        return needed if self._jobs[job] else needed - self._blocks.num_shared(job, uses)

    def num_reclaimable(self, uses: Counter[int]) -> int:
        """Blocks that would be available if all moved out."""
        own = sum(self._blocks.num_own(job) for job, is_out in self._jobs.items() if not is_out)
        return own + self._blocks.num_only(uses)

    def move_out(self, now_s: float) -> bool:
        """Moves the last in turn out of its blocks; False if all have moved out."""
        kept = [job for job, is_out in self._jobs.items() if not is_out]
        if not kept:
            return False
        job = last_in_turn(kept, now_s)
        self._blocks.move_out(job)
        self._jobs[job] = True
        return True

    def uses(self) -> Counter[int]:
        """How many of the paused jobs use each cached prefix block."""
        return Counter(one for job, is_out in self._jobs.items() if not is_out for one in job.cached_blocks)
