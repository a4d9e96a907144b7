"""The load of each decode worker at a future moment: running requests leave, others join."""

from __future__ import annotations

import math
from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from halfmoon.policy.forecast.colocated_decodes import DecodeIntervals
from halfmoon.policy.forecast.colocated_workers import Spans
from halfmoon.policy.forecast.room import Before, Decoding, Room, paused_for
from halfmoon.policy.forecast.row_slots import RowSlots
from halfmoon.policy.forecast.usual_joins import UsualJoins
from halfmoon.policy.models.chunk_length import StepDecodes, step_decodes
from halfmoon.policy.models.latency import Floats
from halfmoon.policy.preemption import Pauses
from halfmoon.policy.values import NO_NEIGHBOURS, DecodeLoad, DecodeLoads, Neighbours

_NO_SLOTS: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
OVERTIME = 0.25  # of its life so far: how much longer a request stays that has outlived its prediction


class DecodeForecast:
    """Owns when each request of this gateway is predicted to join and leave its decode worker. Knows rows, not names.

    A request still there after its predicted end is expected to stay for another quarter of its life so far.
    """

    def __init__(self) -> None:
        self._slots: dict[str, int] = {}
        self._free: list[int] = []
        self._rows: NDArray[np.int64] = np.full(64, -1)  # by slot; -1 if free
        self._joins_s: Floats = np.full(64, np.inf)  # inf in a free slot
        self._leaves_s: Floats = np.full(64, np.inf)
        self._contexts: Floats = np.zeros(64)  # tokens, in its first step
        self._growths: Floats = np.zeros(64)  # tokens by which that grows until its last one
        self._mean_contexts: Floats = np.zeros(64)  # tokens, mean over its life
        self._tbt_targets_s: Floats = np.full(64, np.inf)
        self._class_priorities: NDArray[np.int64] = np.zeros(64, dtype=np.int64)
        self._max_pauses_s: Floats = np.zeros(64)
        self.num_pausable = 0  # requests that may be paused
        self._free.extend(range(63, -1, -1))
        self._num_used = 0  # slots from here on were never used
        self._seen: tuple[float, Floats] | None = None  # time and result of the latest `_ends_s`
        self._of_row: dict[int, RowSlots] = {}
        self._joins: dict[int, UsualJoins] = {}  # by row

    def __len__(self) -> int:
        return len(self._slots)

    def join(
        self,
        request_id: str,
        row: int,
        joins_s: float,
        leaves_s: float,
        context_tokens: float,
        growth_tokens: float,
        tbt_target_s: float = math.inf,
        class_priority: int = 0,
        max_pause_s: float = 0.0,
    ) -> None:
        """Adds a request on `row` that decodes from `joins_s` to `leaves_s`. Its first step sees `context_tokens` of
        it, its last one `growth_tokens` more: all of its tokens, unless it is under a KV policy.
        """
        self._seen = None
        if not self._free:
            self._double()
        slot = self._slots[request_id] = self._free.pop()
        self._num_used = max(self._num_used, slot + 1)
        self._rows[slot] = row
        self._of_row.setdefault(row, RowSlots()).add(slot)
        self._joins_s[slot], self._leaves_s[slot] = joins_s, max(leaves_s, joins_s)
        self._contexts[slot], self._growths[slot] = context_tokens, growth_tokens
        self._mean_contexts[slot] = context_tokens + 0.5 * growth_tokens
        self._tbt_targets_s[slot] = tbt_target_s
        self._class_priorities[slot], self._max_pauses_s[slot] = class_priority, max_pause_s
        self.num_pausable += max_pause_s > 0

    def begin(self, request_id: str, now_s: float) -> None:
        """Starts the decode of a request now; it takes as long as predicted."""
        slot = self._slots.get(request_id)
        if slot is not None:
            self._seen = None
            joins_s, leaves_s = float(self._joins_s[slot]), float(self._leaves_s[slot])
            self._joins_s[slot], self._leaves_s[slot] = now_s, now_s + leaves_s - joins_s
            joins = self._joins.setdefault(int(self._rows[slot]), UsualJoins())
            num_tokens = float(self._contexts[slot] + self._growths[slot])
            joins.add(now_s, leaves_s - joins_s, num_tokens, int(self._class_priorities[slot]))

    def leave(self, request_id: str) -> None:
        """Removes a request, if it is there."""
        slot = self._slots.pop(request_id, None)
        if slot is not None:
            self._seen = None
            self._of_row[int(self._rows[slot])].remove(slot)
            self._rows[slot] = -1
            self._joins_s[slot] = self._leaves_s[slot] = np.inf
            self.num_pausable -= bool(self._max_pauses_s[slot] > 0)
            self._free.append(slot)

    def loads(self, at_s: float, now_s: float, num_rows: int) -> DecodeLoads:
        """The load of each row at `at_s`, seen from `now_s`."""
        return self.loads_lower_bound(at_s, at_s, now_s, num_rows)

    def loads_lower_bound(self, from_s: float, until_s: float, now_s: float, num_rows: int) -> DecodeLoads:
        """Lower bound on the load of each row at any moment of a period: the requests there at `from_s` that stay."""
        return self._loads(self._throughout(from_s, until_s, now_s), from_s, now_s, num_rows)

    def giving_way(
        self, class_priority: int, from_s: float, until_s: float, now_s: float, num_rows: int
    ) -> DecodeLoads:
        """The part of `loads_lower_bound` that may be paused for a class of that priority."""
        there = self._throughout(from_s, until_s, now_s)
        gives_way = (self._max_pauses_s[there] > 0) & (self._class_priorities[there] > class_priority)
        return self._loads(there[gives_way], from_s, now_s, num_rows)

    def _throughout(self, from_s: float, until_s: float, now_s: float) -> NDArray[np.int64]:
        """The slots of the requests that decode at `from_s` and stay."""
        is_there = self._joins_s[: self._num_used] <= from_s
        is_there &= self._ends_s(now_s) >= until_s
        return is_there.nonzero()[0]

    def _loads(self, there: NDArray[np.int64], from_s: float, now_s: float, num_rows: int) -> DecodeLoads:
        rows, joins_s = self._rows[there], self._joins_s[there]
        share = self._ends_s(now_s)[there]
        share -= joins_s
        np.maximum(share, 1e-9, out=share)
        np.divide(from_s - joins_s, share, out=share)
        np.minimum(share, 1.0, out=share)
        share *= self._growths[there]
        share += self._contexts[there]
        batch = np.bincount(rows, minlength=num_rows).astype(np.float64)
        context = np.bincount(rows, weights=share, minlength=num_rows).astype(np.float64, copy=False)
        return DecodeLoads(batch[:num_rows], context[:num_rows])

    def load(self, row: int, at_s: float, now_s: float) -> DecodeLoad:
        """The load of one row at `at_s`."""
        there = self._slots_of(row)
        joins_s, ends_s = self._joins_s[there], self._ends_s(now_s)[there]
        is_there = (joins_s <= at_s) & (ends_s >= at_s)
        share = (at_s - joins_s) / np.maximum(ends_s - joins_s, 1e-9)
        context = self._contexts[there] + self._growths[there] * np.minimum(share, 1.0)
        return DecodeLoad(int(np.count_nonzero(is_there)), float(np.add.reduce(context[is_there])))

    def neighbours(self, row: int, until_s: float, now_s: float) -> Neighbours:
        """The requests that decode on `row` at any time from now to `until_s`. Knows no prompts."""
        there = self._slots_of(row)
        joins_s, ends_s = self._joins_s[there], self._ends_s(now_s)[there]
        is_there = (joins_s <= until_s) & (ends_s > now_s)
        num, there = int(np.count_nonzero(is_there)), there[is_there]
        if not num:
            return NO_NEIGHBOURS
        lives_s = ends_s[is_there] - joins_s[is_there]
        load = DecodeLoad(num, float(np.add.reduce(self._mean_contexts[there])))
        target_s = float(np.minimum.reduce(self._tbt_targets_s[there]))
        return Neighbours(load, target_s, float(np.add.reduce(lives_s)) / num, 0.0)

    def next_ends(self, row: int | None, now_s: float, without: Collection[str] = ()) -> Floats:
        """When the requests of `row`, or of all rows, are predicted to leave, soonest first."""
        rows = self._rows[: self._num_used]
        there = rows >= 0 if row is None else rows == row
        there[[self._slots[request_id] for request_id in without if request_id in self._slots]] = False
        return np.sort(self._ends_s(now_s)[there])

    def mean_load(self, row: int, from_s: float, until_s: float, now_s: float) -> DecodeLoad:
        """Mean load of `row` over a period: the known requests, and as many as usually join in that time."""
        there = self._slots_of(row)
        joins_s, ends_s = self._joins_s[there], self._ends_s(now_s)[there]
        length_s = max(until_s - from_s, 1e-9)
        shares = np.maximum(np.minimum(ends_s, until_s) - np.maximum(joins_s, from_s), 0.0) / length_s
        context = self._mean_contexts[there]
        extra = self._joins[row].mean_present(length_s, now_s) if row in self._joins else DecodeLoad(0.0, 0.0)
        return DecodeLoad(float(np.add.reduce(shares)) + extra.batch, float(shares @ context) + extra.context_tokens)

    def before(self, row: int, class_priority: int, now_s: float) -> Before:
        """The requests that go before a newcomer of a class on `row`, whether they decode or are still to join."""
        there = self._slots_of(row)
        there = there[(self._max_pauses_s[there] <= 0) | (self._class_priorities[there] <= class_priority)]
        ends_s = self._ends_s(now_s)[there]
        usual = self._joins.get(row)
        return Before(
            self._joins_s[there],
            ends_s,
            self._mean_contexts[there],
            lambda length_s: usual.mean_present(length_s, now_s, class_priority) if usual else DecodeLoad(0.0, 0.0),
        )

    def pause_for(self, request_id: str, room: Room) -> None:
        """Moves the ends of the answers that are paused when a request joins: until others leave them a place, and by
        what their classes allow at most.
        """
        if not self.num_pausable:
            return
        self._seen = None
        slot = self._slots[request_id]
        at_s = float(self._joins_s[slot])
        there = self._slots_of(int(self._rows[slot]))
        there = there[(self._joins_s[there] <= at_s) & (self._leaves_s[there] >= at_s)]
        decoding = [self._decoding(one) for one in there.tolist() if one != slot]
        paused = paused_for(self._decoding(slot), decoding, room, at_s)
        goes_on = ~np.isin(there, [one.slot for one in paused])
        frees_s = np.sort(self._leaves_s[there[goes_on]]).tolist()
        for one, free_s in zip(reversed(paused), frees_s, strict=False):  # the first in turn goes on first
            self._leaves_s[one.slot] += min(free_s - at_s, one.pauses.max_pause_s)

    def _decoding(self, slot: int) -> Decoding:
        pauses = Pauses(int(self._class_priorities[slot]), float(self._max_pauses_s[slot]))
        return Decoding(slot, pauses, float(self._joins_s[slot]), float(self._mean_contexts[slot]))

    def present(self, row: int, now_s: float, without: Collection[str] = ()) -> DecodeIntervals:
        """The requests in decode on `row` now, except those in `without`."""
        there = self._present(row, now_s, without)
        return DecodeIntervals(self._ends_s(now_s)[there], self._mean_contexts[there], self._tbt_targets_s[there])

    def is_any_present(self, row: int, now_s: float, without: Collection[str] = ()) -> bool:
        """Whether `step_decodes` has a batch above 0."""
        slots = self._of_row.get(row)
        if slots is None:
            return False
        excluded = {self._slots.get(request_id) for request_id in without}
        joins_s, leaves_s = self._joins_s, self._leaves_s
        return any(joins_s[slot] <= now_s != leaves_s[slot] and slot not in excluded for slot in slots)

    def step_decodes(self, row: int, role: str, now_s: float, without: Collection[str] = ()) -> StepDecodes:
        """What decodes in a step that begins now on `row`, a worker of that role: `present`, without requests that
        leave at this very moment.
        """
        there = self._present(row, now_s, without)
        there = there[self._leaves_s[there] != now_s]
        context_tokens = float(np.add.reduce(self._mean_contexts[there]))
        return step_decodes(len(there), context_tokens, self._tbt_targets_s[there].tolist(), role)

    def _present(self, row: int, now_s: float, without: Collection[str]) -> NDArray[np.int64]:
        there = self._slots_of(row)
        there = there[self._joins_s[there] <= now_s]
        excluded = [self._slots[request_id] for request_id in without if request_id in self._slots]
        if not excluded:
            return there
        is_wanted = np.ones(self._num_used, dtype=np.bool_)
        is_wanted[excluded] = False
        return there[is_wanted[there]]

    def _slots_of(self, row: int) -> NDArray[np.int64]:
        """The slots of a row, ascending."""
        slots = self._of_row.get(row)
        return _NO_SLOTS if slots is None else slots.ascending

    def spans(self, rows: NDArray[np.bool_], now_s: float, without: Collection[str] = ()) -> Spans:
        """When each request on `rows` decodes, seen from now, except those in `without`.

        `rows` is a mask [num_rows + 1] with a last entry of False, which free slots look up.
        """
        there = rows[self._rows[: self._num_used]]
        there[[self._slots[request_id] for request_id in without if request_id in self._slots]] = False
        slots = np.flatnonzero(there)
        return Spans(self._rows[slots], self._joins_s[slots], self._ends_s(now_s)[slots])

    def _ends_s(self, now_s: float) -> Floats:
        """When the request in each used slot ends, seen from now; read-only.

        Kept until a request joins, begins or leaves, because a decision asks several times at one moment.
        """
        if self._seen is None or self._seen[0] != now_s:
            joins_s, leaves_s = self._joins_s[: self._num_used], self._leaves_s[: self._num_used]
            self._seen = now_s, np.where(leaves_s < now_s, _overtime_ends(joins_s, now_s), leaves_s)
        return self._seen[1]

    def _double(self) -> None:
        num = len(self._rows)
        self._rows = np.concatenate([self._rows, np.full(num, -1)])
        self._joins_s = np.concatenate([self._joins_s, np.full(num, np.inf)])
        self._leaves_s = np.concatenate([self._leaves_s, np.full(num, np.inf)])
        self._contexts = np.concatenate([self._contexts, np.zeros(num)])
        self._growths = np.concatenate([self._growths, np.zeros(num)])
        self._mean_contexts = np.concatenate([self._mean_contexts, np.zeros(num)])
        self._tbt_targets_s = np.concatenate([self._tbt_targets_s, np.full(num, np.inf)])
        self._class_priorities = np.concatenate([self._class_priorities, np.zeros(num, dtype=np.int64)])
        self._max_pauses_s = np.concatenate([self._max_pauses_s, np.zeros(num)])
        self._free.extend(range(2 * num - 1, num - 1, -1))


def _overtime_ends(joins_s: Floats, now_s: float) -> Floats:
    """When overdue requests that joined at `joins_s` are predicted to leave."""
    ends_s: Floats = now_s - joins_s
    ends_s *= OVERTIME
    ends_s += now_s
    return ends_s
