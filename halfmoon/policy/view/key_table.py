"""A map from 64-bit keys to 32-bit values in numpy arrays: 12 bytes per slot, thousands of look-ups at a time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.uint64]  # uniformly distributed: their low bits are the hash
Values = NDArray[np.uint32]  # 0 means absent

_MAX_LOAD = 0.6  # of the slots: linear probing then reads 1.8 slots for a present key, 3.6 for an absent one
_ROOM = 1.5  # capacity after growing, relative to the present keys
_MIN_MIGRATED = 4_096  # slots that each `put` migrates while the table grows
_MIGRATED_PER_KEY = 8  # so that the old slots are empty before the new ones are full
_SAMPLE = 4_096  # slots sampled to estimate how many are live
_NO_VALUES: Values = np.zeros(0, dtype=np.uint32)


def _is_present(values: Values) -> NDArray[np.bool_]:
    present: NDArray[np.bool_] = values != 0
    return present


class KeyTable:
    """Owns the slots of an open-addressing table. Knows nothing of what its keys and values mean.

    The table grows a little with each `put`, never at once, so no call takes longer than its own keys justify.
    Meanwhile a key is in the new slots, or else in the old ones. A removed key keeps its slot, with value 0, until the
    table grows; `is_live` then says which values to keep. Key 0 is never present and must not be put.
    """

    def __init__(self, is_live: Callable[[Values], NDArray[np.bool_]] = _is_present, num_slots: int = 1024) -> None:
        assert num_slots & (num_slots - 1) == 0
        self._is_live = is_live
        self._new = _Slots(num_slots)
        self._old: _Slots | None = None
        self._num_migrated = 0  # slots of `_old`

    @property
    def num_bytes(self) -> int:
        """Memory of all slots, in bytes."""
        return self._new.num_bytes + (self._old.num_bytes if self._old else 0)

    def get(self, keys: Keys) -> Values:
        """The value of each key; 0 if absent."""
        at = self._new.find(keys)
        values = self._new.values[at]
        if self._old is not None:
            missing = np.flatnonzero(self._new.keys[at] != keys)
            values[missing] = self._old.values[self._old.find(keys[missing])]
        return values

    def put(self, keys: Keys, values: Values) -> Values:
        """Sets the values of distinct keys; 0 removes a key. Returns the values of keys dropped while growing."""
        if self._new.num_used + len(keys) > _MAX_LOAD * len(self._new.keys):
            dropped = self._grow(len(keys))
        else:
            dropped = _NO_VALUES
        self._new.put(keys, values)
        return np.concatenate([dropped, self._migrate(_MIN_MIGRATED + _MIGRATED_PER_KEY * len(keys))])

    def _grow(self, num_more: int) -> Values:
        """Allocates slots for the live keys: no more than before if most keys are dead."""
        dropped = self._migrate(len(self._old.keys)) if self._old is not None else _NO_VALUES
        sample = self._new.values[:: max(1, len(self._new.values) // _SAMPLE)]
        num_live = int(self._is_live(sample).mean() * len(self._new.values))
        num_slots = 1024
        while num_slots * _MAX_LOAD < _ROOM * (num_live + num_more):
            num_slots *= 2
        self._old, self._new = self._new, _Slots(num_slots)
        self._num_migrated = 0
        return dropped

    def _migrate(self, num_slots: int) -> Values:
        old = self._old
        if old is None:
            return _NO_VALUES
        part = slice(self._num_migrated, self._num_migrated + num_slots)
        self._num_migrated = part.stop
        present = np.flatnonzero(old.values[part]) + part.start
        keys = old.keys[present]
        present = present[self._new.keys[self._new.find(keys)] != keys]  # new slots hold the newer values
        live = self._is_live(old.values[present])
        self._new.put(old.keys[present[live]], old.values[present[live]])
        if self._num_migrated >= len(old.keys):
            self._old = None
        left_behind: Values = old.values[present[~live]]
        return left_behind


class _Slots:
    """Owns two parallel arrays, probed linearly. Key 0 is an empty slot."""

    def __init__(self, num_slots: int) -> None:
        self.keys: Keys = np.zeros(num_slots, dtype=np.uint64)
        self.values: Values = np.zeros(num_slots, dtype=np.uint32)
        self.num_used = 0

    @property
    def num_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def find(self, keys: Keys) -> NDArray[np.int64]:
        """The slot of each key, or the empty slot at which its probe ends."""
        at = (keys & np.uint64(len(self.keys) - 1)).astype(np.int64)
        self._follow(keys, at, np.arange(len(keys)))
        return at

    def put(self, keys: Keys, values: Values) -> None:
        """Sets the values of keys. There must be room."""
        at = self.find(keys)
        absent = np.flatnonzero(self.keys[at] != keys)
        self.num_used += len(absent)
        while len(absent):  # if several keys end at one empty slot, the last gets it and the others go on
            self.keys[at[absent]] = keys[absent]
            absent = absent[self.keys[at[absent]] != keys[absent]]
            self._follow(keys, at, absent)
        self.values[at] = values

    def _follow(self, keys: Keys, at: NDArray[np.int64], pending: NDArray[np.int64]) -> None:
        """Advances `at` of the `pending` keys to the end of their probes."""
        mask = len(self.keys) - 1
        while True:
            present = self.keys[at[pending]]
            pending = pending[(present != keys[pending]) & (present != 0)]
            if not len(pending):
                return
            at[pending] = (at[pending] + 1) & mask
