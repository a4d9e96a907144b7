"""The prompts to expect on a worker, from the rate of past arrivals."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Protocol

_PAST_S, _MAX_ARRIVALS = 60.0, 256  # window of remembered arrivals
_FIRST_DUE = 0.5  # mean time to the first arrival, as a share of the time between two
_LEAST_PAST_S = 10.0  # of history before arrivals are predicted from it
_POISSON_MEDIAN = 1 / 3  # the median of a Poisson count is about its mean plus this, rounded down


class Arrivals:
    """Owns the phase of steady streams of equal prompts."""

    def __init__(self, streams: Sequence[tuple[float, int]]) -> None:
        """`streams`: prompts per second and tokens per prompt, of each."""
        self._streams = streams
        self._due = [_FIRST_DUE] * len(streams)  # share of the next prompt that has come

    def within(self, seconds: float) -> list[int]:
        """Tokens of each prompt that arrives in the next `seconds`. Advances the streams."""
        arrived: list[int] = []
        for number, (per_s, num_tokens) in enumerate(self._streams):
            self._due[number] += per_s * seconds
            arrived += [num_tokens] * int(self._due[number])
            self._due[number] %= 1
        return arrived


class PrefillSpeed(Protocol):
    """How long prompts take to compute; equal speeds give equal answers."""

    def chunked_s(self, num_tokens: int) -> float:
        """Seconds to compute a prompt in chunks."""


class ArrivalRate:
    """Owns the latest arrivals of prompts."""

    def __init__(self) -> None:
        self._arrived: deque[tuple[float, int]] = deque()  # time and tokens
        self._speed: PrefillSpeed | None = None
        self._work_s = 0.0  # of all remembered arrivals, at `_speed`

    def add(self, num_tokens: int, now_s: float) -> None:
        """Adds an arrival."""
        self._count(num_tokens, 1)
        self._arrived.append((now_s, num_tokens))
        while self._arrived[0][0] < now_s - _PAST_S or len(self._arrived) > _MAX_ARRIVALS:
            self._count(self._arrived.popleft()[1], -1)

    def work_s(self, speed: PrefillSpeed, seconds: float, now_s: float) -> float:
        """Seconds to compute the prompts that arrive within `seconds`: their median number, at their mean work.

        0 while too little is known.
        """
        past_s = now_s - self._arrived[0][0] if self._arrived else 0.0
        if past_s < _LEAST_PAST_S:
            return 0.0
        if speed != self._speed:
            self._speed, self._work_s = speed, sum(speed.chunked_s(num_tokens) for _, num_tokens in self._arrived)
        num_usual = math.floor(len(self._arrived) / past_s * seconds + _POISSON_MEDIAN)
        return num_usual * self._work_s / len(self._arrived)

    def _count(self, num_tokens: int, change: int) -> None:
        if self._speed is not None:
            self._work_s += change * self._speed.chunked_s(num_tokens)

    def expected(self, num_tokens: int, now_s: float) -> Arrivals:
        """Two streams, of prompts shorter than `num_tokens` and others, with the rate and mean length of each.

        No streams while too little is known.
        """
        past_s = now_s - self._arrived[0][0] if self._arrived else 0.0
        if past_s < _LEAST_PAST_S:
            return Arrivals([])
        shorter = [length for _, length in self._arrived if length < num_tokens]
        others = [length for _, length in self._arrived if length >= num_tokens]
        streams = [lengths for lengths in (shorter, others) if lengths]
        return Arrivals([(len(lengths) / past_s, round(sum(lengths) / len(lengths))) for lengths in streams])
