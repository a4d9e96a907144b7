"""Token times: kept once for a whole batch. Also the gaps between one request's tokens."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from halfmoon.sim.latency_sources.host_memory import Cycle
from halfmoon.sim.workloads.workload import Floats

_MIN_ROOM = 1024
_NUMBERS = np.arange(1.0, 1025)  # step numbers of all but the longest runs


class StepEnds:
    """Owns the end times of a batch's newest steps, by step number. Each step gave every sequence one token. Knows
    nothing of jobs.
    """

    __slots__ = ("_ends_s", "_first", "_num")

    def __init__(self) -> None:
        self._ends_s: Floats = np.empty(_MIN_ROOM)
        self._first = 0  # the oldest step that is kept
        self._num = 0

    def has_room(self, num_steps: int) -> bool:
        """Whether `num_steps` more fit; otherwise call `keep_from` first."""
        return self._num + num_steps <= len(self._ends_s)

    def keep_from(self, step: int, num_steps: int) -> None:
        """Forgets steps before `step`, and makes room for `num_steps` more and then some."""
        kept = self._ends_s[step - self._first : self._num]
        self._ends_s = np.empty(max(2 * len(kept) + num_steps, _MIN_ROOM))
        self._ends_s[: len(kept)] = kept
        self._first, self._num = step, len(kept)

    def add(self, end_s: float) -> None:
        """Adds the end of the next step."""
        self._ends_s[self._num] = end_s
        self._num += 1

    def add_run(self, begun_s: float, num_steps: int, cycle: Cycle) -> None:
        """Adds back-to-back steps: the first takes `base_s`, each later one `slope_s` more than the one before."""
        part = self._ends_s[self._num : self._num + num_steps]
        numbers = _NUMBERS[:num_steps] if num_steps <= len(_NUMBERS) else np.arange(1.0, num_steps + 1)
        np.multiply(numbers, cycle.slope_s / 2, out=part)
        part += cycle.base_s - cycle.slope_s / 2
        part *= numbers
        part += begun_s
        self._num += num_steps

    def since(self, step: int) -> Floats:
        """End times of `step` and all later ones."""
        return self._ends_s[step - self._first : self._num].copy()


class Gaps(NamedTuple):
    """Gaps between one request's tokens."""

    longest_s: float
    tail_s: float  # mean of the longest tenth, at least one gap


def gaps(first_s: float, later: list[Floats]) -> Gaps:
    """The gaps of a request whose first token came at `first_s`. `later` holds the times of its other tokens in order,
    at least one.
    """
    result = in_order(first_s, later)
    result.sort()
    num = -(-len(result) // 10)
    return Gaps(float(result[-1]), float(np.add.reduce(result[-num:])) / num)


def in_order(first_s: float, later: list[Floats]) -> Floats:
    """The same gaps in order of time."""
    times_s = np.concatenate((np.array((first_s,)), *later))
    result: Floats = times_s[1:] - times_s[:-1]
    return result
