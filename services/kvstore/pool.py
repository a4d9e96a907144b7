"""The pool: three tiers behind one set of calls. The shell around the catalog; it owns the clock and the tasks.

Reads go to the fastest tier that has the block and fill DRAM on the way; writes go to DRAM and are copied down behind
the request. A slower tier that fails is left alone for a while: what it alone has is a miss until then.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from halfmoon.errors import DataLoss, HalfmoonError, Incompatible, NotFound
from halfmoon.rpc.breaker import CircuitBreaker
from services.kvstore.catalog.block_identity import BlockMeta
from services.kvstore.catalog.catalog import Catalog
from services.kvstore.catalog.entry import Change, Entry, Tier
from services.kvstore.catalog.events import EventKind, EventLog
from services.kvstore.catalog.eviction import policy_named
from services.kvstore.catalog.replica_marks import ReplicaMarks
from services.kvstore.counts import Counts
from services.kvstore.movement.loading import Loader
from services.kvstore.movement.maintenance import Maintenance
from services.kvstore.movement.write_behind import WriteBehind
from services.kvstore.options import PoolOptions
from services.kvstore.tiers.cold import ColdTier
from services.kvstore.tiers.disk import DiskTier
from services.kvstore.tiers.dram import Block, Draft, DramTier
from services.kvstore.tiers.dram_encoder import DramEncoder
from services.kvstore.tiers.record import Record
from services.kvstore.verification import Verification


@dataclass(slots=True, eq=False)
class Loan:
    """One block being read, wherever it came from. Give it back with `Pool.give_back`."""

    record: Record
    block: Block | None  # in the arena, where other processes can see it

    def cells(self) -> memoryview:
        """The raw block. Raises DataLoss."""
        return self.record.cells()


class Pool:
    """Owns the tiers, what copies between them, and the events. Runs on one event loop: it needs no locks."""

    def __init__(
        self,
        memory: memoryview,
        options: PoolOptions | None = None,
        disk: DiskTier | None = None,
        cold: ColdTier | None = None,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        """memory: the DRAM tier's arena, writable. What `disk` found at its start is taken over."""
        self.options = options or PoolOptions()
        policies = (self.options.dram_policy, self.options.disk_policy, self.options.cold_policy)
        self.counts = Counts()
        self.catalog = Catalog(
            {tier: policy_named(name) for tier, name in zip(Tier, policies, strict=True)}, self._changed
        )
        self.dram = DramTier(memory, self.catalog)
        self.disk = disk
        self.cold = cold
        self.events = EventLog(lambda: [(entry.meta.id, tuple(sorted(entry.tiers))) for entry in self.catalog])
        self.replicas = ReplicaMarks()
        self._now_s = now_s
        self._encoder = DramEncoder(self.options.dram_codec, self.dram, self.catalog)
        self._verification = Verification(self.catalog, self.dram, disk, cold, self.counts)
        self._disk_breaker = CircuitBreaker(1, self.options.retry_pause_s)
        self._loader = Loader(
            self.catalog, self.dram, self.options.dram_codec, disk, self._disk_breaker, cold, self.counts
        )
        self._copies = WriteBehind(self.options, self.catalog, self.dram, disk, self._disk_breaker, cold, self.counts)
        self._upkeep = Maintenance(self.options, self.catalog, self.replicas, disk, cold, self.counts, now_s)
        if disk is not None:
            self._recover(disk)

    @asynccontextmanager
    async def running(self, *beside: Coroutine[Any, Any, None]) -> AsyncIterator[Pool]:
        """Copies, sweeps and lists in the background meanwhile, and `beside`; then closes the slower tiers."""
        work: list[asyncio.Task[None]] = []
        try:
            async with asyncio.TaskGroup() as tasks:
                work += [tasks.create_task(one) for one in (*self._copies.work(), *beside)]
                work.append(tasks.create_task(self._upkeep.sweep()))
                if self.cold is not None:
                    work.append(tasks.create_task(self._upkeep.list_cold(self.cold)))
                yield self
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self.options.drain_s):
                        await self.settled()
                for task in work:
                    task.cancel()
        finally:
            await self._loader.close()
            if self.disk is not None:
                await self.disk.close()
            if self.cold is not None:
                await self.cold.close()

    async def settled(self) -> None:
        """Returns when every block has been copied down as far as it could be. For tests and benchmarks."""
        await self._copies.settled()

    def match(self, blocks: Sequence[bytes]) -> list[Entry]:
        """The leading blocks that are here and can be read now; it counts as a use of them."""
        found = self.catalog.match(blocks, self._now_s())
        num = next((i for i, entry in enumerate(found) if not self._loader.is_reachable(entry)), len(found))
        return found[:num]

    def prefetch(self, blocks: Sequence[bytes]) -> int:
        """Begins to bring the leading blocks to DRAM; gives how many are there or will come."""
        return self._loader.prefetch([entry.meta.id for entry in self.catalog.match(blocks, self._now_s())])

    def take_over(self, meta: BlockMeta) -> bool:
        """Whether a block that somebody offers is here and can be read; if so, it is nobody else's copy any more.

        Raises Incompatible if it is here in another layout.
        """
        self._check_layout(meta)
        if not self.match([meta.id]):
            return False
        if self.replicas.unmark(meta.id):
            self._copies.enqueue(meta)
        return True

    def reserve(self, meta: BlockMeta, ttl_s: float = 0.0, after: Draft | None = None) -> Draft:
        """Room for a block on its way in, behind the draft `after`, if any; `ttl_s` 0 is the store's own.

        Raises Incompatible if the block is here in another layout, and as `DramTier.reserve` does.
        """
        self._check_layout(meta)
        expires_at_s = self._now_s() + (ttl_s or self.options.ttl_s)
        known = BlockMeta(meta.id, meta.parent, meta.depth, meta.layout, meta.recompute_s, expires_at_s)
        return self.dram.reserve(known, after)

    async def commit(self, draft: Draft, known_digest: int | None = None) -> None:
        """Makes a block visible, whose every byte was written, and has it copied down behind the caller.

        known_digest: of these bytes, as they are now.
        """
        await self._encoder.commit(draft, known_digest)
        self.replicas.unmark(draft.meta.id)
        self.counts.num_stored += 1
        self._copies.enqueue(draft.meta)
        await self._encoder.encode_left_behind(draft.meta)

    async def commit_replica(self, draft: Draft) -> None:
        """As `commit`, of a copy of what another store has: it goes no further down, and is dropped when it cools."""
        was_here = await self._encoder.commit(draft)
        entry = self.catalog.get(draft.meta.id)
        if entry is not None and not was_here:  # what a worker brought meanwhile is this store's own
            self.replicas.mark(draft.meta.id, entry.usage.num_uses, self._now_s())
            self.counts.num_replicated += 1
        await self._encoder.encode_left_behind(draft.meta)

    def discard(self, draft: Draft) -> None:
        """Ends a draft that was not committed."""
        self.dram.discard(draft)

    async def acquire(self, block: bytes) -> Loan:
        """A block to read, from whichever tier. Raises NotFound, DataLoss or Unavailable, each of which is a miss."""
        try:
            return await self._acquire(block)
        except HalfmoonError:
            self.counts.num_misses += 1
            raise

    def give_back(self, loan: Loan) -> None:
        """Ends the use of a loan."""
        if loan.block is not None:
            self.dram.release(loan.block)

    async def drop(self, blocks: Iterable[bytes]) -> int:
        """Forgets blocks and all that follow them, for good; gives how many."""
        num_dropped = sum(self.catalog.drop(block) for block in blocks)
        if num_dropped:
            await self._upkeep.flush()
        return num_dropped

    async def pin(self, blocks: Sequence[bytes], pinned: bool) -> int:
        """Pins or unpins blocks, beyond a restart where they are on disk; gives how many are here."""
        known = [block for block in blocks if self.catalog.pin(block, pinned)]
        await self._upkeep.flush([(block, pinned) for block in known])
        return len(known)

    async def verify(self, tiers: Iterable[Tier]) -> dict[Tier, tuple[int, int]]:
        """Reads every block of the tiers; what is damaged is dropped. (number read, number damaged) of each."""
        return await self._verification.verify(tiers)

    def budget_bytes(self, tier: Tier) -> int:
        """What the tier may take; 0 if there is none."""
        if tier is Tier.DRAM:
            return self.dram.capacity_bytes
        held = self.disk if tier is Tier.DISK else self.cold
        return 0 if held is None else held.budget_bytes

    def num_waiting(self, tier: Tier) -> int:
        """Blocks to be copied there."""
        return self._copies.num_waiting(tier)

    def _check_layout(self, meta: BlockMeta) -> None:
        entry = self.catalog.get(meta.id)
        if entry is not None and entry.meta.layout not in (None, meta.layout):
            raise Incompatible("the block with this key has another KV layout", param="layout")

    async def _acquire(self, block: bytes) -> Loan:
        entry = self.catalog.live(block, self._now_s())
        if entry is None:
            raise NotFound("no block with this key is here")
        try:
            found = self.dram.acquire(block)
        except NotFound:
            self.catalog.touch(block)
        except DataLoss:
            self.counts.add(Tier.DRAM, "corrupted")
            if block not in self.catalog:
                raise
        else:
            self.counts.add(Tier.DRAM, "hits")
            return _loan_of(found)
        record = await self._loader.load(block)
        try:
            return _loan_of(self.dram.acquire(block, use=False))
        except HalfmoonError:  # there was no room for it
            return Loan(record, None)

    def _changed(self, change: Change) -> None:
        if not change.held:
            if change.tier is Tier.DRAM:
                self.dram.forget(change.block)
            elif change.tier is Tier.DISK and self.disk is not None:
                self.disk.forget(change.block)
            elif change.tier is Tier.COLD and self.cold is not None:
                self.cold.forget(change.meta)
        if change.evicted:
            self.counts.add(change.tier, "evicted")
        if not change.rejected:
            kind: EventKind = "stored" if change.first else "evicted" if change.gone else "moved"
            self.events.publish(kind, change.block, tuple(sorted(change.tiers)))

    def _recover(self, disk: DiskTier) -> None:
        """What the disk had, where it has the beginning, too; the rest is forgotten."""
        for row in disk.recovered():
            meta = row.meta
            if self.catalog.can_add(meta.parent, Tier.DISK):
                disk.admit(row)
                self.catalog.add(meta, Tier.DISK, row.place.num_bytes)
                self.catalog.pin(meta.id, row.pinned)
            else:
                disk.forget(meta.id)
        while self.catalog.used_bytes(Tier.DISK) > disk.live_budget_bytes:  # it was given less than before
            if self.catalog.pop_victim(Tier.DISK) is None:
                break


def _loan_of(block: Block) -> Loan:
    return Loan(Record(block.meta, block.codec, block.room.view), block)
