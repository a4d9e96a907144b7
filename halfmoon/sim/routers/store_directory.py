"""What a simulated gateway knows of the stores, and which prefixes it has copied to where they are asked for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from halfmoon.policy.placement.replication import Replication
from halfmoon.policy.values import Placement
from halfmoon.policy.view.block_index import BlockEvents, BlockIndex
from halfmoon.policy.view.fetch_costs import FetchLink, FetchLinks
from halfmoon.policy.view.hot_prefixes import HotPrefixes
from halfmoon.policy.view.key_table import Keys
from halfmoon.sim.cluster.cluster_spec import ClusterSpec
from halfmoon.sim.cluster.store import SimStore
from halfmoon.sim.cluster.store_pool import StorePool
from halfmoon.sim.routers.prefix_keys import prefix_keys
from halfmoon.sim.worker.job import Job
from halfmoon.sim.worker.worker import SimWorker


class StoreDirectory:
    """Owns the stores' entries in the block index, the counts of uses, and the copies that are to be made."""

    def __init__(
        self, spec: ClusterSpec, pool: StorePool, index: BlockIndex, links: FetchLinks, block_tokens: int
    ) -> None:
        """block_tokens: of the workload's prefixes."""
        self._pool = pool
        self._index = index
        self._links = links
        self._load_s_per_token: dict[int, float] = {}  # of the latest load, by worker
        self._block_tokens = block_tokens
        self.holder = index.number("pool")  # all stores together
        self._sequences = {index.number(store.name): 0 for store in pool.stores}
        for number in self._sequences:
            index.apply(number, BlockEvents(0, is_snapshot=True))
            links.note_holder(number, serves=False)  # the pool counts instead
        index.unite(self.holder, self._sequences)
        self._hot = HotPrefixes()
        bytes_per_s = spec.stores.replica_mbps * 1e6 if spec.placement == "kvcache-centric" else 0.0
        self._replication = Replication(bytes_per_s) if bytes_per_s else None
        self.copies: list[tuple[SimStore, list[int]]] = []  # blocks that a store is to copy from others

    def note_stored(self, store: SimStore, stored: Sequence[int], evicted: Sequence[int]) -> None:
        """Takes changes of a store, which gateways hear of at once."""
        if not stored and not evicted:
            return
        number = self._index.number(store.name)
        self._sequences[number] += 1
        new, gone = (prefix_keys(np.array(blocks, np.int64)) for blocks in (stored, evicted))
        self._index.apply(number, BlockEvents(self._sequences[number], new, gone))

    def note_load(self, worker: SimWorker, s_per_token: float) -> None:
        """Learns how fast a worker loads from stores; it says so in its next report."""
        self._load_s_per_token[worker.number] = s_per_token

    def report_links(self, worker: SimWorker, row: int) -> None:
        """Takes a report's speed of loading from stores."""
        s_per_token = self._load_s_per_token.get(worker.number)
        if s_per_token is not None:
            self._links.report(row, [FetchLink(self.holder, s_per_token)])

    def note_use(
        self,
        job: Job,
        keys: Keys,
        worker: SimWorker,
        cached_blocks: NDArray[np.int64],
        placement: Placement,
        now_s: float,
    ) -> None:
        """Counts the known prefix near the chosen worker, and has it copied there if it is hot."""
        near = self._pool.near(worker)
        num_uses = self._hot.note(keys, cached_blocks, self._block_tokens, now_s, near.name)
        depth = min(int(cached_blocks.max(initial=0)), len(keys))
        if self._replication is None or not depth or not self._replication.is_hot(num_uses):
            return
        others = [store for store in self._pool.stores if store is not near]
        missing = [block for block in job.prefix_blocks[:depth] if block not in near]
        wanted = [block for block in missing if any(block in store for store in others)]
        num_bytes = len(wanted) * self._block_tokens * placement.prefill.kv_bytes_per_token
        if self._replication.decide(near.name, int(keys[depth - 1]), num_bytes, now_s) == "copy":
            self.copies.append((near, job.prefix_blocks[:depth]))
