"""One simulated store: which prefix blocks it has, by the eviction policy of real ones, and which are in memory."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from halfmoon.policy.eviction import CostAware, Rank, Usage
from halfmoon.policy.eviction_queue import Evaluation, EvictionQueue


class SimStore:
    """Owns its blocks, all of one size, with their uses. Knows neither prompts nor links.

    A prefix is used from its end, so of blocks used equally its end goes first. Blocks beyond the memory are on disk.
    """

    def __init__(self, number: int, node: int, max_blocks: int, memory_blocks: int) -> None:
        """number: among the stores; node: whose network port it has."""
        self.number = number
        self.node = node
        self.name = f"store-{number}"
        self.num_blocks = 0
        self._max_blocks = max_blocks
        self._memory_blocks = memory_blocks
        self._policy = CostAware()
        self._usage: dict[int, Usage] = {}
        self._ranks: dict[int, Rank] = {}
        self._used_s: dict[int, float] = {}
        self._queue = EvictionQueue()
        self._memory: OrderedDict[int, None] = OrderedDict()  # the least recently used first
        self._num_uses = 0

    def __contains__(self, block: int) -> bool:
        return block in self._usage

    def find(self, blocks: Sequence[int], now_s: float) -> set[int]:
        """Which of these it has. Counts as a use, the last block first."""
        found = [block for block in blocks if block in self._usage]
        for block in reversed(found):
            self._use(block, now_s)
        return set(found)

    def num_on_disk(self, blocks: Iterable[int]) -> int:
        """How many of these have to be read from disk; they are in memory then."""
        num = sum(block not in self._memory for block in blocks)
        for block in blocks:
            self._keep_in_memory(block)
        return num

    def put(self, blocks: Sequence[int], now_s: float) -> tuple[list[int], list[int]]:
        """Adds blocks, the last first; returns those that are new, and those that made room for them."""
        new, evicted = [block for block in blocks if block not in self._usage], []
        for block in reversed(new):
            if self.num_blocks >= self._max_blocks:
                victim = self._evict()
                if victim is None:
                    break
                evicted.append(victim)
            self._usage[block] = Usage(0, 0, 0, 1, 1.0)
            self.num_blocks += 1
            self._use(block, now_s)
            self._queue.offer(_name(block), self._ranks[block])
        gone = set(evicted)
        return [block for block in new if block in self._usage], [block for block in gone if block not in self._usage]

    def room_idle_s(self, now_s: float) -> float:
        """How long the block was not used that would make room; inf if there is room."""
        if self.num_blocks < self._max_blocks:
            return math.inf
        block = self._queue.lowest(self._evaluate)
        return 0.0 if block is None else now_s - self._used_s[_number(block)]

    def _use(self, block: int, now_s: float) -> None:
        self._num_uses += 1
        usage = self._usage[block]
        usage.last_used, usage.num_uses = self._num_uses, usage.num_uses + 1
        self._ranks[block] = self._policy.rank(usage, 1)
        self._used_s[block] = now_s
        self._keep_in_memory(block)

    def _keep_in_memory(self, block: int) -> None:
        self._memory[block] = None
        self._memory.move_to_end(block)
        if len(self._memory) > self._memory_blocks:
            self._memory.popitem(last=False)

    def _evict(self) -> int | None:
        name = self._queue.pop(self._evaluate)
        if name is None:
            return None
        block = _number(name)
        self._policy.evicted(self._ranks.pop(block))
        del self._usage[block], self._used_s[block]
        self._memory.pop(block, None)
        self.num_blocks -= 1
        return block

    def _evaluate(self, name: bytes) -> Evaluation:
        return self._ranks.get(_number(name), "kept")


def _name(block: int) -> bytes:
    return block.to_bytes(8, "big")


def _number(name: bytes) -> int:
    return int.from_bytes(name, "big")
