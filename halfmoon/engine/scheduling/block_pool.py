"""Counts references to blocks and allocates free ones. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from halfmoon.errors import NoCapacity


class BlockPool:
    """Owns block ids and reference counts. Knows nothing of tensors, sequences or keys.

    Ids are allocated so that a sequence's blocks are adjacent, because attention then reads them in place. A sequence
    may claim free blocks after its last one. Others take claimed blocks only when no other is left, so a claim costs
    no capacity.

    Ids above the highest ever used or claimed are free without being examined. So the cost of a pool of millions of
    blocks grows only with the blocks used.

    The last `num_divisible` blocks consist of two halves: one with the block's own id, and a second one whose id is not
    a block meanwhile. A used block can shrink to its own half (`halve`). Two unused halves make a free block.
    """

    def __init__(self, num_blocks: int, num_divisible: int = 0) -> None:
        """Ids range below `num_blocks + num_divisible`; memory bounds how many are in use at once."""
        self.num_blocks = num_blocks
        num_ids = num_blocks + num_divisible
        self._references: NDArray[np.int32] = np.zeros(num_ids, dtype=np.int32)
        self._num_free = num_blocks
        self._claimed: NDArray[np.bool_] = np.zeros(num_ids, dtype=np.bool_)
        self._claim_ends: dict[int, int] = {}  # last block of a sequence -> end of the claim that follows it
        self._first_divisible = num_blocks - num_divisible
        # -1: no second half. Empty, and never read, if no block is divisible.
        self._seconds: NDArray[np.int64] = np.full(num_ids if num_divisible else 0, -1, dtype=np.int64)
        self._seconds[self._first_divisible : num_blocks] = np.arange(num_blocks, num_ids)
        self._is_no_block: NDArray[np.bool_] = np.zeros(num_ids, dtype=np.bool_)  # second halves, and the odd one
        self._is_no_block[num_blocks:] = True
        self._num_touched = num_ids if num_divisible else 0  # ids from here on are blocks, free and unclaimed
        self._num_ever_used = 0
        self._odd: int | None = None  # an unused half that belongs to no block

    @property
    def num_free(self) -> int:
        """Returns the number of blocks without references."""
        return self._num_free

    @property
    def num_ever_used(self) -> int:
        """Returns the lowest id from which on no block was ever in use."""
        return self._num_ever_used

    def num_free_with(self, num_whole: int, num_half: int) -> int:
        """Returns how many blocks would be free if this many whole and halved ones were released."""
        return self._num_free + num_whole + (num_half + (self._odd is not None)) // 2

    def is_half(self, block: int) -> bool:
        """Whether a divisible block has shrunk to its own half."""
        return block >= self._first_divisible and bool(self._seconds[block] < 0)

    def references(self, block: int) -> int:
        """Returns the number of references to `block`."""
        return int(self._references[block])

    def allocate(self, num_blocks: int, near: int | None = None, room: int = 0) -> list[int]:
        """Allocates `num_blocks` free blocks with one reference each, in the order to fill them.

        `near` is the sequence's last block: the blocks right after it are preferred. `room` is how many more blocks the
        sequence may need later. Raises NoCapacity, and changes nothing, if fewer are free.
        """
        if num_blocks > self._num_free:
            raise NoCapacity(f"{num_blocks} blocks are wanted, {self._num_free} of {self.num_blocks} are free")
        blocks: list[int] = []
        end = self._drop_claim(near) if near is not None else None
        while len(blocks) < num_blocks:
            following = (blocks[-1] if blocks else len(self._references) if near is None else near) + 1
            taken = range(following, following + 1)
            if not self._is_available(following):
                taken = self._best_run(num_blocks - len(blocks), room)
            self._references[taken.start : taken.stop] = 1
            self._num_touched = max(self._num_touched, taken.stop)
            self._num_ever_used = max(self._num_ever_used, taken.stop)
            blocks.extend(taken)
        self._num_free -= num_blocks
        if blocks:
            self._claim_after(blocks[-1], end, room)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Adds a reference to each of `blocks`, which must be in use."""
        for block in blocks:
            assert self._references[block] > 0, f"block {block} is free"
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drops one reference to each block; a block without references is free."""
        for block in blocks:
            assert self._references[block] > 0, f"block {block} is freed twice"
            self._references[block] -= 1
            if self._references[block] == 0:
                self._drop_claim(block)
                if self.is_half(block):
                    self._is_no_block[block] = True
                    self._put_half(block)
                else:
                    self._num_free += 1

    def seconds(self, blocks: Sequence[int]) -> NDArray[np.int64]:
        """Returns the ids of the second halves of divisible blocks; -1 for a block without one."""
        return self._seconds[list(blocks)]

    def halve(self, block: int) -> None:
        """Shrinks a used, divisible block to its own half until it is free."""
        second = int(self._seconds[block])
        assert self._references[block] > 0, f"block {block} is free"
        assert second >= 0, f"block {block} has no second half"
        self._seconds[block] = -1
        self._put_half(second)

    def make_whole(self, block: int) -> bool:
        """Gives a halved block a second half. Returns False, and changes nothing, if there is none."""
        assert self._references[block] > 0, f"block {block} is free"
        assert self._seconds[block] < 0, f"block {block} is whole"
        if self._odd is None:
            free = np.flatnonzero(self._free())
            if not len(free) or free[-1] < self._first_divisible:
                return False
            self._odd = int(free[-1])
            self._is_no_block[self._odd] = True
            self._num_free -= 1
            self._seconds[block], self._seconds[self._odd] = self._seconds[self._odd], -1
            return True
        self._seconds[block], self._odd = self._odd, None
        return True

    def check_integrity(self) -> None:
        """Asserts that counts, free blocks and claims agree."""
        free = (self._references == 0) & ~self._is_no_block
        assert (self._references >= 0).all(), "a reference count is negative"
        assert int(free.sum()) == self._num_free, "the number of free blocks is wrong"
        halves = [*np.flatnonzero(~self._is_no_block), *self._seconds[self._seconds >= 0]]
        halves += [] if self._odd is None else [self._odd]
        assert sorted(halves) == list(range(len(self._references))), "a half is used twice, or was lost"
        free_divisible = self._first_divisible + np.flatnonzero(free[self._first_divisible :])
        assert (self._seconds[free_divisible] >= 0).all(), "a free block is half"
        assert free[self._num_touched :].all(), "an id was used, and is not known to be"
        claims = np.zeros(len(self._references), dtype=np.bool_)
        for last, end in self._claim_ends.items():
            assert self._references[last] > 0, f"free block {last} lays a claim"
            claims[last + 1 : end] = True
        assert not claims[self._num_touched :].any(), "an id was claimed, and is not known to be"
        assert (claims == self._claimed).all(), "the claims overlap or were lost"

    def _is_available(self, block: int) -> bool:
        if block >= len(self._references) or self._is_no_block[block]:
            return False
        return bool(self._references[block] == 0 and not self._claimed[block])

    def _free(self) -> NDArray[np.bool_]:
        """Returns which ids are free, up to the first that was never touched."""
        end = self._num_touched + 1
        free: NDArray[np.bool_] = (self._references[:end] == 0) & ~self._is_no_block[:end]
        return free

    def _put_half(self, half: int) -> None:
        """Frees a half. Together with another unused half it makes a block."""
        if self._odd is None:
            self._odd = half
            return
        self._seconds[half], self._odd = self._odd, None
        self._is_no_block[half] = False
        self._num_free += 1

    def _best_run(self, num_blocks: int, room: int) -> range:
        """Returns the start of the smallest unclaimed free run with room, else of the largest, else of any free run."""
        num_ids = len(self._references)
        for free in (self._free() & ~self._claimed[: self._num_touched + 1], self._free()):
            edges = np.flatnonzero(np.diff(free, prepend=False, append=False))  # starts and ends, in turn
            if not len(edges):
                continue
            if self._num_touched < num_ids:
                edges[-1] = num_ids  # the last run ends in the first untouched id, and goes on
            starts, lengths = edges[::2], edges[1::2] - edges[::2]
            for size in (num_blocks + room, num_blocks):
                if (lengths >= size).any():
                    best = int(np.argmin(np.where(lengths >= size, lengths, num_ids + 1)))
                    return range(int(starts[best]), int(starts[best]) + num_blocks)
            best = int(np.argmax(lengths))
            return range(int(starts[best]), int(starts[best] + lengths[best]))
        raise AssertionError("no free block, though the count says there is one")

    def _claim_after(self, last: int, end: int | None, room: int) -> None:
        """Claims the free blocks from `last + 1` up to `end`, or the next `room` ones; stops at another claim."""
        stop = min(last + 1 + room, len(self._references)) if end is None or end <= last else end
        position = last + 1
        while position < stop and self._is_available(position):
            self._claimed[position] = True
            position += 1
        if position > last + 1:
            self._claim_ends[last] = position
            self._num_touched = max(self._num_touched, position)

    def _drop_claim(self, last: int) -> int | None:
        end = self._claim_ends.pop(last, None)
        if end is not None:
            self._claimed[last + 1 : end] = False
        return end
