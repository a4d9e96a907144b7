"""Which requests have missed a target so far, so that a simulation can end as soon as too many have."""

from __future__ import annotations

import math

from halfmoon.sim.cluster import Targets
from halfmoon.sim.job import Job
from halfmoon.sim.result import Criterion


class Misses:
    """Owns who missed what. Knows no clock: it is told of first tokens and of ends."""

    def __init__(self, targets: Targets, criterion: Criterion, most: int) -> None:
        """Full with more than `most` requests that miss any target (joint), or one of them (marginal)."""
        self._ttft_s, self._tpot_s, self._tbt_s = (
            math.inf if one is None else one for one in (targets.ttft_s, targets.tpot_s, targets.tbt_s)
        )
        self._of_longest = targets.tbt_of == "longest"
        self._most = most
        self._is_joint = criterion == "joint"
        self._late: set[int] = set()  # for anything
        self.num_ttft = self.num_tpot = self.num_tbt = 0
        self.is_full = False

    def first(self, job: Job, answer_s: float) -> None:
        """Its first token is computed, and comes after `answer_s`."""
        if job.first_s + answer_s - job.start_s > self._ttft_s:
            self.num_ttft += 1
            self._note(job)

    def end(self, job: Job, answer_s: float) -> None:
        """It is over. Who was refused or failed missed everything."""
        is_done = job.outcome == "completed"
        if not is_done and job.first_s + answer_s - job.start_s <= self._ttft_s:
            self.num_ttft += 1
        gap_s = job.longest_gap_s if self._of_longest else job.tail_gap_s
        is_slow = job.generated > 1 and (job.end_s - job.first_s) / (job.generated - 1) > self._tpot_s
        self.num_tpot += not is_done or is_slow
        self.num_tbt += not is_done or gap_s > self._tbt_s  # NaN is not
        if not is_done or is_slow or gap_s > self._tbt_s:
            self._note(job)

    def _note(self, job: Job) -> None:
        self._late.add(job.index)
        num = len(self._late) if self._is_joint else max(self.num_ttft, self.num_tpot, self.num_tbt)
        self.is_full = num > self._most
