"""How many requests each decode worker will have at a moment to come: running ones leave, others join."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from halfmoon.policy.forecast.colocated_decodes import DecodeIntervals
from halfmoon.policy.forecast.colocated_workers import Spans
from halfmoon.policy.models.latency import Floats

_PAST_S, _MAX_JOINS = 60.0, 256  # of requests that joined are remembered
_LEAST_PAST_S = 10.0  # of them tell about those to come
_NO_SLOTS: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
_OVERTIME = 0.25  # of its life so far: what a request that outlived its prediction is given


class DecodeLoads(NamedTuple):
    """For every row of the cluster view."""

    batch: Floats  # sequences
    context_tokens: Floats  # of all of them


class DecodeLoad(NamedTuple):
    """Of one row, on average over a time."""

    batch: float
    context_tokens: float


class _Joins:
    """Owns the latest requests that were placed on one row: how many come, how long they stay, how large they are."""

    def __init__(self) -> None:
        self._came: Floats = np.empty((2 * _MAX_JOINS, 3))  # when, seconds, tokens
        self._first = self._end = 0  # of its rows that count

    def add(self, now_s: float, stays_s: float, num_tokens: float) -> None:
        """One came."""
        if self._end == len(self._came):
            kept = self._came[self._first :].copy()
            self._first, self._end = 0, len(kept)
            self._came[: self._end] = kept
        self._came[self._end] = now_s, stays_s, num_tokens
        self._end += 1
        self._first = max(self._first, self._end - _MAX_JOINS)
        while self._came[self._first, 0] < now_s - _PAST_S:
            self._first += 1

    def mean_present(self, length_s: float, now_s: float) -> DecodeLoad:
        """Of those that come in so long a time how many are there, on average over it; 0 while little is known."""
        came = self._came[self._first : self._end]
        past_s = now_s - float(came[0, 0])
        if past_s < _LEAST_PAST_S:
            return DecodeLoad(0.0, 0.0)
        _, stays_s, num_tokens = (np.add.reduce(came, axis=0) / len(came)).tolist()
        stays_s = min(stays_s, length_s)
        batch = len(came) / past_s * stays_s * (1 - stays_s / length_s / 2)
        return DecodeLoad(batch, batch * num_tokens)


class _Slots:
    """Owns which slots are of one row."""

    def __init__(self) -> None:
        self._slots: list[int] = []  # ascending
        self._column: NDArray[np.int64] | None = None  # the same, as long as nothing changed

    def __iter__(self) -> Iterator[int]:
        return iter(self._slots)

    def add(self, slot: int) -> None:
        """It is of this row from now on."""
        insort(self._slots, slot)
        self._column = None

    def remove(self, slot: int) -> None:
        """It was, and is no more."""
        del self._slots[bisect_left(self._slots, slot)]
        self._column = None

    @property
    def ascending(self) -> NDArray[np.int64]:
        """Not to be written to."""
        if self._column is None:
            self._column = np.array(self._slots, dtype=np.int64)
        return self._column


class DecodeForecast:
    """Owns when each request of this gateway joins and leaves its decode worker, as predicted. Knows rows, not names.

    A request that is still there after its predicted end is expected to stay on for a quarter of its life.
    """

    def __init__(self) -> None:
        self._slots: dict[str, int] = {}
        self._free: list[int] = []
        self._rows: NDArray[np.int64] = np.full(64, -1)  # -1: nobody is in this slot
        self._joins_s: Floats = np.full(64, np.inf)  # never, in a slot with nobody
        self._leaves_s: Floats = np.full(64, np.inf)
        self._prompts: Floats = np.zeros(64)  # tokens
        self._outputs: Floats = np.zeros(64)  # tokens, predicted
        self._mean_contexts: Floats = np.zeros(64)  # tokens, over its life
        self._free.extend(range(63, -1, -1))
        self._num_used = 0  # slots from here on never had anybody
        self._seen: tuple[float, Floats] | None = None  # when `_ends_s` was asked last, and its answer
        self._of_row: dict[int, _Slots] = {}
        self._joins: dict[int, _Joins] = {}  # by row

    def __len__(self) -> int:
        return len(self._slots)

    def join(
        self, request_id: str, row: int, joins_s: float, leaves_s: float, num_prompt: int, num_output: float
    ) -> None:
        """A request placed on `row`: decodes from `joins_s` to `leaves_s` and adds `num_output` tokens meanwhile."""
        self._seen = None
        if not self._free:
            self._double()
        slot = self._slots[request_id] = self._free.pop()
        self._num_used = max(self._num_used, slot + 1)
        self._rows[slot] = row
        self._of_row.setdefault(row, _Slots()).add(slot)
        self._joins_s[slot], self._leaves_s[slot] = joins_s, max(leaves_s, joins_s)
        self._prompts[slot], self._outputs[slot] = num_prompt, num_output
        self._mean_contexts[slot] = num_prompt + 0.5 * num_output

    def begin(self, request_id: str, now_s: float) -> None:
        """Its prefill ended now: it decodes as long as predicted from here."""
        slot = self._slots.get(request_id)
        if slot is not None:
            self._seen = None
            joins_s, leaves_s = float(self._joins_s[slot]), float(self._leaves_s[slot])
            self._joins_s[slot], self._leaves_s[slot] = now_s, now_s + leaves_s - joins_s
            joins = self._joins.setdefault(int(self._rows[slot]), _Joins())
            joins.add(now_s, leaves_s - joins_s, float(self._prompts[slot] + self._outputs[slot]))

    def leave(self, request_id: str) -> None:
        """It is gone; nothing where it never was."""
        slot = self._slots.pop(request_id, None)
        if slot is not None:
            self._seen = None
            self._of_row[int(self._rows[slot])].remove(slot)
            self._rows[slot] = -1
            self._joins_s[slot] = self._leaves_s[slot] = np.inf
            self._free.append(slot)

    def loads(self, at_s: float, now_s: float, num_rows: int) -> DecodeLoads:
        """What each row decodes at `at_s`, seen from `now_s`."""
        return self.least_loads(at_s, at_s, now_s, num_rows)

    def least_loads(self, from_s: float, until_s: float, now_s: float, num_rows: int) -> DecodeLoads:
        """What each row decodes at least, at any moment between the two: that of `from_s`, of those who stay."""
        joins_s, ends_s = self._joins_s[: self._num_used], self._ends_s(now_s)
        is_there = joins_s <= from_s
        is_there &= ends_s >= until_s
        there = is_there.nonzero()[0]
        rows, joins_s = self._rows[there], joins_s[there]
        share = ends_s[there]
        share -= joins_s
        np.maximum(share, 1e-9, out=share)
        np.divide(from_s - joins_s, share, out=share)
        np.minimum(share, 1.0, out=share)
        share *= self._outputs[there]
        share += self._prompts[there]
        batch = np.bincount(rows, minlength=num_rows).astype(np.float64)
        context = np.bincount(rows, weights=share, minlength=num_rows).astype(np.float64, copy=False)
        return DecodeLoads(batch[:num_rows], context[:num_rows])

    def load(self, row: int, at_s: float, now_s: float) -> DecodeLoad:
        """The same of one row."""
        there = self._slots_of(row)
        joins_s, ends_s = self._joins_s[there], self._ends_s(now_s)[there]
        is_there = (joins_s <= at_s) & (ends_s >= at_s)
        share = (at_s - joins_s) / np.maximum(ends_s - joins_s, 1e-9)
        context = self._prompts[there] + self._outputs[there] * np.minimum(share, 1.0)
        return DecodeLoad(int(np.count_nonzero(is_there)), float(np.add.reduce(context[is_there])))

    def next_ends(self, row: int | None, now_s: float, without: Collection[str] = ()) -> Floats:
        """When requests of `row`, or of all, are predicted to leave, soonest first; those overdue do so by and by."""
        rows = self._rows[: self._num_used]
        there = rows >= 0 if row is None else rows == row
        there[[self._slots[one] for one in without if one in self._slots]] = False
        return np.sort(self._ends_s(now_s)[there])

    def mean_load(self, row: int, from_s: float, until_s: float, now_s: float) -> DecodeLoad:
        """Sequences and tokens that `row` decodes on average between the two, beside who asks: those that are foreseen,
        and as many as usually join in that time."""
        there = self._slots_of(row)
        joins_s, ends_s = self._joins_s[there], self._ends_s(now_s)[there]
        length_s = max(until_s - from_s, 1e-9)
        shares = np.maximum(np.minimum(ends_s, until_s) - np.maximum(joins_s, from_s), 0.0) / length_s
        context = self._mean_contexts[there]
        extra = self._joins[row].mean_present(length_s, now_s) if row in self._joins else DecodeLoad(0.0, 0.0)
        return DecodeLoad(float(np.add.reduce(shares)) + extra.batch, float(shares @ context) + extra.context_tokens)

    def present(self, row: int, now_s: float, without: Collection[str] = ()) -> DecodeIntervals:
        """Who decodes on `row` now, were those in `without` not there."""
        there = self._present(row, now_s, without)
        return DecodeIntervals(self._ends_s(now_s)[there], self._mean_contexts[there])

    def is_anybody_present(self, row: int, now_s: float, without: Collection[str] = ()) -> bool:
        """Whether `present_load` is of somebody."""
        slots = self._of_row.get(row)
        if slots is None:
            return False
        others = {self._slots.get(one) for one in without}
        joins_s, leaves_s = self._joins_s, self._leaves_s
        return any(joins_s[slot] <= now_s != leaves_s[slot] and slot not in others for slot in slots)

    def present_load(self, row: int, now_s: float, without: Collection[str] = ()) -> DecodeLoad:
        """Those of `present` who do not leave at this very moment, as sums."""
        there = self._present(row, now_s, without)
        there = there[self._leaves_s[there] != now_s]
        return DecodeLoad(len(there), float(np.add.reduce(self._mean_contexts[there])))

    def _present(self, row: int, now_s: float, without: Collection[str]) -> NDArray[np.int64]:
        there = self._slots_of(row)
        there = there[self._joins_s[there] <= now_s]
        others = [self._slots[one] for one in without if one in self._slots]
        if not others:
            return there
        is_wanted = np.ones(self._num_used, dtype=np.bool_)
        is_wanted[others] = False
        return there[is_wanted[there]]

    def _slots_of(self, row: int) -> NDArray[np.int64]:
        """Ascending."""
        slots = self._of_row.get(row)
        return _NO_SLOTS if slots is None else slots.ascending

    def spans(self, beside: NDArray[np.bool_], now_s: float, without: Collection[str] = ()) -> Spans:
        """From when until when each request on rows of `beside` decodes, seen from now; `without` some of them. The
        last row there is nobody's."""
        there = beside[self._rows[: self._num_used]]
        there[[self._slots[one] for one in without if one in self._slots]] = False
        slots = np.flatnonzero(there)
        return Spans(self._rows[slots], self._joins_s[slots], self._ends_s(now_s)[slots])

    def _ends_s(self, now_s: float) -> Floats:
        """When the request in each used slot ends, seen from now; not to be written to. Decisions ask several times at
        one moment: the answer holds until somebody joins, begins or leaves."""
        if self._seen is None or self._seen[0] != now_s:
            joins_s, leaves_s = self._joins_s[: self._num_used], self._leaves_s[: self._num_used]
            self._seen = now_s, np.where(leaves_s < now_s, _overtime_ends(joins_s, now_s), leaves_s)
        return self._seen[1]

    def _double(self) -> None:
        num = len(self._rows)
        self._rows = np.concatenate([self._rows, np.full(num, -1)])
        self._joins_s = np.concatenate([self._joins_s, np.full(num, np.inf)])
        self._leaves_s = np.concatenate([self._leaves_s, np.full(num, np.inf)])
        self._prompts = np.concatenate([self._prompts, np.zeros(num)])
        self._outputs = np.concatenate([self._outputs, np.zeros(num)])
        self._mean_contexts = np.concatenate([self._mean_contexts, np.zeros(num)])
        self._free.extend(range(2 * num - 1, num - 1, -1))


def _overtime_ends(joins_s: Floats, now_s: float) -> Floats:
    """When those leave that joined then and are overdue."""
    ends_s: Floats = now_s - joins_s
    ends_s *= _OVERTIME
    ends_s += now_s
    return ends_s
