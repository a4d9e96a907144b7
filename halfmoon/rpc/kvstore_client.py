"""The pool's client in a worker or gateway: blocks in and out, read in place on the store's own host.

Every method's `deadline_s` bounds the call. Absent, damaged and unreachable blocks raise NotFound, DataLoss and
Unavailable: for a caller that can compute a block, each of them is a miss.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from copy import copy
from dataclasses import dataclass
from typing import Literal

import xxhash

from halfmoon.errors import DataLoss, InvalidRequest, Unavailable
from halfmoon.kv.entry_codec import EntryCodec
from halfmoon.kv.frame import KVRange
from halfmoon.kv.kv_layout import KVBytes, KVLayout
from halfmoon.pb import kvstore_pb2, kvstore_pb2_grpc
from halfmoon.rpc.block_streams import get_blocks, put_blocks, whole_blocks
from halfmoon.rpc.chain import Chain, Stored
from halfmoon.rpc.layout_message import layout_from, layout_message
from halfmoon.rpc.outbox import Outbox
from halfmoon.rpc.peer import LONG_LIVED_S, Peer
from halfmoon.rpc.transport.limiter import LinkLimiter
from halfmoon.rpc.transport.link import KVLink, LinkSettings
from halfmoon.rpc.transport.mapped import MappedSegments

TierName = Literal["dram", "disk", "cold"]


@dataclass(frozen=True, slots=True)
class Lent:
    """One block in the store's memory, valid as long as the loan lasts."""

    stored: memoryview  # read-only, in the store's mapping
    digest: int
    codec: EntryCodec
    layout: KVLayout

    def cells(self) -> memoryview:
        """The raw block in canonical order; for a plain block, a view of the store's memory.

        Raises DataLoss if the bytes are not those that were stored.
        """
        if xxhash.xxh3_64_intdigest(self.stored) != self.digest:
            raise DataLoss("a lent block's digest does not match its bytes")
        return self.codec.decode(self.stored, self.layout)


