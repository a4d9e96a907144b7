"""The requests that usually join one decode worker, from those that did."""

from __future__ import annotations

import math

import numpy as np

from halfmoon.policy.models.latency import Floats
from halfmoon.policy.values import DecodeLoad

_PAST_S, _MAX_JOINS = 60.0, 256  # window of remembered joins
_LEAST_PAST_S = 10.0  # of history before arrivals are predicted from it


class UsualJoins:
    """Owns the latest requests placed on one row: their rate, duration, size and class."""

    def __init__(self) -> None:
        self._joined: Floats = np.empty((2 * _MAX_JOINS, 4))  # [_, (time, duration in s, tokens, class's priority)]
        self._first = self._end = 0  # range of the entries that count

    def add(self, now_s: float, stays_s: float, num_tokens: float, class_priority: int = 0) -> None:
        """Adds a request that joined."""
        if self._end == len(self._joined):
            kept = self._joined[self._first :].copy()
            self._first, self._end = 0, len(kept)
            self._joined[: self._end] = kept
        self._joined[self._end] = now_s, stays_s, num_tokens, class_priority
        self._end += 1
        self._first = max(self._first, self._end - _MAX_JOINS)
        while self._joined[self._first, 0] < now_s - _PAST_S:
            self._first += 1

    def mean_present(self, length_s: float, now_s: float, above: float = math.inf) -> DecodeLoad:
        """Mean load over the next `length_s` from requests that join in that time; 0 while little is known.

        above: only those of classes before this priority.
        """
        joined = self._joined[self._first : self._end]
        past_s = now_s - float(joined[0, 0])
        if past_s < _LEAST_PAST_S:
            return DecodeLoad(0.0, 0.0)
        joined = joined if above == math.inf else joined[joined[:, 3] < above]
        if not len(joined):
            return DecodeLoad(0.0, 0.0)
        _, stays_s, num_tokens, _ = (np.add.reduce(joined, axis=0) / len(joined)).tolist()
        stays_s = min(stays_s, length_s)
        batch = len(joined) / past_s * stays_s * (1 - stays_s / length_s / 2)
        return DecodeLoad(batch, batch * num_tokens)
