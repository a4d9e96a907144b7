"""The store's control calls, halfmoon.KVStore and halfmoon.KVStoreAdmin. kvstore.proto documents each."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import islice
from typing import TypeVar

import grpc

from halfmoon.catalog.block_identity import block_id
from halfmoon.catalog.entry import Tier
from halfmoon.errors import InvalidRequest
from halfmoon.kv.owner import KVOwner
from halfmoon.pb import kvstore_pb2, kvstore_pb2_grpc
from services.kvstore.events import BlockEvent, EventKind, Snapshot
from services.kvstore.movement.replication import Replicator
from services.kvstore.movement.shared_memory_get import SharedMemoryGet
from services.kvstore.movement.shared_memory_put import SharedMemoryPut
from services.kvstore.pool import Pool
from services.kvstore.wire import TIERS, checked_ids, info_message, named_layout, place_message, tiers_from

_PART = 4096  # blocks or events in one message, about 200 KB
_DEFAULT_LIMIT = 1000
_MAX_TENANTS = 1000  # in a message of statistics

_KINDS: dict[EventKind, kvstore_pb2.BlockEvent.Kind.ValueType] = {
    "stored": kvstore_pb2.BlockEvent.STORED,
    "moved": kvstore_pb2.BlockEvent.MOVED,
    "evicted": kvstore_pb2.BlockEvent.EVICTED,
}

Item = TypeVar("Item")


class KVStoreServicer(kvstore_pb2_grpc.KVStoreServicer):
    """Translates between workers and a `Pool`."""

    def __init__(
        self, pool: Pool, shared_memory_get: SharedMemoryGet, shared_memory_put: SharedMemoryPut, replicator: Replicator
    ) -> None:
        self._pool = pool
        self._shared_memory_get = shared_memory_get
        self._shared_memory_put = shared_memory_put
        self._replicator = replicator

    async def Match(
        self, request: kvstore_pb2.MatchRequest, context: grpc.aio.ServicerContext
    ) -> kvstore_pb2.MatchResponse:
        """See kvstore.proto."""
        blocks = _ids(request.keys, request.tenant_salt)
        if request.beyond_gaps:
            found = self._pool.find(blocks)
        else:
            found = dict(enumerate(self._pool.match(blocks)))
        return kvstore_pb2.MatchResponse(
            num_matched=len(found),
            tiers=[TIERS[entry.fastest] for entry in found.values()],
            places=found if request.beyond_gaps else (),
            room_idle_s=self._pool.room_idle_s() if request.with_room else 0.0,
        )

    async def Prefetch(
        self, request: kvstore_pb2.PrefetchRequest, context: grpc.aio.ServicerContext
    ) -> kvstore_pb2.PrefetchResponse:
        """See kvstore.proto."""
        num_coming = self._pool.prefetch(_ids(request.keys, request.tenant_salt))
        return kvstore_pb2.PrefetchResponse(num_coming=num_coming)

    async def Replicate(
        self, request: kvstore_pb2.ReplicateRequest, context: grpc.aio.ServicerContext
    ) -> kvstore_pb2.ReplicateResponse:
        """See kvstore.proto."""
        _ids(request.keys, request.tenant_salt)  # raises for an invalid key
        if not request.source:
            raise InvalidRequest("the source is missing: host:port of a store", param="source")
        layout = named_layout(request.layout)
        owner = KVOwner(request.tenant, request.tenant_quota_bytes)
        num_coming = self._replicator.request(request.source, request.keys, request.tenant_salt, layout, owner)
        return kvstore_pb2.ReplicateResponse(num_coming=num_coming)

    async def Borrow(
        self, request_iterator: AsyncIterator[kvstore_pb2.BorrowRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[kvstore_pb2.BorrowResponse]:
        """See kvstore.proto."""
        async for response in self._shared_memory_get.lend(request_iterator):
            yield response

    async def Take(
        self, request: kvstore_pb2.TakeRequest, context: grpc.aio.ServicerContext
    ) -> kvstore_pb2.TakeResponse:
        """See kvstore.proto."""
        return await self._shared_memory_put.take(request)

    async def Watch(
        self, request: kvstore_pb2.WatchRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[kvstore_pb2.WatchResponse]:
        """See kvstore.proto."""
        reader = self._pool.events.subscribe()
        try:
            while True:
                news = await reader.next()
                for message in _snapshot(news) if isinstance(news, Snapshot) else _events(news):
                    yield message
        finally:
            reader.close()

    async def Stats(
        self, request: kvstore_pb2.StatsRequest, context: grpc.aio.ServicerContext
    ) -> kvstore_pb2.StatsResponse:
        """See kvstore.proto."""
        return stats_message(self._pool)


class KVStoreAdminServicer(kvstore_pb2_grpc.KVStoreAdminServicer):
    """Translates between an operator and a `Pool`."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    async def List(
        self, request: kvstore_pb2.ListRequest, context: grpc.aio.ServicerContext
    ) -> kvstore_pb2.ListResponse:
        """See kvstore.proto."""
        tiers = tiers_from(request.tiers) or set(Tier)
        entries = [entry for entry in self._pool.catalog if entry.meta.id > request.after and tiers & set(entry.tiers)]
        if request.HasField("tenant"):
            entries = [entry for entry in entries if entry.meta.tenant == request.tenant]
        entries.sort(key=lambda entry: entry.meta.id)
        limit = request.limit or _DEFAULT_LIMIT
        return kvstore_pb2.ListResponse(blocks=[info_message(entry) for entry in entries[:limit]])

    async def Pin(self, request: kvstore_pb2.PinRequest, context: grpc.aio.ServicerContext) -> kvstore_pb2.PinResponse:
        """See kvstore.proto."""
        return kvstore_pb2.PinResponse(num_blocks=await self._pool.pin(checked_ids(request.ids), not request.unpin))

    async def Drop(
        self, request: kvstore_pb2.DropRequest, context: grpc.aio.ServicerContext
    ) -> kvstore_pb2.DropResponse:
        """See kvstore.proto."""
        return kvstore_pb2.DropResponse(num_dropped=await self._pool.drop(checked_ids(request.ids)))

    async def Empty(
        self, request: kvstore_pb2.EmptyRequest, context: grpc.aio.ServicerContext
    ) -> kvstore_pb2.DropResponse:
        """See kvstore.proto."""
        blocks = [entry.meta.id for entry in self._pool.catalog]
        return kvstore_pb2.DropResponse(num_dropped=await self._pool.drop(blocks))

    async def Verify(
        self, request: kvstore_pb2.VerifyRequest, context: grpc.aio.ServicerContext
    ) -> kvstore_pb2.VerifyResponse:
        """See kvstore.proto."""
        results = await self._pool.verify(tiers_from(request.tiers) or {Tier.DRAM, Tier.DISK})
        verdicts = [
            kvstore_pb2.TierVerdict(tier=TIERS[tier], num_blocks=num_blocks, num_damaged=num_damaged)
            for tier, (num_blocks, num_damaged) in results.items()
        ]
        return kvstore_pb2.VerifyResponse(tiers=verdicts)


