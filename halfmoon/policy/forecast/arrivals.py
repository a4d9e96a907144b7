"""Which prompts usually come, and so are to be expected."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Protocol

_PAST_S, _MAX_ARRIVALS = 60.0, 256  # of arrivals are remembered
_FIRST_DUE = 0.5  # of the time between two: when the first of a stream comes, on average
_LEAST_PAST_S = 10.0  # of arrivals tell about those to come
_POISSON_MEDIAN = 1 / 3  # the median of a Poisson count is about its mean and this, rounded down


class Arrivals:
    """Owns what has not come yet of steady streams of equal prompts."""

    def __init__(self, streams: Sequence[tuple[float, int]]) -> None:
        """Of each stream prompts a second, and their tokens."""
        self._streams = streams
        self._due = [_FIRST_DUE] * len(streams)  # of the next prompt

    def within(self, seconds: float) -> list[int]:
        """The tokens of each prompt that comes in the next seconds."""
        came: list[int] = []
        for number, (per_s, num_tokens) in enumerate(self._streams):
            self._due[number] += per_s * seconds
            came += [num_tokens] * int(self._due[number])
            self._due[number] %= 1
        return came


class Pace(Protocol):
    """How long work takes; equal ones say the same."""

    def beside_decodes_s(self, num_tokens: int) -> float:
        """Computing a prompt of so many tokens."""


class ArrivalRate:
    """Owns the latest prompts that came."""

    def __init__(self) -> None:
        self._came: deque[tuple[float, int]] = deque()  # when, and its tokens
        self._pace: Pace | None = None
        self._work_s = 0.0  # of all that came, at `_pace`

    def add(self, num_tokens: int, now_s: float) -> None:
        """One came."""
        self._count(num_tokens, 1)
        self._came.append((now_s, num_tokens))
        while self._came[0][0] < now_s - _PAST_S or len(self._came) > _MAX_ARRIVALS:
            self._count(self._came.popleft()[1], -1)

    def work_s(self, pace: Pace, seconds: float, now_s: float) -> float:
        """To compute those that come within so long a time: as many as come half of the times, of the usual work.
        0 as long as too little is known."""
        past_s = now_s - self._came[0][0] if self._came else 0.0
        if past_s < _LEAST_PAST_S:
            return 0.0
        if pace != self._pace:
            self._pace, self._work_s = pace, sum(pace.beside_decodes_s(num_tokens) for _, num_tokens in self._came)
        num_usual = math.floor(len(self._came) / past_s * seconds + _POISSON_MEDIAN)
        return num_usual * self._work_s / len(self._came)

    def _count(self, num_tokens: int, change: int) -> None:
        if self._pace is not None:
            self._work_s += change * self._pace.beside_decodes_s(num_tokens)

    def to_come(self, num_tokens: int, now_s: float) -> Arrivals:
        """Those that are to be expected, shorter ones than that and others: by their rates and means. None as long as
        too little is known."""
        past_s = now_s - self._came[0][0] if self._came else 0.0
        if past_s < _LEAST_PAST_S:
            return Arrivals([])
        shorter = [one for _, one in self._came if one < num_tokens]
        others = [one for _, one in self._came if one >= num_tokens]
        return Arrivals([(len(some) / past_s, round(sum(some) / len(some))) for some in (shorter, others) if some])
