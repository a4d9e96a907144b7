"""The known prefix of one request, loaded into the shared memory before vLLM gets the request."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from halfmoon.engine.scheduling.restore_order import Restore, RestoreOrder
from halfmoon.errors import NotFound


class PrefixLoading:
    """Owns which blocks were loaded, and whether any is awaited. Useful are those that follow each other."""

    def __init__(self, order: RestoreOrder, block_tokens: int) -> None:
        self.blocks = Restore(order)
        self.num_loaded_tokens = 0  # useful ones, as last reported
        self._first = order.fence  # blocks before it are vLLM's or nobody's
        self._block_tokens = block_tokens
        self._on_progress = order.on_progress
        self._is_over = asyncio.Event()

    @property
    def is_over(self) -> bool:
        """Whether nothing is awaited, and this was reported."""
        return self._is_over.is_set()

    async def useful_tokens(self) -> tuple[int, int]:
        """Waits until nothing is awaited. Returns where the tokens that vLLM need not compute begin and end."""
        await self._is_over.wait()
        return self._first * self._block_tokens, self._num_leading * self._block_tokens

    def note(self, loaded: Iterable[int], given_up: Iterable[int]) -> None:
        """Notes blocks that are here, and those that will not come."""
        for block in loaded:
            self.blocks.note_loaded(block)
        self.blocks.give_up(given_up)

    def move_fence(self, fence: int) -> int:
        """Moves the first awaited block; behind blocks that are not here this ends the loads: vLLM computes them.

        Returns where it is now. Raises NotFound once nothing is awaited.
        """
        if self.is_over:
            raise NotFound("the request awaits no blocks")
        if fence > self._num_leading:
            self.blocks.move_fence(self.blocks.num_blocks)
        return self.blocks.fence

    def report(self) -> None:
        """Reports how much is here. There has to be room for the blocks: vLLM may get the request now."""
        num_tokens = self._num_leading * self._block_tokens
        self.num_loaded_tokens = num_tokens - self._first * self._block_tokens
        self._on_progress(num_tokens, self.num_loaded_tokens)
        if not self.blocks.is_waiting:
            self._is_over.set()

    def runs(self, num_tokens: int) -> Sequence[tuple[int, int]]:
        """Runs of loaded tokens behind the first `num_tokens`."""
        size = self._block_tokens
        return [(first * size, last * size) for first, last in self.blocks.runs(num_tokens // size)]

    @property
    def _num_leading(self) -> int:
        block = self._first
        while self.blocks.is_loaded(block):
            block += 1
        return block
