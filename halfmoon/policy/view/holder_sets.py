"""Sets of holders as bit rows with small numbers, each set stored once.

The blocks of a prefix mostly live in the same places, so millions of blocks share a few thousand sets.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from halfmoon.policy.view.key_table import KeyTable

SetIds = NDArray[np.uint32]
EMPTY = 0  # number of the empty set
_WORD_BITS = 64


class HolderSets:
    """Owns the sets, and how many blocks use each. Knows nothing of blocks, nor what a holder is.

    A set is looked up by the XOR of one random 64-bit word per holder, then compared as a whole. After `clear` two
    numbers may stand for equal sets, which only costs memory.
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
        """Memory of the sets and their lookup table, in bytes."""
        return self.rows.nbytes + self._hashes.nbytes + self._uses.nbytes + self._ids.num_bytes

    @property
    def num_holders(self) -> int:
        """Number of holders that the rows have bits for."""
        return int(self.rows.shape[1]) * _WORD_BITS

    def make_room(self, holder: int) -> None:
        """Widens the rows to hold the number `holder`."""
        while self.num_holders <= holder:
            self.rows = np.concatenate([self.rows, np.zeros_like(self.rows)], axis=1)
            more = self._random.integers(1, 2**64, size=len(self._words), dtype=np.uint64)
            self._words = np.concatenate([self._words, more])

    def flipped(self, ids: SetIds, holder: int) -> SetIds:
        """The sets `ids` with `holder` toggled in each."""
        hashes = self._hashes[ids] ^ self._words[holder]
        rows = self.rows[ids]
        rows[:, holder // _WORD_BITS] ^= _bit(holder)
        distinct, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
        numbers = self._ids.get(distinct)
        is_same = (self.rows[numbers] == rows[first]).all(axis=1)  # an absent hash gives set 0, the empty one
        missing = np.flatnonzero(~is_same)
        numbers[missing] = self._add(distinct[missing], rows[first[missing]])
        return numbers[inverse]

    def holds(self, ids: SetIds, holder: int) -> NDArray[np.bool_]:
        """Whether `holder` is in each set."""
        held: NDArray[np.bool_] = (self.rows[ids, holder // _WORD_BITS] & _bit(holder)) != 0
        return held

    def unite(self, rows: NDArray[np.uint64], union: int, members: Sequence[int]) -> None:
        """Adds `union` to those of these rows [num_rows, holder // 64] that have one of `members`."""
        mask = np.zeros(rows.shape[1], dtype=np.uint64)
        for member in members:
            mask[member // _WORD_BITS] |= _bit(member)
        rows[(rows & mask).any(axis=1), union // _WORD_BITS] |= _bit(union)

    def use(self, ids: SetIds, counts: NDArray[np.int64]) -> None:
        """Adds `counts` to the users of each set, and frees sets without users."""
        np.add.at(self._uses, ids, counts)
        unused = np.unique(ids[(self._uses[ids] == 0) & (ids != EMPTY)])
        if len(unused):
            self._drop_names(unused)
            self.rows[unused] = 0
            self._hashes[unused] = 0
            self._free.extend(unused.tolist())

    def clear(self, holder: int) -> None:
        """Removes `holder` from every set."""
        word = holder // _WORD_BITS
        ids = np.flatnonzero(self.rows[:, word] & _bit(holder)).astype(np.uint32)
        self._drop_names(ids)
        self.rows[ids, word] ^= _bit(holder)
        self._hashes[ids] ^= self._words[holder]
        hashes, first = np.unique(self._hashes[ids], return_index=True)
        new = (self._ids.get(hashes) == 0) & (hashes != 0)
        self._ids.put(hashes[new], ids[first[new]])

    def has_holders(self, ids: SetIds) -> NDArray[np.bool_]:
        """Whether each set is non-empty; several numbers may stand for the empty one."""
        is_used: NDArray[np.bool_] = self._hashes[ids] != 0
        return is_used

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
        """Removes the hashes of sets from the lookup, unless they belong to another number by now.

        A later equal set gets a new number.
        """
        ids = ids[self._ids.get(self._hashes[ids]) == ids]
        self._ids.put(self._hashes[ids], np.zeros(len(ids), dtype=np.uint32))


def _bit(holder: int) -> np.uint64:
    return np.uint64(1 << (holder % _WORD_BITS))
