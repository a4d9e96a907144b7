"""Which blocks are free, and how often each used one is referenced. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from halfmoon.errors import NoCapacity


class BlockPool:
    """Owns block ids and reference counts. Knows nothing of tensors, sequences or keys.

    Ids are handed out so that a sequence's blocks lie next to each other: attention then reads them in place. A
    sequence may lay a claim to free blocks after its last one; others take claimed blocks only when nothing else is
    left, so a claim costs nobody capacity.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references: NDArray[np.int32] = np.zeros(num_blocks, dtype=np.int32)
        self._num_free = num_blocks
        self._claimed: NDArray[np.bool_] = np.zeros(num_blocks, dtype=np.bool_)
        self._claim_ends: dict[int, int] = {}  # last block of a sequence -> end of the claim that follows it

    @property
    def num_free(self) -> int:
        """Blocks nobody references."""
        return self._num_free

    def references(self, block: int) -> int:
        """How many holders `block` has."""
        return int(self._references[block])

    def allocate(self, num_blocks: int, near: int | None = None, room: int = 0) -> list[int]:
        """`num_blocks` free blocks, referenced once, in the order to fill them.

        `near` is the sequence's last block: those right after it are preferred. `room` is how many blocks the
        sequence may want later. Raises NoCapacity, and changes nothing, when fewer are free.
        """
        if num_blocks > self._num_free:
            raise NoCapacity(f"{num_blocks} blocks are wanted, {self._num_free} of {self.num_blocks} are free")
        blocks: list[int] = []
        end = self._drop_claim(near) if near is not None else None
        while len(blocks) < num_blocks:
            following = (blocks[-1] if blocks else self.num_blocks if near is None else near) + 1
            taken = range(following, following + 1)
            if not self._is_available(following):
                taken = self._best_run(num_blocks - len(blocks), room)
            self._references[taken.start : taken.stop] = 1
            blocks.extend(taken)
        self._num_free -= num_blocks
        if blocks:
            self._claim_after(blocks[-1], end, room)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference to each of `blocks`, which must be in use."""
        for block in blocks:
            assert self._references[block] > 0, f"block {block} is free"
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Gives one reference of each block back; a block without references is free."""
        for block in blocks:
            assert self._references[block] > 0, f"block {block} is freed twice"
            self._references[block] -= 1
            if self._references[block] == 0:
                self._num_free += 1
                self._drop_claim(block)

    def check_integrity(self) -> None:
        """Asserts that counts, free blocks and claims agree."""
        free = self._references == 0
        assert (self._references >= 0).all(), "a reference count is negative"
        assert int(free.sum()) == self._num_free, "the number of free blocks is wrong"
        claims = np.zeros(self.num_blocks, dtype=np.bool_)
        for last, end in self._claim_ends.items():
            assert self._references[last] > 0, f"free block {last} lays a claim"
            claims[last + 1 : end] = True
        assert (claims == self._claimed).all(), "the claims overlap or were lost"

    def _is_available(self, block: int) -> bool:
        return block < self.num_blocks and self._references[block] == 0 and not self._claimed[block]

    def _best_run(self, num_blocks: int, room: int) -> range:
        """The start of the smallest unclaimed free run that has room, else of the largest, else of any free run."""
        for free in ((self._references == 0) & ~self._claimed, self._references == 0):
            edges = np.flatnonzero(np.diff(free, prepend=False, append=False))  # starts and ends, in turn
            if not len(edges):
                continue
            starts, lengths = edges[::2], edges[1::2] - edges[::2]
            for size in (num_blocks + room, num_blocks):
                if (lengths >= size).any():
                    best = int(np.argmin(np.where(lengths >= size, lengths, self.num_blocks + 1)))
                    return range(int(starts[best]), int(starts[best]) + num_blocks)
            best = int(np.argmax(lengths))
            return range(int(starts[best]), int(starts[best] + lengths[best]))
        raise AssertionError("no free block, though the count says there is one")

    def _claim_after(self, last: int, end: int | None, room: int) -> None:
        """Claims the free blocks from `last + 1` up to `end`, or the next `room` ones; stops at another's."""
        stop = min(last + 1 + room, self.num_blocks) if end is None or end <= last else end
        position = last + 1
        while position < stop and self._is_available(position):
            self._claimed[position] = True
            position += 1
        if position > last + 1:
            self._claim_ends[last] = position

    def _drop_claim(self, last: int) -> int | None:
        end = self._claim_ends.pop(last, None)
        if end is not None:
            self._claimed[last + 1 : end] = False
        return end
