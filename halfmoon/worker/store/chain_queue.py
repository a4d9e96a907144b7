"""Which prompts' blocks may have to go to the store."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable

from halfmoon.engine.step_result import BlockChain

MAX_WAITING = 256


class ChainQueue:
    """Owns the chains that wait, the newest of each request. A chain is names alone: it holds no memory.

    Event-loop thread only. It takes no more than `max_waiting`, and `on_drop` hears of each other one.
    """

    def __init__(self, max_waiting: int = MAX_WAITING, on_drop: Callable[[], None] = lambda: None) -> None:
        """max_waiting: 0 where there is no store."""
        self._max_waiting = max_waiting
        self._on_drop = on_drop
        self._waiting: OrderedDict[str, BlockChain] = OrderedDict()
        self._has_some = asyncio.Event()
        self._num_taken = 0  # and not done yet
        self._idle = asyncio.Event()
        self._idle.set()

    def offer(self, chains: Iterable[BlockChain]) -> None:
        """These are in the prefix cache now."""
        for chain in chains:
            if len(self._waiting) >= self._max_waiting and chain.request_id not in self._waiting:
                self._on_drop()
            elif chain.keys:
                self._waiting[chain.request_id] = chain
                self._has_some.set()
                self._idle.clear()

    async def take(self) -> BlockChain:
        """The one that waits longest. Say `done` after it."""
        while not self._waiting:
            self._has_some.clear()
            await self._has_some.wait()
        self._num_taken += 1
        return self._waiting.popitem(last=False)[1]

    def done(self) -> None:
        """One that was taken is dealt with."""
        self._num_taken -= 1
        if not self._num_taken and not self._waiting:
            self._idle.set()

    async def settled(self) -> None:
        """Returns when none waits and none is being worked on. For tests and benchmarks."""
        await self._idle.wait()
