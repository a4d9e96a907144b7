"""Eviction candidates of one tier, lowest rank first: a heap whose entries are checked when they come up."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Literal

from halfmoon.policy.eviction import Rank

Evaluation = Rank | Literal["kept", "blocked"]  # current rank; "kept": not to be evicted; "blocked": not now


class EvictionQueue:
    """Owns which blocks are candidates. A block's rank only rises, so a stale entry comes up early, never late."""

    def __init__(self) -> None:
        self._heap: list[tuple[Rank, bytes]] = []
        self._queued: set[bytes] = set()

    def offer(self, block: bytes, rank: Rank) -> None:
        """Adds a block that may be evicted now, as far as the caller can see."""
        if block not in self._queued:
            self._queued.add(block)
            heapq.heappush(self._heap, (rank, block))

    def pop(self, evaluate: Callable[[bytes], Evaluation]) -> bytes | None:
        """Removes and returns the block to evict.

        `kept` ones leave the queue until offered again; `blocked` ones stay.
        """
        blocked: list[tuple[Rank, bytes]] = []
        victim = None
        while self._heap and victim is None:
            rank, block = heapq.heappop(self._heap)
            evaluation = evaluate(block)
            if evaluation == "blocked":
                blocked.append((rank, block))
            elif evaluation == "kept":
                self._queued.discard(block)
            elif evaluation != rank:
                assert isinstance(evaluation, tuple)
                heapq.heappush(self._heap, (evaluation, block))
            else:
                self._queued.discard(block)
                victim = block
        for entry in blocked:
            heapq.heappush(self._heap, entry)
        return victim

    def lowest(self, evaluate: Callable[[bytes], Evaluation]) -> bytes | None:
        """The block that `pop` would return; it stays."""
        while self._heap:
            rank, block = self._heap[0]
            evaluation = evaluate(block)
            if evaluation == rank:
                return block
            if evaluation == "blocked":
                return self._lowest_behind(evaluate)
            heapq.heappop(self._heap)
            if evaluation == "kept":
                self._queued.discard(block)
            else:
                assert isinstance(evaluation, tuple)
                heapq.heappush(self._heap, (evaluation, block))
        return None

    def _lowest_behind(self, evaluate: Callable[[bytes], Evaluation]) -> bytes | None:
        """The lowest block when others are in its way that may not be evicted now."""
        block = self.pop(evaluate)
        if block is not None:
            rank = evaluate(block)
            assert isinstance(rank, tuple)
            self.offer(block, rank)
        return block

    def prune(self, is_held: Callable[[bytes], bool], num_held: int) -> None:
        """Forgets entries of blocks that left in another way, once they are most of the heap."""
        if len(self._heap) > 2 * num_held + 64:
            self._heap = [entry for entry in self._heap if is_held(entry[1])]
            heapq.heapify(self._heap)
            self._queued = {block for _, block in self._heap}
