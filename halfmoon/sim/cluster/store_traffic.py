"""Blocks on their way from and to the simulated stores: loads of prefixes, writes behind prompts, copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from halfmoon.policy.placement.restore_plan import RestorePlan
from halfmoon.policy.values import Placement
from halfmoon.sim.cluster.job import Job
from halfmoon.sim.cluster.kv_transfers import KvTransfers
from halfmoon.sim.cluster.store import SimStore
from halfmoon.sim.cluster.store_pool import StorePool
from halfmoon.sim.cluster.worker import SimWorker

OnStored = Callable[[SimStore, Sequence[int], Sequence[int]], None]


class StoreTraffic:
    """Owns nothing: `StorePool` has the blocks, `KvTransfers` the ports."""

    def __init__(self, pool: StorePool, transfers: KvTransfers, block_tokens: int, on_stored: OnStored) -> None:
        """block_tokens: of the workload's prefixes; on_stored: learns of blocks stored and evicted."""
        self._pool = pool
        self._transfers = transfers
        self._block_tokens = block_tokens
        self._on_stored = on_stored

    def use(self, job: Job, now_s: float) -> None:
        """Counts a use of the prompt's blocks, as when a worker asks all stores for them."""
        self._pool.use(job.prefix_blocks[: job.target // self._block_tokens], now_s)

    def load(
        self, job: Job, target: SimWorker, placement: Placement, plan: Callable[[Placement, float], RestorePlan]
    ) -> None:
        """Loads the end of a prefix, each block from a store that has it. plan: as of how long the links are taken."""
        first = placement.cached_tokens // self._block_tokens
        last = first + placement.fetched_tokens // self._block_tokens
        known = job.prefix_blocks[first:last]
        holders = [store for store in self._pool.stores if any(block in store for block in known)]
        num_loaded = plan(placement, self._transfers.wait_from_s(holders, target)).num_load_blocks
        parts = self._pool.parts(job.prefix_blocks[last - num_loaded : last])
        num_tokens = sum(part.num_blocks for part in parts) * self._block_tokens
        if num_tokens:
            self._transfers.load(job, parts, target, last * self._block_tokens, num_tokens)

    def write(self, job: Job, worker: SimWorker, num_tokens: int, now_s: float) -> None:
        """Puts a job's first whole blocks that no store has into one of them, behind everything else.

        num_tokens: that this worker has computed or received.
        """
        whole = job.prefix_blocks[: num_tokens // self._block_tokens]
        store, blocks = self._pool.to_write(whole, worker, now_s)
        self._send(worker, worker.node, store, blocks)

    def copy(self, worker: SimWorker, target: SimStore, blocks: Sequence[int]) -> None:
        """Has a store copy blocks from the others. worker: one that they are of."""
        left = [block for block in blocks if block not in target]
        for source in self._pool.stores:
            held = [block for block in left if block in source]
            left = [block for block in left if block not in held]
            self._send(worker, source.node, target, held)

    def _send(self, worker: SimWorker, sender: int, store: SimStore, blocks: Sequence[int]) -> None:
        if blocks:
            num_bytes = len(blocks) * self._block_tokens * worker.group.latency.kv_bytes_per_token
            self._transfers.store(sender, store, num_bytes, self._arrived, blocks)

    def _arrived(self, store: SimStore, blocks: Sequence[int], now_s: float) -> None:
        self._on_stored(store, *store.put(blocks, now_s))
