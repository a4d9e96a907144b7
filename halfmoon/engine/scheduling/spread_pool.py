"""Blocks of several ranks that share the tokens of long prompts. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from halfmoon.engine.scheduling.block_pool import BlockPool
from halfmoon.errors import NoCapacity


class Blocks(Protocol):
    """What a prefix cache asks of a pool of blocks; see `BlockPool`."""

    @property
    def num_free(self) -> int:
        """See `BlockPool.num_free`."""

    def num_free_with(self, num_whole: int, num_half: int) -> int:
        """See `BlockPool.num_free_with`."""

    def is_half(self, block: int) -> bool:
        """See `BlockPool.is_half`."""

    def references(self, block: int) -> int:
        """See `BlockPool.references`."""

    def allocate(self, num_blocks: int, near: int | None = None, room: int = 0) -> list[int]:
        """See `BlockPool.allocate`."""

    def share(self, blocks: Iterable[int]) -> None:
        """See `BlockPool.share`."""

    def release(self, blocks: Sequence[int]) -> None:
        """See `BlockPool.release`."""

    def check_integrity(self) -> None:
        """See `BlockPool.check_integrity`."""


def rank_of(block: int, num_ranks: int) -> int:
    """The rank in whose memory a block of a `SpreadPool` lies."""
    return block % num_ranks


def own_id(block: int, num_ranks: int) -> int:
    """The id of a block in its rank's memory."""
    return block // num_ranks


class SpreadPool:
    """Owns one `BlockPool` for each rank. A block's id says which rank has it (`rank_of`), for good.

    More than `long_blocks` blocks that are allocated at once go to the ranks in turn, so that each computes a stripe of
    the prompt (Brandon et al., "Striped Attention", 2023). Fewer go to one rank: that of the blocks before them, else
    the one with most free blocks. Where a rank has none left, others take its turn; that costs balance, no capacity.
    """

    def __init__(self, num_ranks: int, num_rank_blocks: int, long_blocks: int) -> None:
        """num_rank_blocks: of each rank."""
        self._ranks = [BlockPool(num_rank_blocks) for _ in range(num_ranks)]
        self.num_blocks = num_ranks * num_rank_blocks
        self._long_blocks = long_blocks

    @property
    def num_free(self) -> int:
        """Returns the number of blocks without references."""
        return sum(pool.num_free for pool in self._ranks)

    def num_free_with(self, num_whole: int, num_half: int) -> int:
        """See `BlockPool.num_free_with`; no block is divisible."""
        assert num_half == 0
        return self.num_free + num_whole

    def is_half(self, block: int) -> bool:
        """See `BlockPool.is_half`."""
        return False

    def references(self, block: int) -> int:
        """Returns the number of references to `block`."""
        rank, own = self._place(block)
        return self._ranks[rank].references(own)

    def allocate(self, num_blocks: int, near: int | None = None, room: int = 0) -> list[int]:
        """See `BlockPool.allocate`; `near` says where one rank's blocks go on, and whose turn is next."""
        if num_blocks > self.num_free:
            raise NoCapacity(f"{num_blocks} blocks are wanted, {self.num_free} of {self.num_blocks} are free")
        num_ranks = len(self._ranks)
        turns = self._turns(num_blocks, near)
        own: list[list[int]] = []
        for rank, pool in enumerate(self._ranks):
            near_here = own_id(near, num_ranks) if near is not None and rank_of(near, num_ranks) == rank else None
            count = turns.count(rank)
            own.append(pool.allocate(count, near_here, room * count // num_blocks)[::-1] if count else [])
        return [own[rank].pop() * num_ranks + rank for rank in turns]

    def share(self, blocks: Iterable[int]) -> None:
        """Adds a reference to each of `blocks`, which must be in use."""
        for block in blocks:
            rank, own = self._place(block)
            self._ranks[rank].share([own])

    def release(self, blocks: Sequence[int]) -> None:
        """Drops one reference to each block; a block without references is free."""
        for block in blocks:
            rank, own = self._place(block)
            self._ranks[rank].release([own])

    def check_integrity(self) -> None:
        """Asserts that each rank's pool is consistent."""
        for pool in self._ranks:
            pool.check_integrity()

    def _turns(self, num_blocks: int, near: int | None) -> list[int]:
        """The rank of each block, in the order of a sequence."""
        left = [pool.num_free for pool in self._ranks]
        num_ranks = len(left)
        if near is None:
            rank = max(range(num_ranks), key=left.__getitem__)
        else:
            rank = (rank_of(near, num_ranks) + (num_blocks > self._long_blocks)) % num_ranks
        turns = []
        for _ in range(num_blocks):
            while not left[rank]:
                rank = (rank + 1) % num_ranks
            turns.append(rank)
            left[rank] -= 1
            rank = (rank + (num_blocks > self._long_blocks)) % num_ranks
        return turns

    def _place(self, block: int) -> tuple[int, int]:
        return rank_of(block, len(self._ranks)), own_id(block, len(self._ranks))
