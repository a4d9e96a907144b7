"""How long a prompt would wait on each prefill worker: the work ahead of it by priority and step sharing."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from halfmoon.policy.models.latency import Floats


class _Queues(NamedTuple):
    """The slots in use, by row, then by rank."""

    slots: NDArray[np.int64]
    rows: NDArray[np.int64]
    left_s: Floats  # work left of each prompt, in seconds alone


class PrefillForecast:
    """Owns the prompts of this gateway that are not computed yet, each with its seconds of work alone.

    A worker computes by rank: smaller priority first, then by arrival. While its first prompt is longer than half a
    step, shorter ones of the same priority share each step with it, half and half, the shortest first: about as
    `policy/shared_step.py` has it. Workers are rows of the cluster view.
    """

    def __init__(self) -> None:
        self._slots: dict[str, int] = {}  # by request, in order of arrival
        self._free: list[int] = list(range(63, -1, -1))
        self._rows: NDArray[np.int64] = np.full(64, -1)  # by slot; -1 if free
        self._orders: NDArray[np.int64] = np.zeros(64, dtype=np.int64)
        self._priorities: NDArray[np.int64] = np.zeros(64, dtype=np.int64)
        self._left_s: Floats = np.zeros(64)
        self._steps_s: Floats = np.zeros(64)  # duration of a full step on its worker
        self._updated_s: Floats = np.zeros(64)  # by row: work done until then is subtracted
        self._num_joined = 0
        self._of_row: dict[int, list[int]] = {}  # slots by rank
        self._seen: tuple[float, _Queues] | None = None  # time and result of the latest `_now`

    def __len__(self) -> int:
        return len(self._slots)

    def join(self, request_id: str, row: int, takes_s: float, step_s: float, priority: int, now_s: float) -> None:
        """Adds a prompt that takes `takes_s` alone, on a worker whose full steps take `step_s`."""
        self._advance(row, now_s)
        if not self._free:
            self._double()
        slot = self._slots[request_id] = self._free.pop()
        self._num_joined += 1
        self._rows[slot], self._orders[slot], self._priorities[slot] = row, self._num_joined, priority
        self._left_s[slot], self._steps_s[slot] = takes_s, step_s
        insort(self._of_row.setdefault(row, []), slot, key=lambda of: int(self._priorities[of]))  # behind equal ones

    def leave(self, request_id: str, now_s: float) -> None:
        """Removes a prompt, if it is there."""
        slot = self._slots.pop(request_id, None)
        if slot is not None:
            row = int(self._rows[slot])
            self._advance(row, now_s)
            self._of_row[row].remove(slot)
            self._rows[slot] = -1
            self._free.append(slot)

    def totals(self, num_rows: int, now_s: float) -> Floats:
        """Seconds of work queued on each row."""
        queues = self._now(now_s)
        return _sums(queues.rows, queues.left_s, num_rows)

    def waits(self, takes_s: Floats, priority: int, now_s: float) -> Floats:
        """Seconds [num_rows] that others delay a prompt which takes `takes_s` [num_rows] alone."""
        num_rows = len(takes_s)
        queues = self._now(now_s)
        if not len(queues.slots):
            return np.zeros(num_rows)
        priorities = self._priorities[queues.slots]
        equal = priorities == priority
        if np.logical_and.reduce(equal):  # the common case
            return self._waits_among_equals(queues, takes_s)
        rows, left_s = queues.rows, queues.left_s
        earlier, later = priorities < priority, priorities > priority
        ahead_s = _sums(rows[earlier], left_s[earlier], num_rows)
        running_s = np.zeros(num_rows)  # of a step it cannot share: half of it, on average
        running_s[rows[later]] = np.minimum(left_s, self._steps_s[queues.slots])[later] / 2
        waits = ahead_s + self._waits_among_equals(_Queues(queues.slots[equal], rows[equal], left_s[equal]), takes_s)
        return waits + np.where(waits > 0, 0.0, running_s)

    def _waits_among_equals(self, queues: _Queues, takes_s: Floats) -> Floats:
        """Delay by prompts of the same priority: all of them, or less where it shares the steps of the first one."""
        num_rows = len(takes_s)
        waits = _sums(queues.rows, queues.left_s, num_rows)
        first = _first_of_each(queues.rows)
        shares = 2 * queues.left_s[first] > self._steps_s[queues.slots[first]]
        shares &= takes_s[queues.rows[first]] < queues.left_s[first]
        first = first[shares]
        if not len(first):
            return waits
        first_rows = queues.rows[first]
        own_s = np.full(num_rows, -np.inf)  # of the prompt there; on other rows no prompt is shorter
        own_s[first_rows] = takes_s[first_rows]
        is_shorter = queues.left_s < own_s[queues.rows]
        shorter_s = _sums(queues.rows[is_shorter], queues.left_s[is_shorter], num_rows)[first_rows]
        shared_s = shorter_s + np.minimum(queues.left_s[first], shorter_s + takes_s[first_rows])
        shared_s += self._steps_s[queues.slots[first]] / 2
        waits[first_rows] = np.minimum(waits[first_rows], shared_s)
        return waits

    def _now(self, now_s: float) -> _Queues:
        """The queues as of now: the first prompt of a row is being computed."""
        if self._seen is not None and self._seen[0] == now_s:
            return self._seen[1]
        used = (self._rows >= 0).nonzero()[0]
        slots = used[np.lexsort((self._orders[used], self._priorities[used], self._rows[used]))]
        rows, left_s = self._rows[slots], self._left_s[slots]  # copies
        if len(slots):
            first = _first_of_each(rows)
            passed_s = np.maximum(now_s - self._updated_s[rows[first]], 0.0)
            left_s[first] = np.maximum(left_s[first] - passed_s, 0.0)
        queues = _Queues(slots, rows, left_s)
        self._seen = now_s, queues
        return queues

    def _advance(self, row: int, now_s: float) -> None:
        """Subtracts the work that the row has done since the last time."""
        self._seen = None
        while row >= len(self._updated_s):
            self._updated_s = np.concatenate([self._updated_s, np.zeros_like(self._updated_s)])
        passed_s, self._updated_s[row] = max(now_s - self._updated_s[row], 0.0), now_s
        waiting = [slot for slot in self._of_row.get(row, ()) if self._left_s[slot] > 0]
        while waiting and passed_s > 0:
            passed_s -= self._work_off(waiting, passed_s)
            waiting = [slot for slot in waiting if self._left_s[slot] > 0]

    def _work_off(self, waiting: list[int], passed_s: float) -> float:
        """Subtracts work until a prompt is done or `passed_s` are over. Returns the seconds used."""
        first, left_s = waiting[0], self._left_s
        shortest = min(self._sharing(waiting), key=lambda slot: left_s[slot], default=None)
        if shortest is None:
            took_s = min(passed_s, float(left_s[first]))
            left_s[first] -= took_s
        else:
            took_s = min(passed_s, 2 * float(left_s[shortest]))
            left_s[first] -= took_s / 2
            left_s[shortest] -= took_s / 2
        return took_s

    def _sharing(self, waiting: list[int]) -> Iterable[int]:
        """The slots that share the steps of the first one."""
        first, *others = waiting
        if 2 * self._left_s[first] <= self._steps_s[first]:
            return ()
        longest_s, priority = self._left_s[first], self._priorities[first]
        return [slot for slot in others if self._priorities[slot] == priority and self._left_s[slot] < longest_s]

    def _double(self) -> None:
        num = len(self._rows)
        self._rows = np.concatenate([self._rows, np.full(num, -1)])
        self._orders = np.concatenate([self._orders, np.zeros(num, dtype=np.int64)])
        self._priorities = np.concatenate([self._priorities, np.zeros(num, dtype=np.int64)])
        self._left_s = np.concatenate([self._left_s, np.zeros(num)])
        self._steps_s = np.concatenate([self._steps_s, np.zeros(num)])
        self._free.extend(range(2 * num - 1, num - 1, -1))


def _sums(rows: NDArray[np.int64], seconds: Floats, num_rows: int) -> Floats:
    return np.bincount(rows, weights=seconds, minlength=num_rows)[:num_rows].astype(np.float64, copy=False)


def _first_of_each(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Index of the first entry of each row; `rows` are sorted."""
    begins = np.empty(len(rows), dtype=np.bool_)
    begins[:1] = True
    np.not_equal(rows[1:], rows[:-1], out=begins[1:])
    return begins.nonzero()[0]
