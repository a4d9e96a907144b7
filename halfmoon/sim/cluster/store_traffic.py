"""Blocks on their way from, to and within the simulated stores: loads, writes behind prompts, copies between tiers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import NamedTuple

from halfmoon.catalog.entry import Tier
from halfmoon.policy.forecast.restore_plan import RestorePlan
from halfmoon.policy.values import Placement
from halfmoon.sim.cluster.cluster_spec import Stores
from halfmoon.sim.cluster.kv_transfers import KvTransfers, LoadPart
from halfmoon.sim.cluster.store import SimStore
from halfmoon.sim.cluster.store_pool import StorePool
from halfmoon.sim.event_queue import EventQueue
from halfmoon.sim.routers.store_directory import StoreDirectory
from halfmoon.sim.worker.job import Job
from halfmoon.sim.worker.worker import SimWorker

PlanRestore = Callable[[Placement, float, float], RestorePlan]
"""How a placement's prefix is restored, if the link is free after seconds, and a token takes seconds to load."""


class _Device(NamedTuple):
    store: int
    tier: Tier
    is_write: bool


class StoreTraffic:
    """Owns until when each slower tier reads and writes. `StorePool` has the blocks, `KvTransfers` the ports."""

    def __init__(
        self,
        pool: StorePool,
        spec: Stores,
        transfers: KvTransfers,
        events: EventQueue,
        block_tokens: int,
        directory: StoreDirectory,
    ) -> None:
        """block_tokens: of the workload's prefixes; directory: hears what is stored, and how fast workers load."""
        self._pool = pool
        self._spec = spec
        self._transfers = transfers
        self._events = events
        self._block_tokens = block_tokens
        self._directory = directory
        self._free_s: dict[_Device, float] = {}

    def begin(self, job: Job, prefill: SimWorker) -> None:
        """Counts a use of a placed prompt's blocks, and makes the copies that the gateway wants."""
        self._pool.use(job.prefix_blocks[: job.target // self._block_tokens], self._events.now_s)
        while self._directory.copies:
            self._copy(prefill, *self._directory.copies.pop())

    def load(self, job: Job, target: SimWorker, placement: Placement, plan: PlanRestore) -> None:
        """Loads the end of a prefix, each block from a store that has it, as fast as its tier is."""
        first = placement.cached_tokens // self._block_tokens
        last = first + placement.fetched_tokens // self._block_tokens
        parts = self._parts(job.prefix_blocks[first:last], target)
        token_s = self._transfers.load_s(parts, target) / max(placement.fetched_tokens, 1)
        num_loaded = plan(placement, self._transfers.wait_from_s(parts, target), token_s).num_load_blocks
        if not num_loaded:
            return
        self._directory.note_load(target, token_s)
        parts = self._parts(job.prefix_blocks[last - num_loaded : last], target)
        for part in parts:
            for device, seconds in self._reads(part.store, part.blocks, target):
                self._free_s[device] = max(self._free_s.get(device, 0.0), self._events.now_s) + seconds
            part.store.read(part.blocks)
            self._tell(part.store)
        num_tokens = sum(len(part.blocks) for part in parts) * self._block_tokens
        if num_tokens:
            self._transfers.load(job, parts, target, last * self._block_tokens, num_tokens)

    def write(self, job: Job, worker: SimWorker, num_tokens: int) -> None:
        """Puts a job's first whole blocks that no store has into one of them, behind everything else.

        num_tokens: that this worker has computed or received.
        """
        whole = job.prefix_blocks[: num_tokens // self._block_tokens]
        store, wanted = self._pool.to_write(whole, worker, self._events.now_s)
        self._send(worker, worker.node, store, whole, wanted)

    def _copy(self, worker: SimWorker, target: SimStore, prompt: Sequence[int]) -> None:
        """Has a store copy a prompt's blocks from the others. worker: one whose blocks are of that size."""
        for source, held in self._pool.by_store([block for block in prompt if block not in target]):
            self._send(worker, source.node, target, prompt, held, is_replica=True)

    def _parts(self, blocks: Sequence[int], target: SimWorker) -> list[LoadPart]:
        found, now_s = [], self._events.now_s
        for store, held in self._pool.by_store(blocks):
            reads = self._reads(store, held, target)
            waits = (max(self._free_s.get(device, 0.0) - now_s, 0.0) for device, _ in reads)
            read_s = max((seconds for _, seconds in reads), default=0.0)
            found.append(LoadPart(store, held, max(waits, default=0.0), read_s))
        return found

    def _reads(self, store: SimStore, blocks: Sequence[int], target: SimWorker) -> list[tuple[_Device, float]]:
        """The slower tiers that deliver the blocks, and the seconds that each needs."""
        block_bytes = self._block_bytes(target)
        return [
            (_Device(store.number, tier, False), self._spec.read_s(tier, num, num * block_bytes))
            for tier, num in store.tiers_of(blocks).items()
            if tier is not Tier.DRAM
        ]

    def _send(
        self,
        worker: SimWorker,
        sender: int,
        store: SimStore,
        prompt: Sequence[int],
        wanted: Collection[int],
        *,
        is_replica: bool = False,
    ) -> None:
        if wanted:
            num_bytes = len(wanted) * self._block_bytes(worker)
            there_s = self._transfers.send_to(store.node, sender, num_bytes)
            arrived = partial(self._arrived, is_replica=is_replica)
            self._events.at(there_s, arrived, store, worker, prompt, wanted)

    def _arrived(
        self, store: SimStore, worker: SimWorker, prompt: Sequence[int], wanted: Collection[int], *, is_replica: bool
    ) -> None:
        size, model = self._block_tokens, worker.group.latency.policy_prefill
        store.put(
            prompt,
            wanted,
            lambda depth: model.seconds(size, depth * size + size // 2),
            self._events.now_s,
            is_replica=is_replica,
        )
        self._tell(store)
        for tier in self._spec.tier_tokens:
            self._copy_down(store, tier, self._block_bytes(worker))

    def _copy_down(self, store: SimStore, tier: Tier, block_bytes: float) -> None:
        """Begins to copy the next blocks to a slower tier, unless it is writing."""
        device, now_s = _Device(store.number, tier, True), self._events.now_s
        if self._free_s.get(device, 0.0) > now_s:
            return
        blocks = store.next_copies(tier)
        if blocks:
            self._free_s[device] = now_s + self._spec.read_s(tier, len(blocks), len(blocks) * block_bytes)
            self._events.at(self._free_s[device], self._copied_down, store, tier, blocks, block_bytes)

    def _copied_down(self, store: SimStore, tier: Tier, blocks: list[bytes], block_bytes: float) -> None:
        store.copied(tier, blocks)
        self._tell(store)
        self._copy_down(store, tier, block_bytes)

    def _tell(self, store: SimStore) -> None:
        self._directory.note_stored(store, *store.take_changes())

    def _block_bytes(self, worker: SimWorker) -> float:
        return self._block_tokens * worker.group.latency.kv_bytes_per_token