def stats_message(pool: Pool) -> kvstore_pb2.StatsResponse:
    """Builds the message of what is held and what has happened."""
    counts, catalog = pool.counts, pool.catalog
    tiers = [
        kvstore_pb2.TierStats(
            tier=TIERS[tier],
            num_blocks=catalog.num_blocks(tier),
            used_bytes=catalog.used_bytes(tier),
            budget_bytes=pool.budget_bytes(tier),
            num_waiting=pool.num_waiting(tier),
            num_hits_total=counts.by_tier[tier]["hits"],
            num_evicted_total=counts.by_tier[tier]["evicted"],
            num_corrupted_total=counts.by_tier[tier]["corrupted"],
            num_failed_total=counts.by_tier[tier]["failed"],
            num_written_total=counts.by_tier[tier]["written"],
            num_skipped_total=counts.by_tier[tier]["skipped"],
            num_full_total=counts.by_tier[tier]["full"],
            configured_bytes=pool.configured_bytes(tier),
            trouble=pool.trouble(tier),
        )
        for tier in Tier
        if pool.configured_bytes(tier)
    ]
    return kvstore_pb2.StatsResponse(
        num_blocks=catalog.num_blocks(Tier.DRAM),
        used_bytes=catalog.used_bytes(Tier.DRAM),
        budget_bytes=pool.budget_bytes(Tier.DRAM),
        num_hits_total=counts.total("hits"),
        num_misses_total=counts.num_misses,
        num_evicted_total=counts.by_tier[Tier.DRAM]["evicted"],
        reserved_bytes=pool.dram.reserved_bytes,
        num_stored_total=counts.num_stored,
        num_replicas=len(pool.replicas),
        num_replicated_total=counts.num_replicated,
        num_unreplicated_total=counts.num_unreplicated,
        num_cooled_total=counts.num_cooled,
        num_begun_elsewhere=catalog.fragments.num_begun_elsewhere,
        num_corrupted_total=counts.total("corrupted"),
        num_expired_total=counts.num_expired,
        sequence=pool.events.sequence,
        tiers=tiers,
        tenants=[
            kvstore_pb2.TenantStats(
                tenant=account.tenant,
                num_blocks=account.num_blocks,
                used_bytes=account.used_bytes,
                quota_bytes=account.quota_bytes,
                num_evicted_total=account.num_evicted,
            )
            for account in islice(catalog.tenants, _MAX_TENANTS)
        ],
    )


def _ids(keys: Sequence[bytes], salt: bytes) -> list[bytes]:
    return [block_id(key, salt) for key in keys]


def _snapshot(snapshot: Snapshot) -> Iterator[kvstore_pb2.WatchResponse]:
    parts = list(_parts(snapshot.blocks)) or [[]]
    for index, part in enumerate(parts):
        yield kvstore_pb2.WatchResponse(
            sequence=snapshot.sequence,
            is_snapshot=True,
            is_last_part=index == len(parts) - 1,
            blocks=[place_message(block, tiers) for block, tiers in part],
        )


def _events(events: list[BlockEvent]) -> Iterator[kvstore_pb2.WatchResponse]:
    for part in _parts(events):
        messages = [
            kvstore_pb2.BlockEvent(kind=_KINDS[event.kind], block=place_message(event.block, event.tiers))
            for event in part
        ]
        yield kvstore_pb2.WatchResponse(sequence=part[-1].sequence, events=messages)


def _parts(items: list[Item]) -> Iterator[list[Item]]:
    for start in range(0, len(items), _PART):
        yield items[start : start + _PART]
