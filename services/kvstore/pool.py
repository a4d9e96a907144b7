"""The pool: three tiers behind one set of calls. The shell around the catalog; it owns the clock and the tasks.

Reads go to the fastest tier that has the block and fill DRAM on the way. Writes go to DRAM and are copied down in the
background. A slower tier that fails is not used for a while; until then, blocks held there alone are misses.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from halfmoon.catalog.block_identity import BlockMeta
from halfmoon.catalog.catalog import Catalog
from halfmoon.catalog.entry import Change, Entry, Tier
from halfmoon.catalog.replica_marks import ReplicaMarks
from halfmoon.errors import DataLoss, HalfmoonError, Incompatible, NoCapacity, NotFound
from halfmoon.kv.owner import KVOwner
from halfmoon.policy.eviction import policy_named
from halfmoon.rpc.breaker import CircuitBreaker
from services.kvstore.counts import Counts
from services.kvstore.events import EventKind, EventLog
from services.kvstore.movement.disk_upkeep import DiskUpkeep
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
    """One block being read, from any tier. Return it with `Pool.give_back`."""

    record: Record
    block: Block | None  # in the arena, where other processes can read it

    def cells(self) -> memoryview:
        """Decodes the raw block. Raises DataLoss."""
        return self.record.cells()


class Pool:
    """Owns the tiers, the copying between them, and the events. Runs on one event loop, so it needs no locks."""

    def __init__(
        self,
        memory: memoryview,
        options: PoolOptions | None = None,
        disk: DiskTier | None = None,
        cold: ColdTier | None = None,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        """memory: the writable arena of the DRAM tier. Blocks that `disk` found at its start are taken over."""
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
        self._upkeep = upkeep = (
            None
            if disk is None
            else DiskUpkeep(self.catalog, disk, self.counts, lambda: self._write_behind.enqueue_all())
        )
        self._write_behind = WriteBehind(self.options, self.catalog, self.dram, disk, upkeep, cold, self.counts)
        self._maintenance = Maintenance(self.options, self.catalog, self.replicas, disk, cold, self.counts, now_s)
        if upkeep is not None:
            upkeep.recover()

    @asynccontextmanager
    async def running(self, *background: Coroutine[Any, Any, None]) -> AsyncIterator[Pool]:
        """Copies, expires and lists in the background, next to `background`; then closes the slower tiers."""
        work: list[asyncio.Task[None]] = []
        try:
            async with asyncio.TaskGroup() as tasks:
                work += [tasks.create_task(coroutine) for coroutine in (*self._write_behind.work(), *background)]
                work.append(tasks.create_task(self._maintenance.sweep()))
                if self._upkeep is not None:
                    work.append(tasks.create_task(self._maintenance.look_after_disk(self._upkeep)))
                if self.cold is not None:
                    work.append(tasks.create_task(self._maintenance.list_cold(self.cold)))
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
        """Returns when every block has been copied down as far as possible. For tests and benchmarks."""
        await self._write_behind.settled()

    async def look_after_disk(self) -> None:
        """Follows what others did to the disk tier's directory and file system, as happens each second anyway."""
        if self._upkeep is not None:
            await self._upkeep.check()

    def match(self, blocks: Sequence[bytes]) -> list[Entry]:
        """Entries of the leading blocks that are here and readable now. Counts as a use."""
        entries = self.catalog.match(blocks, self._now_s())
        num = next((i for i, entry in enumerate(entries) if not self._loader.is_reachable(entry)), len(entries))
        return entries[:num]

    def find(self, blocks: Sequence[bytes]) -> dict[int, Entry]:
        """Entries of all of the blocks that are here and readable now, by place. Counts as a use."""
        found = self.catalog.find(blocks, self._now_s())
        return {place: entry for place, entry in found.items() if self._loader.is_reachable(entry)}

    def room_idle_s(self) -> float:
        """See `Catalog.room_idle_s`; of the slowest tier, whose evictions are losses."""
        tier = max(tier for tier in Tier if self.budget_bytes(tier))
        return self.catalog.room_idle_s(tier, self.budget_bytes(tier), self._now_s())

    def prefetch(self, blocks: Sequence[bytes]) -> int:
        """Starts loading the leading blocks into DRAM; returns how many are there or will come."""
        return self._loader.prefetch([entry.meta.id for entry in self.catalog.match(blocks, self._now_s())])

    def take_over(self, meta: BlockMeta) -> bool:
        """Whether an offered block is here and readable; if so, it stops counting as a replica.

        Raises Incompatible if it is here in another layout.
        """
        self._check_layout(meta)
        if not self.match([meta.id]):
            return False
        if self.replicas.unmark(meta.id):
            self._write_behind.enqueue(meta)
        return True

    def set_quota(self, owner: KVOwner) -> None:
        """Learns the quota of a tenant whose blocks are offered; what is above it goes, as far as nobody uses it."""
        self.catalog.tenants.set_quota(owner)
        while self.catalog.tenants.is_over(owner.tenant) and self.catalog.evict_of_tenant(owner.tenant):
            continue

    def reserve(self, meta: BlockMeta, after: Draft | None = None) -> Draft:
        """Reserves room for an arriving block that follows the draft `after`, if any.

        Raises Incompatible if the block is here in another layout, NoCapacity if its tenant has reached its quota with
        blocks that are in use, and whatever `DramTier.reserve` raises.
        """
        self._check_layout(meta)
        self._make_room_of(meta)
        expires_at_s = self._now_s() + self.options.ttl_s
        return self.dram.reserve(replace(meta, expires_at_s=expires_at_s), after)

    async def commit(self, draft: Draft, known_digest: int | None = None) -> None:
        """Makes a fully written block visible and queues its copies to slower tiers.

        known_digest: digest of its present bytes.
        """
        await self._encoder.commit(draft, known_digest)
        self.replicas.unmark(draft.meta.id)
        self.counts.num_stored += 1
        self._write_behind.enqueue(draft.meta)
        await self._encoder.encode_left_behind(draft.meta)

    async def commit_replica(self, draft: Draft) -> None:
        """Commits a replica of another store's block. It stays in DRAM and is dropped when it cools down."""
        was_here = await self._encoder.commit(draft)
        entry = self.catalog.get(draft.meta.id)
        if entry is not None and not was_here:  # a copy that a worker brought in the meantime is this store's own
            self.replicas.mark(draft.meta.id, entry.usage.num_uses, self._now_s())
            self.counts.num_replicated += 1
        await self._encoder.encode_left_behind(draft.meta)

    def discard(self, draft: Draft) -> None:
        """Ends a draft that was not committed."""
        self.dram.discard(draft)

    async def acquire(self, block: bytes) -> Loan:
        """Gives a block to read, from any tier. Raises NotFound, DataLoss or Unavailable; each counts as a miss."""
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
        """Forgets blocks and all that follow them, for good; returns how many."""
        num_dropped = sum(self.catalog.drop(block) for block in blocks)
        if num_dropped:
            await self._maintenance.flush()
        return num_dropped

    async def pin(self, blocks: Sequence[bytes], pinned: bool) -> int:
        """Pins or unpins blocks, beyond a restart if they are on disk; returns how many are here."""
        known = [block for block in blocks if self.catalog.pin(block, pinned)]
        await self._maintenance.flush([(block, pinned) for block in known])
        return len(known)

    async def verify(self, tiers: Iterable[Tier]) -> dict[Tier, tuple[int, int]]:
        """Reads every block of the tiers and drops damaged ones. Returns (number read, number damaged) by tier."""
        return await self._verification.verify(tiers)

    def budget_bytes(self, tier: Tier) -> int:
        """Most bytes that the tier may hold now; 0 if there is no such tier."""
        if tier is Tier.DRAM:
            return self.dram.capacity_bytes
        held = self.disk if tier is Tier.DISK else self.cold
        return 0 if held is None else held.budget_bytes

    def configured_bytes(self, tier: Tier) -> int:
        """Capacity that the tier was given, whatever room there is now; 0 if there is no such tier."""
        return self.disk.configured_bytes if tier is Tier.DISK and self.disk is not None else self.budget_bytes(tier)

    def trouble(self, tier: Tier) -> str:
        """Why the tier is not written or not used at present; empty if all is well."""
        if tier is Tier.DISK and self.disk is not None and self.disk.away.reason:
            return self.disk.away.reason
        if tier is Tier.COLD and self.cold is not None and self.cold.outage.reason:
            return self.cold.outage.reason
        return self._write_behind.trouble(tier)

    def num_waiting(self, tier: Tier) -> int:
        """Number of blocks waiting to be copied to the tier."""
        return self._write_behind.num_waiting(tier)

    def _make_room_of(self, meta: BlockMeta) -> None:
        """Lets blocks of the same tenant go until one more is within its quota. Raises NoCapacity."""
        assert meta.layout is not None
        tenant = meta.tenant
        num_bytes = self.dram.reserved_bytes_of(tenant) + meta.layout.block_bytes
        before = meta.parent if meta.parent is not None and meta.parent in self.catalog else None
        if before is not None:
            self.catalog.hold(before)
        try:
            while self.catalog.tenants.excess_bytes(tenant, num_bytes):
                if not self.catalog.evict_of_tenant(tenant):
                    raise NoCapacity(f"the tenant {tenant!r} has reached its quota of KV with blocks that are in use")
        finally:
            if before is not None:
                self.catalog.release(before)

    def _check_layout(self, meta: BlockMeta) -> None:
        entry = self.catalog.get(meta.id)
        if entry is not None and entry.meta.layout not in (None, meta.layout):
            raise Incompatible("the block with this key has another KV layout", param="layout")

    async def _acquire(self, block: bytes) -> Loan:
        entry = self.catalog.live(block, self._now_s())
        if entry is None:
            raise NotFound("no block with this key is here")
        try:
            in_dram = self.dram.acquire(block)
        except NotFound:
            self.catalog.touch(block)
        except DataLoss:
            self.counts.add(Tier.DRAM, "corrupted")
            if block not in self.catalog:
                raise
        else:
            self.counts.add(Tier.DRAM, "hits")
            return _loan_of(in_dram)
        record = await self._loader.load(block)
        try:
            return _loan_of(self.dram.acquire(block, use=False))
        except HalfmoonError:  # there was no room in DRAM
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


def _loan_of(block: Block) -> Loan:
    return Loan(Record(block.meta, block.codec, block.room.view), block)
