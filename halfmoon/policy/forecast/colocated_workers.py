"""The workers on one host, from now on: who of them will be busy, and how long work takes beside them."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from halfmoon.policy.models.latency import Floats

_FINE = 32  # busy ones whose changes are taken one by one; of more, in groups of so small a part of them

BusySpan = tuple[float, float]  # from, until


class Decoding(NamedTuple):
    """What comes after a prompt."""

    row: int  # of the cluster view: who does it
    seconds: float
    context_tokens: float = 0.0  # on average


class Spans(NamedTuple):
    """Times at which workers have work; equal workers may have several."""

    rows: NDArray[np.int64]  # of the cluster view
    begins_s: Floats
    ends_s: Floats

    def union(self, now_s: float) -> Spans:
        """What is not over, as spans that are apart from each other within a row."""
        under_way = self.begins_s <= now_s
        until_s = np.full(int(self.rows.max(initial=0)) + 1, now_s)
        np.maximum.at(until_s, self.rows[under_way], self.ends_s[under_way])
        later = ~under_way & (self.ends_s > until_s[self.rows])
        busy = np.flatnonzero(until_s > now_s)
        rows = np.concatenate([busy, self.rows[later]])
        begins_s = np.concatenate([np.full(len(busy), now_s), self.begins_s[later]])
        ends_s = np.concatenate([until_s[busy], self.ends_s[later]])
        return _apart(rows, begins_s, ends_s) if len(rows) else Spans(rows, begins_s, ends_s)


NO_SPANS = Spans(np.zeros(0, dtype=np.int64), np.zeros(0), np.zeros(0))


def _apart(rows: NDArray[np.int64], begins_s: Floats, ends_s: Floats) -> Spans:
    """Overlapping ones of a row become one."""
    first_s = begins_s.min()
    offsets_s = rows * (ends_s.max() - first_s + 1.0) - first_s  # all times of a row lie behind those of the one before
    keys = begins_s + offsets_s
    order = keys.argsort()
    reaches = np.maximum.accumulate((ends_s + offsets_s)[order])
    firsts = np.flatnonzero(np.concatenate([[True], keys[order[1:]] > reaches[:-1]]))
    begin = order[firsts]
    return Spans(rows[begin], begins_s[begin], np.maximum.reduceat(ends_s[order], firsts))


class ColocatedWorkers:
    """Owns how many of the workers beside one will be busy, as far as that is foreseen. Is asked in the order of time.

    Of more than 32 not every change counts: what work takes beside them is right within a 32nd.
    """

    def __init__(self, beside: Collection[int], spans: Spans = NO_SPANS) -> None:
        """`beside` are the neighbours' rows of the cluster view; `spans` are theirs, apart from each other."""
        self._beside = beside
        self._spans = spans
        self._added: dict[int, list[BusySpan]] = {}
        self._times_s, self._nums = _changes(spans)
        self._at = 0  # of these, the one that was passed last

    def decode(self, decoding: Decoding | None, now_s: float) -> None:
        """A prompt is computed, and decoded from now on; who is no neighbour does not matter."""
        if decoding is not None and decoding.row in self._beside:
            self._add(decoding.row, (now_s, now_s + decoding.seconds))

    def after(self, work_s: float, begin_s: float, contention: float) -> float:
        """When work that takes `work_s` alone is done. It begins no sooner than what was asked for before."""
        if contention <= 0:
            return begin_s + work_s
        times_s, nums, at, now_s = self._times_s, self._nums, self._at, begin_s
        while True:
            until_s = times_s[at + 1]
            if until_s > now_s:
                slowdown = 1 + contention * nums[at]
                if now_s + work_s * slowdown <= until_s:
                    break
                work_s -= (until_s - now_s) / slowdown
                now_s = until_s
            at += 1
        self._at = at
        return now_s + work_s * slowdown

    def _add(self, row: int, span: BusySpan) -> None:
        """A worker that is busy already is not busier by more work."""
        new = [span]
        for begin_s, end_s in self._busy(row):
            parts = [part for one in new for part in ((one[0], min(one[1], begin_s)), (max(one[0], end_s), one[1]))]
            new = [(from_s, until_s) for from_s, until_s in parts if from_s < until_s]
        self._added.setdefault(row, []).append(span)
        for from_s, until_s in new:
            if from_s < until_s:
                for at in range(self._change_at(from_s), self._change_at(until_s)):
                    self._nums[at] += 1

    def _busy(self, row: int) -> list[BusySpan]:
        found = np.flatnonzero(self._spans.rows == row)
        known = zip(self._spans.begins_s[found].tolist(), self._spans.ends_s[found].tolist(), strict=True)
        return [*known, *self._added.get(row, ())]

    def _change_at(self, at_s: float) -> int:
        """Where the changes have this time, from now on at least."""
        at = bisect_left(self._times_s, at_s)
        if self._times_s[at] != at_s:
            self._times_s.insert(at, at_s)
            self._nums.insert(at, self._nums[at - 1])
            self._at += at <= self._at
        return at


def _changes(spans: Spans) -> tuple[list[float], list[int]]:
    """When another number of workers is busy, from the beginning to the end of time, and how many since then."""
    if not len(spans.rows):
        return [-math.inf, math.inf], [0, 0]
    first_s = spans.begins_s.min()
    later_s = spans.begins_s[spans.begins_s > first_s]
    times_s = np.concatenate([[first_s], later_s, spans.ends_s])
    order = times_s.argsort(kind="stable")
    times_s = times_s[order]
    nums = np.where(order <= len(later_s), 1, -1)
    nums[0] = len(spans.rows) - len(later_s)
    nums = nums.cumsum()
    is_last = np.concatenate([times_s[1:] > times_s[:-1], [True]])  # of equal times
    times_s, nums = times_s[is_last], nums[is_last]
    kept = _grouped(nums) if len(nums) > _FINE else slice(None)
    return [-math.inf, *times_s[kept].tolist(), math.inf], [0, *nums[kept].tolist(), 0]


def _grouped(nums: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which changes are kept: where the number has moved by a 32nd since the last one that is."""
    moved = np.floor((np.abs(np.diff(nums, prepend=0)) / np.maximum(nums / _FINE, 1.0)).cumsum())
    found: NDArray[np.bool_] = np.diff(moved, prepend=-1) > 0
    return found