class KVStoreClient:
    """Owns the channels to one store, its mapped memory, and the memory from which it takes blocks. Close it."""

    def __init__(self, address: str, tenant_salt: bytes = b"", link_settings: LinkSettings | None = None) -> None:
        """tenant_salt: only blocks stored under the same salt are visible."""
        self._peer = Peer(address)
        self._link = KVLink(Peer(address), link_settings)  # bulk bytes do not delay control
        self._stub = kvstore_pb2_grpc.KVStoreStub(self._peer.channel)
        self._salt = tenant_salt
        settings = self._link.settings
        self._inbound = LinkLimiter(settings.bytes_per_s, settings.delay_s)  # the inbound direction of a throttled link
        self._segments = MappedSegments()
        self._outbox = Outbox(self._peer, self._link)

    def of_tenant(self, salt: bytes) -> KVStoreClient:
        """The same store for another tenant, on the same channels. Must not be closed."""
        view = copy(self)
        view._salt = salt
        return view

    async def close(self) -> None:
        """Closes the channels and releases the store's memory."""
        await self._segments.aclose()
        self._outbox.close()
        await self._link.close()
        await self._peer.close()

    async def match(self, keys: Sequence[bytes], *, deadline_s: float) -> list[TierName]:
        """For each of the leading keys that are present, the fastest tier that has it."""
        request = kvstore_pb2.MatchRequest(keys=keys, tenant_salt=self._salt)
        response = await self._peer.call(self._stub.Match, request, deadline_s=deadline_s)
        return [_TIERS[tier] for tier in response.tiers]

    async def prefetch(self, keys: Sequence[bytes], *, deadline_s: float) -> int:
        """Brings leading blocks into the store's DRAM; returns how many are there or on their way."""
        request = kvstore_pb2.PrefetchRequest(keys=keys, tenant_salt=self._salt)
        return int((await self._peer.call(self._stub.Prefetch, request, deadline_s=deadline_s)).num_coming)

    async def replicate(self, source: str, keys: Sequence[bytes], layout: KVLayout, *, deadline_s: float) -> int:
        """Makes this store copy a prompt's blocks from `source` in the background; returns how many it lacks.

        Raises NoCapacity if it already has enough to copy.
        """
        request = kvstore_pb2.ReplicateRequest(
            source=source, keys=keys, tenant_salt=self._salt, layout=layout_message(layout)
        )
        return int((await self._peer.call(self._stub.Replicate, request, deadline_s=deadline_s)).num_coming)

    async def stats(self, *, deadline_s: float) -> kvstore_pb2.StatsResponse:
        """The store's statistics."""
        response = await self._peer.call(self._stub.Stats, kvstore_pb2.StatsRequest(), deadline_s=deadline_s)
        assert isinstance(response, kvstore_pb2.StatsResponse)
        return response

    async def put(
        self, key: bytes, layout: KVLayout, cells: KVBytes, chain: Chain | None = None, *, deadline_s: float
    ) -> None:
        """Stores one whole block; see `put_run`."""
        await self.put_run([key], layout, [cells], chain, deadline_s=deadline_s)

    async def put_run(
        self,
        keys: Sequence[bytes],
        layout: KVLayout,
        cells: Sequence[KVBytes],
        chain: Chain | None = None,
        *,
        deadline_s: float,
    ) -> Stored:
        """Stores successive blocks of a prompt: raw bytes in canonical order.

        Afterwards at least the first one is stored and visible; otherwise raises NotFound if the block before it is
        absent, NoCapacity, DataLoss, Incompatible or Unavailable.
        """
        place = chain or Chain()
        stored = await self._outbox.put(keys, layout, cells, place, self._salt, deadline_s=deadline_s)
        if stored is not None:
            return stored
        return await put_blocks(self._link, keys, layout, cells, place, self._salt, deadline_s=deadline_s)

    async def get(self, key: bytes, layout: KVLayout, part: KVRange | None = None, *, deadline_s: float) -> memoryview:
        """One block, or a part of it; see `get_run`. Raises NotFound, DataLoss, Incompatible or Unavailable."""
        async with aclosing(self.get_run([key], layout, part, deadline_s=deadline_s)) as blocks:
            async for cells in blocks:
                return cells
        raise DataLoss("the store sent only a part of the block")

    def get_run(
        self, keys: Sequence[bytes], layout: KVLayout, part: KVRange | None = None, *, deadline_s: float
    ) -> AsyncGenerator[memoryview, None]:
        """Raw bytes of blocks in canonical order, or a part of each; `token_start` may count from any origin.

        Ends at the first absent block; if that is the very first, raises NotFound. Close it.
        """
        wanted = part or whole_blocks(layout, 0, 1)
        return get_blocks(self._link, keys, layout, wanted, self._salt, self._arrival, deadline_s=deadline_s)

    @asynccontextmanager
    async def borrow(self, keys: Sequence[bytes], *, deadline_s: float) -> AsyncIterator[list[Lent]]:
        """The leading blocks that are present, in place. What was read counts only if the context ends without error.

        Raises Incompatible if the store is on another host, DeadlineExceeded if the loan lasted too long.
        """
        requests: asyncio.Queue[kvstore_pb2.BorrowRequest | None] = asyncio.Queue()
        requests.put_nowait(kvstore_pb2.BorrowRequest(keys=keys, tenant_salt=self._salt))
        async with self._peer.stream(self._stub.Borrow, _until_none(requests), deadline_s=deadline_s) as responses:
            loan = await _next_of(responses)
            memory = await self._segments.memory(loan.segment)
            yield [_lent(block, memory) for block in loan.blocks]
            requests.put_nowait(None)
            await _next_of(responses)

    async def read(self, lent: Lent) -> memoryview:
        """Runs `lent.cells()` off the event loop; over a throttled link, returns when it would have arrived."""
        cells = await asyncio.to_thread(lent.cells)
        await self._arrival(lent.stored.nbytes)
        return cells

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[AsyncIterator[kvstore_pb2.WatchResponse]]:
        """A snapshot, then changes; see kvstore.proto. Leaving the context ends the watch."""
        request = kvstore_pb2.WatchRequest()
        async with self._peer.stream(self._stub.Watch, request, deadline_s=LONG_LIVED_S) as responses:
            yield responses

    async def _arrival(self, num_bytes: int) -> None:
        clock = self._link.clock
        await clock.sleep(max(0.0, self._inbound.arrival_s(num_bytes, clock.time()) - clock.time()))


_TIERS: dict[int, TierName] = {kvstore_pb2.DRAM: "dram", kvstore_pb2.DISK: "disk", kvstore_pb2.COLD: "cold"}


def _lent(block: kvstore_pb2.LentBlock, memory: memoryview) -> Lent:
    message = block.layout
    layout = layout_from(message)
    if block.offset + block.num_bytes > memory.nbytes:
        raise InvalidRequest("a lent block lies outside the store's memory")
    return Lent(
        memory[block.offset : block.offset + block.num_bytes], block.digest, EntryCodec.parse(block.codec), layout
    )


async def _until_none(
    requests: asyncio.Queue[kvstore_pb2.BorrowRequest | None],
) -> AsyncIterator[kvstore_pb2.BorrowRequest]:
    while (request := await requests.get()) is not None:
        yield request


async def _next_of(
    responses: AsyncIterator[kvstore_pb2.BorrowResponse],
) -> kvstore_pb2.BorrowResponse:
    try:
        return await anext(responses)
    except StopAsyncIteration:
        raise Unavailable("the store ended the loan") from None
