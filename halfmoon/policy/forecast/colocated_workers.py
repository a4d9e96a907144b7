"""The other workers of a host: how many will be busy at each moment, and how long work takes next to them."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from halfmoon.policy.models.latency import Floats

_FINE = 32  # busy workers up to which each change counts; beyond, changes are grouped to a 32nd of the number

BusySpan = tuple[float, float]  # begin and end, in seconds


class Decoding(NamedTuple):
    """The decode that follows a prefill."""

    row: int  # of the decode worker
    seconds: float
    context_tokens: float = 0.0  # mean over the answer
    tbt_target_s: float = math.inf


class Spans(NamedTuple):
    """Periods in which workers are busy, as arrays; a worker may have several."""

    rows: NDArray[np.int64]  # of the cluster view
    begins_s: Floats
    ends_s: Floats

    def union(self, now_s: float) -> Spans:
        """The periods not yet over, merged so that those of a row do not overlap."""
        running = self.begins_s <= now_s
        until_s = np.full(int(self.rows.max(initial=0)) + 1, now_s)
        np.maximum.at(until_s, self.rows[running], self.ends_s[running])
        later = ~running & (self.ends_s > until_s[self.rows])
        busy = np.flatnonzero(until_s > now_s)
        rows = np.concatenate([busy, self.rows[later]])
        begins_s = np.concatenate([np.full(len(busy), now_s), self.begins_s[later]])
        ends_s = np.concatenate([until_s[busy], self.ends_s[later]])
        return _merged(rows, begins_s, ends_s) if len(rows) else Spans(rows, begins_s, ends_s)


NO_SPANS = Spans(np.zeros(0, dtype=np.int64), np.zeros(0), np.zeros(0))


def _merged(rows: NDArray[np.int64], begins_s: Floats, ends_s: Floats) -> Spans:
    """Merges the overlapping periods of each row."""
    first_s = begins_s.min()
    offsets_s = rows * (ends_s.max() - first_s + 1.0) - first_s  # shifts each row behind the one before
    keys = begins_s + offsets_s
    order = keys.argsort()
    reaches = np.maximum.accumulate((ends_s + offsets_s)[order])
    firsts = np.flatnonzero(np.concatenate([[True], keys[order[1:]] > reaches[:-1]]))
    begin = order[firsts]
    return Spans(rows[begin], begins_s[begin], np.maximum.reduceat(ends_s[order], firsts))


class ColocatedWorkers:
    """Owns how many of a worker's colocated workers will be busy at each moment. Must be asked in the order of time.

    Beyond 32 busy workers small changes are grouped: durations are then right within a 32nd.
    """

    def __init__(self, rows: Collection[int], spans: Spans = NO_SPANS) -> None:
        """`rows` are the colocated workers' in the cluster view; `spans` are their busy periods, as from `union`."""
        self._rows = rows
        self._spans = spans
        self._known: dict[int, list[BusySpan]] = {}  # those of `spans` of a row to which a decode was added
        self._until_s: dict[int, float] = {}  # of a row: the end of the decodes that were added
        self._times_s, self._nums = _changes(spans)
        self._at = 0  # index of the last change passed

    def begin_decode(self, decoding: Decoding | None, now_s: float) -> None:
        """Adds a decode that starts now; ignores one on a worker of another host."""
        if decoding is not None and decoding.row in self._rows:
            self._add(decoding.row, now_s, now_s + decoding.seconds)

    def after(self, work_s: float, begin_s: float, contention: float) -> float:
        """When work is done that takes `work_s` alone. Must not begin before the work asked for last."""
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

    def _add(self, row: int, begin_s: float, end_s: float) -> None:
        """Adds a busy period of a row; parts in which it is busy already change nothing.

        Those that were added before began no later: whatever they leave of this one lies behind all of them.
        """
        until_s = self._until_s.get(row, begin_s)
        if end_s <= until_s:
            return
        new = [(max(begin_s, until_s), end_s)]
        self._until_s[row] = end_s
        for known_begin_s, known_end_s in self._known_spans(row):
            parts = [part for a, b in new for part in ((a, min(b, known_begin_s)), (max(a, known_end_s), b))]
            new = [(from_s, until_s) for from_s, until_s in parts if from_s < until_s]
        for from_s, until_s in new:
            for at in range(self._change_at(from_s), self._change_at(until_s)):
                self._nums[at] += 1

    def _known_spans(self, row: int) -> list[BusySpan]:
        if row not in self._known:
            of_row = np.flatnonzero(self._spans.rows == row)
            begins_s, ends_s = self._spans.begins_s[of_row].tolist(), self._spans.ends_s[of_row].tolist()
            self._known[row] = list(zip(begins_s, ends_s, strict=True))
        return self._known[row]

    def _change_at(self, at_s: float) -> int:
        """The index of the change at `at_s`, inserted if there is none."""
        at = bisect_left(self._times_s, at_s)
        if self._times_s[at] != at_s:
            self._times_s.insert(at, at_s)
            self._nums.insert(at, self._nums[at - 1])
            self._at += at <= self._at
        return at


def _changes(spans: Spans) -> tuple[list[float], list[int]]:
    """The times at which the number of busy workers changes, from -inf to inf, and the number from each on."""
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
    """Mask of the changes to keep: where the number has moved by a 32nd since the last one kept."""
    moved = np.floor((np.abs(np.diff(nums, prepend=0)) / np.maximum(nums / _FINE, 1.0)).cumsum())
    is_kept: NDArray[np.bool_] = np.diff(moved, prepend=-1) > 0
    return is_kept
