"""How many requests each decode worker will have at a moment to come: running ones leave, others join."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from halfmoon.policy.latency import Floats

_PAST_S, _MAX_JOINS = 60.0, 256  # of requests that joined are remembered
_LEAST_PAST_S = 10.0  # of them tell about those to come
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
        self._came: deque[tuple[float, float, float]] = deque(maxlen=_MAX_JOINS)  # when, seconds, tokens

    def add(self, now_s: float, stays_s: float, num_tokens: float) -> None:
        """One came."""
        self._came.append((now_s, stays_s, num_tokens))
        while self._came[0][0] < now_s - _PAST_S:
            self._came.popleft()

    def mean_present(self, length_s: float, now_s: float) -> DecodeLoad:
        """Of those that come in so long a time how many are there, on average over it; 0 while little is known."""
        past_s = now_s - self._came[0][0]
        if past_s < _LEAST_PAST_S:
            return DecodeLoad(0.0, 0.0)
        _, stays_s, num_tokens = np.array(self._came).mean(axis=0)
        stays_s = min(stays_s, length_s)
        batch = len(self._came) / past_s * stays_s * (1 - stays_s / length_s / 2)
        return DecodeLoad(float(batch), float(batch * num_tokens))


class DecodeForecast:
    """Owns when each request of this gateway joins and leaves its decode worker, as predicted. Knows rows, not names.

    A request that is still there after its predicted end is expected to stay on for a quarter of its life.
    """

    def __init__(self) -> None:
        self._slots: dict[str, int] = {}
        self._free: list[int] = []
        self._rows: NDArray[np.int64] = np.full(64, -1)  # -1: nobody is in this slot
        self._times: Floats = np.zeros((64, 2))  # joins, leaves
        self._tokens: Floats = np.zeros((64, 2))  # of the prompt, of the predicted output
        self._free.extend(range(63, -1, -1))
        self._joins: dict[int, _Joins] = {}  # by row

    def __len__(self) -> int:
        return len(self._slots)

    def join(
        self, request_id: str, row: int, joins_s: float, leaves_s: float, num_prompt: int, num_output: float
    ) -> None:
        """A request placed on `row`: decodes from `joins_s` to `leaves_s` and adds `num_output` tokens meanwhile."""
        if not self._free:
            self._double()
        slot = self._slots[request_id] = self._free.pop()
        self._rows[slot] = row
        self._times[slot] = joins_s, max(leaves_s, joins_s)
        self._tokens[slot] = num_prompt, num_output

    def begin(self, request_id: str, now_s: float) -> None:
        """Its prefill ended now: it decodes as long as predicted from here."""
        slot = self._slots.get(request_id)
        if slot is not None:
            joins_s, leaves_s = self._times[slot]
            self._times[slot] = now_s, now_s + leaves_s - joins_s
            joins = self._joins.setdefault(int(self._rows[slot]), _Joins())
            joins.add(now_s, float(leaves_s - joins_s), float(self._tokens[slot].sum()))

    def leave(self, request_id: str) -> None:
        """It is gone; nothing where it never was."""
        slot = self._slots.pop(request_id, None)
        if slot is not None:
            self._rows[slot] = -1
            self._free.append(slot)

    def loads(self, at_s: float, now_s: float, num_rows: int) -> DecodeLoads:
        """What each row decodes at `at_s`, seen from `now_s`."""
        joins_s, ends_s = self._lives(now_s)
        there = np.flatnonzero((self._rows >= 0) & (joins_s <= at_s) & (ends_s >= at_s))
        return self._loads_of(there, at_s, joins_s, ends_s, num_rows)

    def least_loads(self, from_s: float, until_s: float, now_s: float, num_rows: int) -> DecodeLoads:
        """What each row decodes at least, at any moment between the two."""
        joins_s, ends_s = self._lives(now_s)
        there = np.flatnonzero((self._rows >= 0) & (joins_s <= from_s) & (ends_s >= until_s))
        return self._loads_of(there, from_s, joins_s, ends_s, num_rows)

    def next_ends(self, row: int | None, now_s: float) -> Floats:
        """When requests of `row`, or of all, are predicted to leave, soonest first; those overdue do so by and by."""
        joins_s, leaves_s = self._times[self._rows >= 0 if row is None else self._rows == row].T
        ends_s: Floats = np.sort(np.where(leaves_s < now_s, now_s + _OVERTIME * (now_s - joins_s), leaves_s))
        return ends_s

    def mean_load(self, row: int, from_s: float, until_s: float, now_s: float) -> DecodeLoad:
        """Sequences and tokens that `row` decodes on average between the two, beside who asks: those that are foreseen,
        and as many as usually join in that time."""
        joins_s, ends_s = self._lives(now_s)
        there = self._rows == row
        length_s = max(until_s - from_s, 1e-9)
        shares = np.clip(np.minimum(ends_s[there], until_s) - np.maximum(joins_s[there], from_s), 0.0, None) / length_s
        context = self._tokens[there] @ np.array([1.0, 0.5])
        extra = self._joins[row].mean_present(length_s, now_s) if row in self._joins else DecodeLoad(0.0, 0.0)
        return DecodeLoad(float(shares.sum()) + extra.batch, float(shares @ context) + extra.context_tokens)

    def spans(
        self, rows: Sequence[int], now_s: float, without: Collection[str] = ()
    ) -> dict[int, list[tuple[float, float]]]:
        """From when until when somebody decodes on each of `rows`, seen from now, were those in `without` not there."""
        joins_s, ends_s = self._lives(now_s)
        counts = np.isin(self._rows, rows) & (ends_s > now_s)
        counts[[self._slots[one] for one in without if one in self._slots]] = False
        lives = zip(self._rows[counts].tolist(), joins_s[counts].tolist(), ends_s[counts].tolist(), strict=True)
        spans: dict[int, list[tuple[float, float]]] = {row: [] for row in rows}
        for row, begin_s, end_s in sorted(lives):
            found = spans[row]
            if found and begin_s <= found[-1][1]:
                found[-1] = (found[-1][0], max(found[-1][1], end_s))
            else:
                found.append((begin_s, end_s))
        return spans

    def _lives(self, now_s: float) -> tuple[Floats, Floats]:
        """When each slot's request joins, and when it ends."""
        joins_s, leaves_s = self._times.T
        return joins_s, np.where(leaves_s < now_s, now_s + _OVERTIME * (now_s - joins_s), leaves_s)

    def _loads_of(
        self, there: NDArray[np.int64], at_s: float, joins_s: Floats, ends_s: Floats, num_rows: int
    ) -> DecodeLoads:
        rows = self._rows[there]
        life_s = np.maximum(ends_s[there] - joins_s[there], 1e-9)
        share = np.minimum((at_s - joins_s[there]) / life_s, 1.0)
        prompt, output = self._tokens[there].T
        batch: Floats = np.bincount(rows, minlength=num_rows).astype(np.float64)
        context: Floats = np.bincount(rows, weights=prompt + output * share, minlength=num_rows).astype(np.float64)
        return DecodeLoads(batch[:num_rows], context[:num_rows])

    def _double(self) -> None:
        num = len(self._rows)
        self._rows = np.concatenate([self._rows, np.full(num, -1)])
        self._times = np.concatenate([self._times, np.zeros_like(self._times)])
        self._tokens = np.concatenate([self._tokens, np.zeros_like(self._tokens)])
        self._free.extend(range(2 * num - 1, num - 1, -1))
