"""Which requests have missed a target so far, and whether queues still grow: a simulation ends when both are known."""

from __future__ import annotations

import itertools
import math
from typing import Literal

from halfmoon.sim.cluster.cluster_spec import SloTargets
from halfmoon.sim.cluster.job import Job
from halfmoon.sim.result import Criterion

Stage = Literal["filling", "counting", "behind"]
"""What comes before the passes that count, of these, or behind them while the last ones of them are served."""


class SloTracker:
    """Owns who missed what, and how many were inside at the end of each pass. Knows no clock: it is told of arrivals,
    first tokens and ends.

    The same requests may come in several passes, as many in each. A pass is *steady* when its last arrival finds no
    more requests inside than that of the pass before did, but for `most_more`, and so was the pass before, if any.
    """

    def __init__(
        self,
        targets: SloTargets,
        criterion: Criterion,
        most: int,
        num_passes: int = 0,
        num_each: int = 1 << 62,
        most_more: float = 0.0,
        most_left: float = math.inf,
        *,
        is_filled_first: bool = False,
    ) -> None:
        """Full with more than `most` requests of a pass that miss any target (joint), or one of them (marginal).

        Of `num_passes` each has `num_each` requests; with none there is one pass, and none is steady. Where the cluster
        `is_filled_first` the passes up to a steady one, as many at most, only fill it: those behind them count, and
        become steady on their own. A steady pass counts as soon as who is left of it and of those before it cannot make
        one of them full; then passes behind it do not matter. All is decided when, of each, at most `most_left` are
        left, too, and all of these have a token.
        """
        self._ttft_s, self._tpot_s, self._tbt_s = (
            math.inf if one is None else one for one in (targets.ttft_s, targets.tpot_s, targets.tbt_s)
        )
        self._of_longest = targets.tbt_of == "longest"
        self._most = most
        self._is_joint = criterion == "joint"
        self._most_filling = num_passes
        self._num_passes = 2 * num_passes if is_filled_first else num_passes
        num_passes = max(self._num_passes, 1)
        self._late: list[set[int]] = [set() for _ in range(num_passes)]  # for anything
        self._num_ttft, self._num_tpot, self._num_tbt = ([0] * num_passes for _ in range(3))
        self._num_each = num_each
        self._most_left = most_left
        self._most_more = most_more
        self._num_ended = 0
        self._left = [num_each] * num_passes  # of each pass, that are not over
        self._tokenless = [num_each] * num_passes  # the same, that have no token either
        self._num_inside: list[int] = []  # as the last request of each pass came
        self._is_filling = is_filled_first
        self.first_pass = 0  # that counts
        self.full_pass: int | None = None  # the first one
        self.steady_pass: int | None = None  # the first one
        self.is_held = False  # the steady pass counts
        self.is_decided = False  # nothing more has to be known: too many missed, or that pass is over

    @property
    def stage(self) -> Stage:
        """Where the next request to come is. Behind: everybody of the passes that count has a first token."""
        if self._is_filling:
            return "filling"
        steady = self.steady_pass
        is_behind = steady is not None and not any(self._tokenless[self.first_pass : steady + 1])
        return "behind" if is_behind else "counting"

    def came(self, index: int) -> None:
        """A request is there; all before it came before."""
        inside = self._num_inside
        if (index + 1) % self._num_each or len(inside) == self._num_passes:
            return
        inside.append(index + 1 - self._num_ended)
        if self.steady_pass is None and self._is_as_full_as_before():
            if self._is_filling:
                self._is_filling, self.first_pass = False, len(inside)
            else:
                self.steady_pass = len(inside) - 1
        elif self._is_filling:
            self.is_decided = self.is_decided or len(inside) == self._most_filling

    def first(self, job: Job, answer_s: float) -> None:
        """Its first token is computed, and comes after `answer_s`."""
        at = job.index // self._num_each
        self._tokenless[at] -= 1
        if job.first_s + answer_s - job.start_s > self._ttft_s:
            self._num_ttft[at] += 1
            self._note(job)

    def end(self, job: Job, answer_s: float) -> None:
        """It is over. Who was refused or failed missed everything."""
        at = job.index // self._num_each
        is_done = job.outcome == "completed"
        if not is_done and job.first_s + answer_s - job.start_s <= self._ttft_s:
            self._num_ttft[at] += 1
        gap_s = job.longest_gap_s if self._of_longest else job.tail_gap_s
        is_slow = job.generated > 1 and (job.end_s - job.first_s) / (job.generated - 1) > self._tpot_s
        self._num_tpot[at] += not is_done or is_slow
        self._num_tbt[at] += not is_done or gap_s > self._tbt_s  # NaN is not
        if not is_done or is_slow or gap_s > self._tbt_s:
            self._note(job)
        self._count(job, at)

    def _count(self, job: Job, at: int) -> None:
        self._num_ended += 1
        self._left[at] -= 1
        self._tokenless[at] -= job.first_s < 0
        if self.steady_pass is not None and not self.is_decided:
            self.is_held = self.is_held or self._cannot_be_full(self.steady_pass)
            self.is_decided = self.is_held and self._are_few_left(self.steady_pass)

    def _is_as_full_as_before(self) -> bool:
        """Twice in a row: the first answers end all at once, and then it fills on. Where a pass leaves next to nobody
        inside, that is enough."""
        inside = self._num_inside
        if len(inside) - self.first_pass == 1:
            return inside[-1] <= self._most_more
        last = [0, *inside][-3:]
        return all(after - before <= self._most_more for before, after in itertools.pairwise(last))

    def _cannot_be_full(self, number: int) -> bool:
        """That pass and those before it, any more."""
        return all(self._left[at] + self._num_late(at) <= self._most for at in range(self.first_pass, number + 1))

    def _are_few_left(self, number: int) -> bool:
        """Of that pass and those before it; none has to be waited for unless there is a limit."""
        counting = slice(self.first_pass, number + 1)
        left, tokenless = self._left[counting], self._tokenless[counting]
        return max(left) <= self._most_left and (self._most_left == math.inf or max(tokenless) <= 0)

    def _num_late(self, at: int) -> int:
        if self._is_joint:
            return len(self._late[at])
        return max(self._num_ttft[at], self._num_tpot[at], self._num_tbt[at])

    def _note(self, job: Job) -> None:
        at = job.index // self._num_each
        self._late[at].add(job.index)
        if at >= self.first_pass and self._num_late(at) > self._most and not self.is_held:
            self.full_pass = at if self.full_pass is None else self.full_pass
            self.is_decided = True
