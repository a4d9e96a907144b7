"""Which sets of holders there are: bit rows under small numbers, each set stored once.

The blocks of one prefix are mostly in the same places, so millions of blocks share a few thousand sets.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from halfmoon.policy.view.key_table import KeyTable

SetIds = NDArray[np.uint32]
EMPTY = 0  # the number of the empty set
_WORD_BITS = 64


class HolderSets:
    """Owns the sets, and how many blocks use each. Knows nothing of blocks and of what a holder is.

    A set is found by the exclusive or of a random 64-bit word for each holder in it, and then compared as a whole.
    After `clear` two numbers may stand for equal sets: that costs memory and nothing else.
    """

    def __init__(self) -> None:
        self.rows: NDArray[np.uint64] = np.zeros((1024, 1), dtype=np.uint64)  # [set, holder // 64]
        self._hashes: NDArray[np.uint64] = np.zeros(1024, dtype=np.uint64)
        self._uses: NDArray[np.int64] = np.zeros(1024, dtype=np.int64)
        self._ids = KeyTable()
        self._free: list[int] = list(range(1023, 0, -1))
        self._random = np.random.default_rng(0)
        self._words: NDArray[np.uint64] = self._random.integers(1, 2**64, size=_WORD_BITS, dtype=np.uint64)

    @property
    def num_bytes(self) -> int:
        """Memory of the sets and of what finds them."""
        return self.rows.nbytes + self._hashes.nbytes + self._uses.nbytes + self._ids.num_bytes

    @property
    def num_holders(self) -> int:
        """Holder numbers that the rows have bits for."""
        return int(self.rows.shape[1]) * _WORD_BITS

    def make_room(self, holder: int) -> None:
        """Holder numbers up to `holder` may be used from now on."""
        while self.num_holders <= holder:
            self.rows = np.concatenate([self.rows, np.zeros_like(self.rows)], axis=1)
            more = self._random.integers(1, 2**64, size=len(self._words), dtype=np.uint64)
            self._words = np.concatenate([self._words, more])

    def flipped(self, ids: SetIds, holder: int) -> SetIds:
        """The sets that are `ids` with `holder` put in where it is not, and taken out where it is."""
        hashes = self._hashes[ids] ^ self._words[holder]
        rows = self.rows[ids]
        rows[:, holder // _WORD_BITS] ^= _bit(holder)
        wanted, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
        found = self._ids.get(wanted)
        is_same = (self.rows[found] == rows[first]).all(axis=1)  # nothing found is set 0: the same if empty
        missing = np.flatnonzero(~is_same)
        found[missing] = self._add(wanted[missing], rows[first[missing]])
        return found[inverse]

    def holds(self, ids: SetIds, holder: int) -> NDArray[np.bool_]:
        """Whether `holder` is in each set."""
        held: NDArray[np.bool_] = (self.rows[ids, holder // _WORD_BITS] & _bit(holder)) != 0
        return held

    def use(self, ids: SetIds, counts: NDArray[np.int64]) -> None:
        """Adds to the users of each set; a set that nobody uses any more is forgotten."""
        np.add.at(self._uses, ids, counts)
        unused = np.unique(ids[(self._uses[ids] == 0) & (ids != EMPTY)])
        if len(unused):
            self._drop_names(unused)
            self.rows[unused] = 0
            self._hashes[unused] = 0
            self._free.extend(unused.tolist())

    def clear(self, holder: int) -> None:
        """Takes `holder` out of every set."""
        word = holder // _WORD_BITS
        ids = np.flatnonzero(self.rows[:, word] & _bit(holder)).astype(np.uint32)
        self._drop_names(ids)
        self.rows[ids, word] ^= _bit(holder)
        self._hashes[ids] ^= self._words[holder]
        hashes, first = np.unique(self._hashes[ids], return_index=True)
        new = (self._ids.get(hashes) == 0) & (hashes != 0)
        self._ids.put(hashes[new], ids[first[new]])

    def has_holders(self, ids: SetIds) -> NDArray[np.bool_]:
        """Whether anybody is in each set; several numbers may stand for the empty one."""
        found: NDArray[np.bool_] = self._hashes[ids] != 0
        return found

    def _add(self, hashes: NDArray[np.uint64], rows: NDArray[np.uint64]) -> SetIds:
        while len(self._free) < len(hashes):
            self._double()
        ids = np.array([self._free.pop() for _ in range(len(hashes))], dtype=np.uint32)
        self.rows[ids] = rows
        self._hashes[ids] = hashes
        self._ids.put(hashes, ids)
        return ids

    def _double(self) -> None:
        num = len(self.rows)
        self.rows = np.concatenate([self.rows, np.zeros_like(self.rows)])
        self._hashes = np.concatenate([self._hashes, np.zeros_like(self._hashes)])
        self._uses = np.concatenate([self._uses, np.zeros_like(self._uses)])
        self._free.extend(range(2 * num - 1, num - 1, -1))

    def _drop_names(self, ids: SetIds) -> None:
        """A later equal set gets a number of its own; a name that another number has by now stays."""
        ids = ids[self._ids.get(self._hashes[ids]) == ids]
        self._ids.put(self._hashes[ids], np.zeros(len(ids), dtype=np.uint32))


def _bit(holder: int) -> np.uint64:
    return np.uint64(1 << (holder % _WORD_BITS))
