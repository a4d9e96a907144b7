"""Queue of prompts whose blocks may have to be written to the store."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable

from halfmoon.engine.step_result import BlockChain

MAX_WAITING = 256


class ChainQueue:
    """Owns the waiting chains, the newest of each request. A chain consists of keys alone and holds no memory.

    Event-loop thread only. At most `max_waiting` chains wait; `on_drop` is called for each chain beyond.
    """

    def __init__(self, max_waiting: int = MAX_WAITING, on_drop: Callable[[], None] = lambda: None) -> None:
        """max_waiting: 0 without a store."""
        self._max_waiting = max_waiting
        self._on_drop = on_drop
        self._waiting: OrderedDict[str, BlockChain] = OrderedDict()
        self._has_some = asyncio.Event()
        self._num_taken = 0  # taken but not yet done
        self._idle = asyncio.Event()
        self._idle.set()

    def offer(self, chains: Iterable[BlockChain]) -> None:
        """Queues chains that are in the prefix cache now."""
        for chain in chains:
            if len(self._waiting) >= self._max_waiting and chain.request_id not in self._waiting:
                self._on_drop()
            elif chain.keys:
                self._waiting[chain.request_id] = chain
                self._has_some.set()
                self._idle.clear()

    async def take(self) -> BlockChain:
        """Takes the chain that has waited longest. Call `done` after processing it."""
        while not self._waiting:
            self._has_some.clear()
            await self._has_some.wait()
        self._num_taken += 1
        return self._waiting.popitem(last=False)[1]

    def done(self) -> None:
        """Marks one taken chain as processed."""
        self._num_taken -= 1
        if not self._num_taken and not self._waiting:
            self._idle.set()

    async def settled(self) -> None:
        """Returns when no chain waits or is being processed. For tests and benchmarks."""
        await self._idle.wait()
