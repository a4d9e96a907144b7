"""Queue of prompts whose blocks may have to be written to the store."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import NamedTuple

from halfmoon.engine.step_result import BlockChain

MAX_WAITING = 256


class _Waiting(NamedTuple):
    chain: BlockChain
    since_s: float  # of the request's first chain that waits


class ChainQueue:
    """Owns the waiting chains, the newest of each request. A chain consists of keys alone and holds no memory.

    Event-loop thread only. At most `max_waiting` chains wait; `on_drop` is called for each chain beyond.
    """

    def __init__(
        self,
        max_waiting: int = MAX_WAITING,
        on_drop: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """max_waiting: 0 without a store."""
        self._max_waiting = max_waiting
        self._on_drop = on_drop
        self._clock = clock
        self._waiting: OrderedDict[str, _Waiting] = OrderedDict()
        self._has_some = asyncio.Event()
        self._offered_s = clock()
        self.is_ending = False  # somebody waits until nothing is left
        self._num_taken = 0  # taken but not yet done
        self._idle = asyncio.Event()
        self._idle.set()

    def offer(self, chains: Iterable[BlockChain]) -> None:
        """Queues chains that are in the prefix cache now."""
        now_s = self._clock()
        for chain in chains:
            self._offered_s = now_s
            before = self._waiting.get(chain.request_id)
            if before is None and len(self._waiting) >= self._max_waiting:
                self._on_drop()
            elif chain.keys:
                self._waiting[chain.request_id] = _Waiting(chain, now_s if before is None else before.since_s)
                self._has_some.set()
                self._idle.clear()

    @property
    def is_half_full(self) -> bool:
        """Whether half of the chains wait that may."""
        return 2 * len(self._waiting) >= self._max_waiting

    @property
    def waited_s(self) -> float:
        """How long the chain has waited that comes next; 0 without one."""
        return self._clock() - next(iter(self._waiting.values())).since_s if self._waiting else 0.0

    @property
    def quiet_s(self) -> float:
        """How long no chain was offered."""
        return self._clock() - self._offered_s

    def num_blocks(self, is_of: Callable[[str], bool]) -> int:
        """Blocks of the waiting chains of requests for which `is_of` holds."""
        return sum(len(waiting.chain.keys) for request_id, waiting in self._waiting.items() if is_of(request_id))

    async def until_some(self) -> None:
        """Returns once a chain waits."""
        while not self._waiting:
            self._has_some.clear()
            await self._has_some.wait()

    async def take(self) -> BlockChain:
        """Takes the chain that has waited longest. Call `done` after processing it."""
        await self.until_some()
        self._num_taken += 1
        return self._waiting.popitem(last=False)[1].chain

    def done(self) -> None:
        """Marks one taken chain as processed."""
        self._num_taken -= 1
        if not self._num_taken and not self._waiting:
            self._idle.set()

    async def settled(self) -> None:
        """Returns when no chain waits or is being processed. From now on none has to wait for anything."""
        self.is_ending = True
        await self._idle.wait()
