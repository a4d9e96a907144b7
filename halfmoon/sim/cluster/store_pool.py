"""The simulated stores as one pool: what they have together, where new blocks go, what is copied. Policies decide."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from halfmoon.policy.placement.store_choice import choose_store
from halfmoon.sim.cluster.cluster_spec import ClusterSpec
from halfmoon.sim.cluster.store import SimStore
from halfmoon.sim.cluster.worker import SimWorker


class StorePart(NamedTuple):
    """Blocks of one load, from one store."""

    store: SimStore
    num_blocks: int
    num_on_disk: int


class StorePool:
    """Owns the stores. Every worker is near one of them, in turns."""

    def __init__(self, spec: ClusterSpec, block_tokens: int) -> None:
        """block_tokens: of the workload's prefixes."""
        first_node = max(spec.nodes, default=-1) + 1
        memory = spec.stores.tokens if spec.stores.memory_tokens is None else spec.stores.memory_tokens
        self.stores = [
            SimStore(number, first_node + number, spec.stores.tokens // block_tokens, memory // block_tokens)
            for number in range(spec.stores.count)
        ]

    def near(self, worker: SimWorker) -> SimStore:
        """The worker's nearest store."""
        return self.stores[worker.number % len(self.stores)]

    def use(self, blocks: Sequence[int], now_s: float) -> None:
        """Counts a use of a prompt's blocks, as when a worker asks all stores for them."""
        for store in self.stores:
            store.find(blocks, now_s)

    def parts(self, blocks: Sequence[int]) -> list[StorePart]:
        """Which store delivers how many of these blocks: each the first one that has it."""
        by_store: dict[int, list[int]] = {}
        for block in blocks:
            holder = next((store.number for store in self.stores if block in store), None)
            if holder is not None:
                by_store.setdefault(holder, []).append(block)
        return [
            StorePart(self.stores[number], len(held), self.stores[number].num_on_disk(held))
            for number, held in by_store.items()
        ]

    def to_write(self, blocks: Sequence[int], worker: SimWorker, now_s: float) -> tuple[SimStore, list[int]]:
        """The blocks that no store has, and the one that takes them from this worker: as a worker's writer decides."""
        here = set[int]().union(*(store.find(blocks, now_s) for store in self.stores))
        near = self.near(worker)
        order = [near, *(store for store in self.stores if store is not near)]
        chosen = order[choose_store([store.room_idle_s(now_s) for store in order])]
        return chosen, [block for block in blocks if block not in here]
