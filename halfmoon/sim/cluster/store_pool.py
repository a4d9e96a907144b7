"""The simulated stores as one pool: what they have together, where new blocks go, what is copied. Policies decide."""

from __future__ import annotations

from collections.abc import Sequence

from halfmoon.policy.placement.store_choice import choose_store
from halfmoon.sim.cluster.cluster_spec import ClusterSpec
from halfmoon.sim.cluster.store import SimStore
from halfmoon.sim.worker.worker import SimWorker


class StorePool:
    """Owns the stores. Every worker is near one of them, in turns."""

    def __init__(self, spec: ClusterSpec, block_tokens: int) -> None:
        """block_tokens: of the workload's prefixes."""
        first_node = max(spec.nodes, default=-1) + 1
        self.stores = [
            SimStore(number, first_node + number, spec.stores, block_tokens) for number in range(spec.stores.count)
        ]

    def near(self, worker: SimWorker) -> SimStore:
        """The worker's nearest store."""
        return self.stores[worker.number % len(self.stores)]

    def use(self, blocks: Sequence[int], now_s: float) -> None:
        """Counts a use of a prompt's blocks, as when a worker asks all stores for them."""
        for store in self.stores:
            store.find(blocks, now_s)

    def by_store(self, blocks: Sequence[int]) -> list[tuple[SimStore, list[int]]]:
        """Which store delivers which of these blocks: each the first one that has it."""
        left, found = list(blocks), []
        for store in self.stores:
            held = [block for block in left if block in store]
            if held:
                found.append((store, held))
                left = [block for block in left if block not in store]
        return found

    def to_write(self, blocks: Sequence[int], worker: SimWorker, now_s: float) -> tuple[SimStore, set[int]]:
        """The store that takes blocks from this worker, and those that no store has: as a worker's writer decides."""
        here = set[int]().union(*(store.find(blocks, now_s) for store in self.stores))
        near = self.near(worker)
        order = [near, *(store for store in self.stores if store is not near)]
        chosen = order[choose_store([store.room_idle_s(now_s) for store in order])]
        return chosen, {block for block in blocks if block not in here}
