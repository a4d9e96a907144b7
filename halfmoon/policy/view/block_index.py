"""Which worker or store holds which block, and how much of a prompt's prefix each holder has.

Ten million pairs of block and holder take a few dozen bytes each, and a prompt of 2,000 blocks is matched against
hundreds of holders in a few hundred microseconds: `benchmarks/gateway/placement.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from halfmoon.policy.view.holder_sets import EMPTY, HolderSets, SetIds
from halfmoon.policy.view.key_table import Keys, KeyTable

SHORT_KEY_BYTES = 8


def short_keys(keys: Iterable[bytes]) -> Keys:
    """The first 8 bytes of each block key, as the index takes them.

    Among ten million blocks two keys agree in these with probability 3e-6; a wrong match costs a wrong estimate.
    """
    return unpack_keys(b"".join(key[:SHORT_KEY_BYTES] for key in keys))


def unpack_keys(data: bytes) -> Keys:
    """Short keys from their concatenated bytes."""
    keys = np.frombuffer(data, dtype="<u8").astype(np.uint64)
    keys[keys == 0] = 1  # 0 marks an empty slot
    return keys


_NO_KEYS: Keys = np.zeros(0, dtype=np.uint64)


@dataclass(frozen=True, slots=True)
class BlockEvents:
    """What changed at one holder since its previous message. A key is in `stored` or in `evicted`, and only once."""

    sequence: int  # 1 more than in the previous message
    stored: Keys = field(default_factory=lambda: _NO_KEYS)
    evicted: Keys = field(default_factory=lambda: _NO_KEYS)
    is_snapshot: bool = False  # `stored` replaces all blocks of the holder; later messages may continue it


class BlockIndex:
    """Owns the map from block keys to holders. Knows holders by small, dense numbers, which `number` assigns."""

    def __init__(self) -> None:
        self._sets = HolderSets()
        self._table = KeyTable(self._sets.has_holders)
        self._numbers: dict[str, int] = {}
        self._free_numbers: list[int] = []
        self._sequences: dict[int, int | None] = {}  # of the latest message; None while waiting for a snapshot
        self._num_blocks: dict[int, int] = {}
        self._unions: dict[int, tuple[int, ...]] = {}

    @property
    def num_bytes(self) -> int:
        """Memory of the index, in bytes."""
        return self._table.num_bytes + self._sets.num_bytes

    @property
    def num_pairs(self) -> int:
        """Pairs of block and holder."""
        return sum(self._num_blocks.values())

    def number(self, holder: str) -> int:
        """The number of `holder`, assigned if it is new. Its first message must be a snapshot."""
        if holder not in self._numbers:
            number = self._free_numbers.pop() if self._free_numbers else len(self._numbers)
            self._sets.make_room(number)
            self._numbers[holder] = number
            self._sequences[number] = None
            self._num_blocks[number] = 0
        return self._numbers[holder]

    def unite(self, number: int, members: Iterable[int]) -> None:
        """From now on the holder `number` has what any of `members` has. It gets no messages of its own."""
        self._unions[number] = tuple(members)

    def apply(self, number: int, events: BlockEvents) -> bool:
        """Applies one message of a holder. False if messages are missing: the index then waits for a snapshot.

        Until it comes the known blocks stay, as the better guess. A repeated message changes nothing.
        """
        last = self._sequences[number]
        if events.is_snapshot:
            self._clear(number)
        elif last is None or events.sequence > last + 1:
            self._sequences[number] = None
            return False
        elif events.sequence <= last:
            return True
        self._sequences[number] = events.sequence
        self._num_blocks[number] += self._change(number, events.stored, is_held=True)
        self._num_blocks[number] -= self._change(number, events.evicted, is_held=False)
        return True

    def forget(self, holder: str) -> None:
        """Removes a holder. Its number will be reused."""
        number = self._numbers.pop(holder, None)
        if number is not None:
            self._clear(number)
            self._unions.pop(number, None)
            del self._sequences[number], self._num_blocks[number]
            self._free_numbers.append(number)

    def num_blocks(self, number: int) -> int:
        """Number of blocks of a holder."""
        return self._num_blocks[number]

    def holds(self, keys: Keys, number: int) -> NDArray[np.bool_]:
        """Whether the holder has each of these blocks."""
        return self._sets.holds(self._table.get(keys), number)

    def match(self, keys: Keys) -> NDArray[np.int64]:
        """How many leading blocks of the prompt each holder has: [num_holders + 1], with a last 0 for index -1."""
        if not len(keys):
            return np.zeros(self._sets.num_holders + 1, dtype=np.int64)
        ids = self._table.get(keys)
        if ids[0] == EMPTY:  # the common case where prompts share little
            return np.zeros(self._sets.num_holders + 1, dtype=np.int64)
        starts = _run_starts(ids)
        rows = self._sets.rows[ids[starts]]
        for union, members in self._unions.items():
            self._sets.unite(rows, union, members)
        rows = np.bitwise_and.accumulate(rows, axis=0)  # the holders of all blocks so far
        shrinks = np.flatnonzero((rows[1:] != rows[:-1]).any(axis=1))
        ends = np.concatenate([[0], starts[shrinks + 1], [len(keys)]])
        last_of_each = np.concatenate([shrinks, [len(rows) - 1]])
        bits = np.unpackbits(rows[last_of_each].astype("<u8").view(np.uint8), axis=1, bitorder="little")
        cached_blocks = ends[bits.sum(axis=0, dtype=np.uint16)]
        return np.concatenate([cached_blocks, [0]])

    def _change(self, number: int, keys: Keys, *, is_held: bool) -> int:
        """Adds the holder to the sets of `keys`, or removes it. Returns the number of changed sets."""
        if not len(keys):  # common: nothing is evicted while there is room
            return 0
        ids = self._table.get(keys)
        changing = np.flatnonzero(self._sets.holds(ids, number) != is_held)
        if not len(changing):
            return 0
        before, inverse, counts = np.unique(ids[changing], return_inverse=True, return_counts=True)
        after = self._sets.flipped(before, number)
        dropped = self._table.put(keys[changing], after[inverse])
        self._sets.use(after, counts)
        self._sets.use(dropped, np.full(len(dropped), -1))
        self._sets.use(before, -counts)
        return len(changing)

    def _clear(self, number: int) -> None:
        self._sets.clear(number)
        self._num_blocks[number] = 0


def _run_starts(ids: SetIds) -> NDArray[np.int64]:
    """Indices at which the set differs from that of the block before: chained blocks mostly live together."""
    return np.concatenate([[0], np.flatnonzero(ids[1:] != ids[:-1]) + 1])
