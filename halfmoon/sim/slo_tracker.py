"""Tracks SLO misses and growing queues, so that a simulation ends as soon as both are known."""

from __future__ import annotations

import itertools
import math
from typing import Literal

from halfmoon.sim.cluster.cluster_spec import SloTargets
from halfmoon.sim.result import Criterion
from halfmoon.sim.worker.job import Job

Stage = Literal["filling", "counting", "behind"]
"""The stage of the next request: passes that fill the cluster, passes that count, or later ones that only keep the
cluster busy while the counted ones finish.
"""


class SloTracker:
    """Owns the misses of each request, and the number of requests inside at the end of each pass. Knows no clock: the
    simulation reports arrivals, first tokens and ends.

    The same requests may arrive in several passes of equal size. A pass is *steady* if its last arrival finds at most
    `max_growth` more requests inside than the last arrival of the pass before, and if the same holds for that pass, if
    there is one.
    """

    def __init__(
        self,
        targets: SloTargets,
        criterion: Criterion,
        max_misses: int,
        num_passes: int = 0,
        num_each: int = 1 << 62,
        max_growth: float = 0.0,
        max_left: float = math.inf,
        *,
        is_filled_first: bool = False,
    ) -> None:
        """A pass fails once more than `max_misses` of its requests miss any target (joint) or the same target
        (marginal).

        There are `num_passes` passes of `num_each` requests; 0 means a single pass that is never steady.

        With `is_filled_first`, the passes up to a steady one, at most `num_passes`, only fill the cluster. The passes
        after them count and must become steady themselves. A filling pass that fails decides the run, too.

        A steady pass is held as soon as neither it nor an earlier one can still fail; later passes then do not matter.
        The run is decided once each of these passes also has at most `max_left` unfinished requests, and each of those
        has a token.
        """
        self._ttft_s, self._tpot_s, self._tbt_s = (
            math.inf if one is None else one for one in (targets.ttft_s, targets.tpot_s, targets.tbt_s)
        )
        self._of_longest = targets.tbt_of == "longest"
        self._max_misses = max_misses
        self._is_joint = criterion == "joint"
        self._max_filling = num_passes
        self._num_passes = 2 * num_passes if is_filled_first else num_passes
        num_passes = max(self._num_passes, 1)
        self._late: list[set[int]] = [set() for _ in range(num_passes)]  # requests of each pass that missed any target
        self._num_ttft, self._num_tpot, self._num_tbt = ([0] * num_passes for _ in range(3))
        self._num_each = num_each
        self._max_left = max_left
        self._max_growth = max_growth
        self._num_ended = 0
        self._left = [num_each] * num_passes  # requests of each pass that have not ended
        self._tokenless = [num_each] * num_passes  # requests of each pass without a first token
        self._num_inside: list[int] = []  # at the last arrival of each pass
        self._is_filling = is_filled_first
        self.first_pass = 0  # the first pass that counts
        self.full_pass: int | None = None  # the first pass that failed
        self.steady_pass: int | None = None  # the first pass that was steady
        self.is_held = False  # the steady pass is held
        self.is_decided = False  # no open question: a pass failed, or the held pass is over

    @property
    def stage(self) -> Stage:
        """The stage of the next arrival. `behind`: every request of the counted passes has a first token."""
        if self._is_filling:
            return "filling"
        steady = self.steady_pass
        is_behind = steady is not None and not any(self._tokenless[self.first_pass : steady + 1])
        return "behind" if is_behind else "counting"

    def came(self, index: int) -> None:
        """Notes an arrival; requests arrive in order."""
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
            self.is_decided = self.is_decided or len(inside) == self._max_filling

    def first(self, job: Job, answer_s: float) -> None:
        """Notes a first token, which reaches the client after `answer_s`."""
        at = job.index // self._num_each
        self._tokenless[at] -= 1
        if job.first_s + answer_s - job.start_s > self._ttft_s:
            self._num_ttft[at] += 1
            self._note(job)

    def end(self, job: Job, answer_s: float) -> None:
        """Notes the end of a request. A refused or failed one missed every target."""
        at = job.index // self._num_each
        is_done = job.outcome == "completed"
        if not is_done and job.first_s + answer_s - job.start_s <= self._ttft_s:
            self._num_ttft[at] += 1
        gap_s = job.longest_gap_s if self._of_longest else job.tail_gap_s
        is_slow = job.generated > 1 and (job.end_s - job.first_s) / (job.generated - 1) > self._tpot_s
        self._num_tpot[at] += not is_done or is_slow
        self._num_tbt[at] += not is_done or gap_s > self._tbt_s  # a NaN gap counts as met
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
        """Whether a pass leaves as many requests inside as the one before, twice in a row.

        Once is not enough: the first answers all end together, and then the cluster fills further. It is enough if
        hardly any request stays inside.
        """
        inside = self._num_inside
        if len(inside) - self.first_pass == 1:
            return inside[-1] <= self._max_growth
        last = [0, *inside][-3:]
        return all(after - before <= self._max_growth for before, after in itertools.pairwise(last))

    def _cannot_be_full(self, number: int) -> bool:
        """Whether neither this pass nor an earlier one can still fail."""
        return all(self._left[at] + self._num_late(at) <= self._max_misses for at in range(self.first_pass, number + 1))

    def _are_few_left(self, number: int) -> bool:
        """Whether this pass and the earlier ones are nearly finished; always true without a limit."""
        counting = slice(self.first_pass, number + 1)
        left, tokenless = self._left[counting], self._tokenless[counting]
        return max(left) <= self._max_left and (self._max_left == math.inf or max(tokenless) <= 0)

    def _num_late(self, at: int) -> int:
        if self._is_joint:
            return len(self._late[at])
        return max(self._num_ttft[at], self._num_tpot[at], self._num_tbt[at])

    def _note(self, job: Job) -> None:
        at = job.index // self._num_each
        self._late[at].add(job.index)
        if at >= self.first_pass and self._num_late(at) > self._max_misses and not self.is_held:
            self.full_pass = at if self.full_pass is None else self.full_pass
            self.is_decided = True
