"""When tokens came: kept once for all that decode together, and what the gaps between one request's tokens say."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from halfmoon.sim.latency_sources.latency_model import Cycle
from halfmoon.sim.workloads.workload import Floats

_MIN_ROOM = 1024
_NUMBERS = np.arange(1.0, 1025)  # of the steps of all but the longest runs


class StepEnds:
    """Owns when the newest steps of one batch ended, by their number. Each gave a token to everybody in the batch."""

    __slots__ = ("_ends_s", "_first", "_num")

    def __init__(self) -> None:
        self._ends_s: Floats = np.empty(_MIN_ROOM)
        self._first = 0  # the step whose end comes first
        self._num = 0

    def has_room(self, num_steps: int) -> bool:
        """Whether so many more can be added; else `keep_from` makes room."""
        return self._num + num_steps <= len(self._ends_s)

    def keep_from(self, step: int, num_steps: int) -> None:
        """Forgets the ends of steps before `step`, and makes room for `num_steps` more, and for others."""
        kept = self._ends_s[step - self._first : self._num]
        self._ends_s = np.empty(max(2 * len(kept) + num_steps, _MIN_ROOM))
        self._ends_s[: len(kept)] = kept
        self._first, self._num = step, len(kept)

    def add(self, end_s: float) -> None:
        """The next step's."""
        self._ends_s[self._num] = end_s
        self._num += 1

    def add_run(self, begun_s: float, num_steps: int, cycle: Cycle) -> None:
        """The next steps', back to back: the first takes `base_s`, each of the others `slope_s` more than the last."""
        part = self._ends_s[self._num : self._num + num_steps]
        numbers = _NUMBERS[:num_steps] if num_steps <= len(_NUMBERS) else np.arange(1.0, num_steps + 1)
        np.multiply(numbers, cycle.slope_s / 2, out=part)
        part += cycle.base_s - cycle.slope_s / 2
        part *= numbers
        part += begun_s
        self._num += num_steps

    def since(self, step: int) -> Floats:
        """The ends of that step and of all after it."""
        return self._ends_s[step - self._first : self._num].copy()


class Gaps(NamedTuple):
    """Of one request, between its tokens."""

    longest_s: float
    tail_s: float  # mean of the longest tenth of them, at least one


def gaps(first_s: float, later: list[Floats]) -> Gaps:
    """Of a request whose first token came at `first_s`; `later` has the times of the others, at least one, in order."""
    found = in_order(first_s, later)
    found.sort()
    num = -(-len(found) // 10)
    return Gaps(float(found[-1]), float(np.add.reduce(found[-num:])) / num)


def in_order(first_s: float, later: list[Floats]) -> Floats:
    """The gaps of such a request, as they came."""
    times_s = np.concatenate((np.array((first_s,)), *later))
    found: Floats = times_s[1:] - times_s[:-1]
    return found
