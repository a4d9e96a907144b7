"""Blocks of the memory that is shared with vLLM: which request has which, and who waits for some."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager

import torch

from halfmoon.engine.scheduling.block_pool import BlockPool
from halfmoon.engine.scheduling.prefix_cache import PrefixCache
from halfmoon.engine.scheduling.sequence import Sequence
from halfmoon.errors import InvalidRequest
from halfmoon.vllm_engine.messages import Ended
from halfmoon.vllm_engine.staging import StagingMemory


class SharedBlocks:
    """Owns the blocks by their use, those of the last prompts by their keys, and the stamps. Event-loop thread only.

    Whoever took blocks gives them back once `has_left` says that vLLM touches them no more.
    """

    def __init__(self, memory: StagingMemory, root: Callable[[bytes], bytes], num_ranks: int = 1) -> None:
        """root: the parent of a tenant's first block keys, from its salt; num_ranks: processes that report ends."""
        self.num_blocks = memory.num_blocks
        self._stamps = memory.stamps
        self._block_tokens = memory.layout.block_tokens
        self._num_ranks = num_ranks
        self._cache = PrefixCache(BlockPool(memory.num_blocks), memory.layout.block_tokens, root)
        self._lent: dict[int, list[int]] = {}  # by use
        self._ended: dict[int, int] = {}  # how many ranks touch them no more
        self._waiting: deque[tuple[int, int, asyncio.Future[list[int]]]] = deque()  # (use, blocks, room)

    @property
    def num_free(self) -> int:
        """Blocks that nobody uses."""
        return self._cache.num_available

    def has_room(self, num_blocks: int) -> bool:
        """Whether so many can be taken now, and nobody waits for some."""
        return not self._waiting and num_blocks <= self.num_free

    def check_fits(self, num_blocks: int) -> None:
        """Raises InvalidRequest if there are never so many."""
        if num_blocks > self.num_blocks:
            raise InvalidRequest(
                f"the prompt's KV needs {num_blocks} blocks of shared memory, this worker has {self.num_blocks}: "
                "start it with more --staging-memory",
                param="prompt",
            )

    async def room(self, use: int, num_blocks: int) -> list[int]:
        """Takes blocks, after a wait in order of arrival. Whoever cancels the wait gives them back nevertheless."""
        if self.has_room(num_blocks):
            return self.take(use, num_blocks)
        room: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        self._waiting.append((use, num_blocks, room))
        return await room

    def take(self, use: int, num_blocks: int) -> list[int]:
        """Takes blocks and stamps them. Raises NoCapacity."""
        blocks = self._cache.allocate(num_blocks)
        self._stamp(blocks, use)
        self._lent[use] = blocks
        return blocks

    def give_back(self, use: int) -> None:
        """Ends a use. Those who wait get the room."""
        blocks = self._lent.pop(use, None)
        if blocks:
            self._stamp(blocks, 0)
            self._cache.release(blocks)
        self._give_room()

    def has_left(self, report: Ended) -> bool:
        """Takes a rank's report; returns whether all have reported the end of this use."""
        self._ended[report.use] = self._ended.get(report.use, 0) + 1
        if self._ended[report.use] < self._num_ranks:
            return False
        del self._ended[report.use]
        return True

    def insert(self, sequence: Sequence, num_tokens: int) -> bool:
        """Makes the whole blocks of the first tokens findable; returns whether any were new."""
        sequence.num_computed = num_tokens
        return self._cache.insert(sequence)

    def forget_idle(self) -> None:
        """Makes blocks that nobody uses unfindable."""
        self._cache.forget_idle()

    def num_cached(self, sequence: Sequence, num_blocks: int) -> int:
        """How many of a sequence's leading blocks are findable."""
        held = self._cache.match(sequence, num_blocks * self._block_tokens)
        self._cache.release(held)
        return len(held)

    def insert_from(self, sequence: Sequence, first: int, blocks: SequenceOf[int]) -> tuple[bytes, ...]:
        """Makes whole blocks of a sequence that has ended findable, from `first` on; returns the keys up to them."""
        sequence.blocks, sequence.num_known_blocks = [*([-1] * first), *blocks], first
        self.insert(sequence, len(sequence.blocks) * self._block_tokens)
        return tuple(sequence.block_keys[: len(sequence.blocks)])

    @contextmanager
    def held(self, keys: SequenceOf[bytes]) -> Iterator[list[int]]:
        """Holds the blocks of the leading keys that are here."""
        blocks = self._cache.hold(keys)
        try:
            yield blocks
        finally:
            self._cache.release(blocks)
            self._give_room()

    def _give_room(self) -> None:
        while self._waiting and self._waiting[0][1] <= self.num_free:
            use, num_blocks, room = self._waiting.popleft()
            if not room.done():
                room.set_result(self.take(use, num_blocks))

    def _stamp(self, blocks: SequenceOf[int], use: int) -> None:
        self._stamps[torch.tensor(blocks, dtype=torch.int64)] = use
