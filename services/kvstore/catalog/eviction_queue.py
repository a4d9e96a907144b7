"""The blocks of one tier that may go, lowest rank first: a heap whose entries are checked when they come up."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Literal

from services.kvstore.catalog.eviction import Rank

Evaluation = Rank | Literal["kept", "blocked"]  # the rank as of now; not to be evicted; not now


class EvictionQueue:
    """Owns which blocks are candidates. A block's rank only rises, so a stale entry comes up early, never late."""

    def __init__(self) -> None:
        self._heap: list[tuple[Rank, bytes]] = []
        self._queued: set[bytes] = set()

    def offer(self, block: bytes, rank: Rank) -> None:
        """The block may go now, as far as the caller can see."""
        if block not in self._queued:
            self._queued.add(block)
            heapq.heappush(self._heap, (rank, block))

    def pop(self, judge: Callable[[bytes], Evaluation]) -> bytes | None:
        """The block to evict. `kept` ones leave the queue until they are offered again, `blocked` ones stay."""
        blocked: list[tuple[Rank, bytes]] = []
        found = None
        while self._heap and found is None:
            rank, block = heapq.heappop(self._heap)
            verdict = judge(block)
            if verdict == "blocked":
                blocked.append((rank, block))
            elif verdict == "kept":
                self._queued.discard(block)
            elif verdict != rank:
                assert isinstance(verdict, tuple)
                heapq.heappush(self._heap, (verdict, block))
            else:
                self._queued.discard(block)
                found = block
        for entry in blocked:
            heapq.heappush(self._heap, entry)
        return found

    def prune(self, is_held: Callable[[bytes], bool], num_held: int) -> None:
        """Forgets entries of blocks that left in another way, once they are most of the heap."""
        if len(self._heap) > 2 * num_held + 64:
            self._heap = [entry for entry in self._heap if is_held(entry[1])]
            heapq.heapify(self._heap)
            self._queued = {block for _, block in self._heap}
