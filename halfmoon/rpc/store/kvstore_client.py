"""The KV store's client in workers and gateways: puts and gets blocks, reading them in place on the store's host.

Every method's `deadline_s` bounds the call. Absent, damaged and unreachable blocks raise NotFound, DataLoss and
Unavailable. For a caller that can compute the block, each of these is a miss.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from copy import copy
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal, NamedTuple

import xxhash

from halfmoon.errors import DataLoss, InvalidRequest, Unavailable
from halfmoon.kv.codec import Codec
from halfmoon.kv.entry_codec import EntryCodec
from halfmoon.kv.frame import KVRange
from halfmoon.kv.kv_layout import KVBytes, KVLayout
from halfmoon.kv.owner import SHARED, KVOwner
from halfmoon.pb import kvstore_pb2, kvstore_pb2_grpc
from halfmoon.rpc.credentials.credential import Credential
from halfmoon.rpc.credentials.roles import ClusterRole
from halfmoon.rpc.layout_message import layout_from, layout_message
from halfmoon.rpc.peer import LONG_LIVED_S, Peer
from halfmoon.rpc.store.block_reads import BlockGet, InboundSpeed, block_get
from halfmoon.rpc.store.block_streams import layer_parts, put_blocks, whole_blocks
from halfmoon.rpc.store.chain import Chain, Stored
from halfmoon.rpc.store.outbox import Outbox
from halfmoon.rpc.transport.limiter import LinkLimiter
from halfmoon.rpc.transport.link import KVLink, LinkSettings
from halfmoon.rpc.transport.mapped import MappedSegments

TierName = Literal["dram", "disk", "cold"]


@dataclass(frozen=True, slots=True)
class Lent:
    """One block in the store's memory, valid for the duration of the loan."""

    stored: memoryview  # read-only, in the store's mapping
    digest: int
    codec: EntryCodec
    layout: KVLayout

    def cells(self) -> memoryview:
        """Decodes the block to canonical order; for a raw block, returns a view of the store's memory.

        Raises DataLoss if the bytes are not those that were stored.
        """
        if xxhash.xxh3_64_intdigest(self.stored) != self.digest:
            raise DataLoss("a lent block's digest does not match its bytes")
        return self.codec.decode(self.stored, self.layout)


class LookUp(NamedTuple):
    """What a holder has of a list of keys."""

    tiers: dict[int, TierName]  # by place in the list
    room_idle_s: float  # how long the block was not used that would make room for another; inf: there is room
    most_by_layer: int  # blocks that it holds for one reader, who gets their layers apart; 0: none


class KVStoreClient:
    """Owns the channels to one store, its mapped memory, and the shared memory that the store takes blocks from.

    Close it after use.
    """

    def __init__(
        self,
        address: str,
        tenant_salt: bytes = b"",
        link_settings: LinkSettings | None = None,
        credential: Credential | None = None,
        server_role: ClusterRole = "store",
    ) -> None:
        """`tenant_salt` limits the client to blocks stored under the same salt."""
        self._peer = Peer(address, credential, server_role)
        self._link = KVLink(Peer(address, credential, server_role), link_settings)  # bulk bytes do not delay control
        self._stub = kvstore_pb2_grpc.KVStoreStub(self._peer.channel)
        self._salt = tenant_salt
        settings = self._link.settings
        self._inbound = LinkLimiter(settings.bytes_per_s, settings.delay_s)  # the inbound direction of a throttled link
        self.inbound = InboundSpeed()
        self._segments = MappedSegments()
        self._outbox = Outbox(self._peer, self._link)

    def of_tenant(self, salt: bytes) -> KVStoreClient:
        """Returns a client of the same store for another tenant, on the same channels. It must not be closed."""
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
        """Returns the fastest tier that has the block, for each of the leading keys that are present."""
        request = kvstore_pb2.MatchRequest(keys=keys, tenant_salt=self._salt)
        tiers = (await self._matched(request, deadline_s)).tiers
        return [tiers[place] for place in takewhile(tiers.__contains__, range(len(keys)))]

    async def find(self, keys: Sequence[bytes], *, deadline_s: float) -> dict[int, TierName]:
        """Returns the fastest tier of each key that is present, by its place in `keys`, also behind gaps."""
        return (await self.look_up(keys, deadline_s=deadline_s)).tiers

    async def look_up(self, keys: Sequence[bytes], *, deadline_s: float, with_room: bool = False) -> LookUp:
        """Does what `find` does; `with_room` for a caller that is about to put blocks somewhere."""
        request = kvstore_pb2.MatchRequest(
            keys=keys, tenant_salt=self._salt, beyond_gaps=True, with_room=with_room
        )  # fmt: skip
        return await self._matched(request, deadline_s)

    async def prefetch(self, keys: Sequence[bytes], *, deadline_s: float) -> int:
        """Brings leading blocks into the store's DRAM; returns how many are there or on their way."""
        request = kvstore_pb2.PrefetchRequest(keys=keys, tenant_salt=self._salt)
        return int((await self._peer.call(self._stub.Prefetch, request, deadline_s=deadline_s)).num_coming)

    async def replicate(
        self, source: str, keys: Sequence[bytes], layout: KVLayout, owner: KVOwner = SHARED, *, deadline_s: float
    ) -> int:
        """Makes this store copy a prompt's blocks from `source` in the background; returns how many it lacks.

        Raises NoCapacity if it already has enough to copy.
        """
        request = kvstore_pb2.ReplicateRequest(
            source=source, keys=keys, tenant_salt=self._salt, layout=layout_message(layout),
            tenant=owner.tenant, tenant_quota_bytes=owner.quota_bytes,
        )  # fmt: skip
        return int((await self._peer.call(self._stub.Replicate, request, deadline_s=deadline_s)).num_coming)

    async def stats(self, *, deadline_s: float) -> kvstore_pb2.StatsResponse:
        """Returns the store's statistics."""
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
        """Stores successive blocks of a prompt, as raw bytes in canonical order.

        On return at least the first block is stored and visible. Otherwise raises NoCapacity, DataLoss, Incompatible or
        Unavailable.
        """
        place = chain or Chain()
        stored = await self._outbox.put(keys, layout, cells, place, self._salt, deadline_s=deadline_s)
        if stored is not None:
            return stored
        return await put_blocks(self._link, keys, layout, cells, place, self._salt, deadline_s=deadline_s)

    async def get(self, key: bytes, layout: KVLayout, part: KVRange | None = None, *, deadline_s: float) -> memoryview:
        """Returns one block, or a part of it; see `get_run`. Raises NotFound, DataLoss, Incompatible or Unavailable."""
        async with aclosing(self.get_run([key], layout, part, deadline_s=deadline_s)) as blocks:
            async for cells in blocks:
                return cells
        raise DataLoss("the store sent only a part of the block")

    async def get_run(
        self,
        keys: Sequence[bytes],
        layout: KVLayout,
        part: KVRange | None = None,
        codec: Codec = Codec.RAW,
        *,
        deadline_s: float,
    ) -> AsyncGenerator[memoryview, None]:
        """Yields blocks, or a part of each, as raw bytes in canonical order; `token_start` may count from any origin.

        `codec`: a lossless one that the store may send them in.
        Ends at the first absent block, and raises NotFound if that is the very first. Close the iterator.
        """
        opened = kvstore_pb2.BlocksOpen(keys=keys, tenant_salt=self._salt, codec=codec)
        wanted = part or whole_blocks(layout, 0, 1)
        async with self._got(opened, layout, wanted, deadline_s) as get:
            for index in range(len(keys)):
                cells = await get.next(wanted.moved(index * layout.block_tokens))
                if cells is None:
                    return
                yield cells

    async def get_layers(
        self,
        keys: Sequence[bytes],
        layout: KVLayout,
        layers_at_once: int,
        codec: Codec = Codec.RAW,
        *,
        request_id: str = "",
        first_block: int = 0,
        deadline_s: float,
    ) -> AsyncGenerator[tuple[range, list[memoryview]], None]:
        """Yields so many layers at once of the leading blocks that a worker holds for this reader, maybe not all.

        request_id: of a shared prompt, whose blocks from `first_block` on come as the worker computes them.
        Raises as `get_run`. Close the iterator.
        """
        opened = kvstore_pb2.BlocksOpen(
            keys=keys, tenant_salt=self._salt, codec=codec, layers_at_once=layers_at_once, request_id=request_id
        )  # fmt: skip
        whole = whole_blocks(layout, first_block * layout.block_tokens, 1)
        async with self._got(opened, layout, whole, deadline_s) as get:
            num_served = await get.num_served(len(keys))
            for part in layer_parts(whole, layers_at_once):
                blocks = [await get.next(part.moved(index * layout.block_tokens)) for index in range(num_served)]
                cells = [block for block in blocks if block is not None]
                if len(cells) < num_served:
                    raise DataLoss("a holder sent fewer blocks than it had said")
                yield range(part.layer_start, part.layer_end), cells

    def _got(
        self, opened: kvstore_pb2.BlocksOpen, layout: KVLayout, wanted: KVRange, deadline_s: float
    ) -> AbstractAsyncContextManager[BlockGet]:
        inbound = InboundSpeed() if opened.request_id else self.inbound  # the link's speed leaves computing out
        return block_get(self._link, opened, layout, wanted, self._arrival, inbound, deadline_s=deadline_s)

    @asynccontextmanager
    async def borrow(self, keys: Sequence[bytes], *, deadline_s: float) -> AsyncIterator[list[Lent]]:
        """Yields the leading blocks that are present, in place. Reads are valid only if the context exits cleanly.

        Raises Incompatible if the store is on another host, and DeadlineExceeded if the loan lasted too long.
        """
        requests: asyncio.Queue[kvstore_pb2.BorrowRequest | None] = asyncio.Queue()
        requests.put_nowait(kvstore_pb2.BorrowRequest(keys=keys, tenant_salt=self._salt))
        async with self._peer.stream(self._stub.Borrow, _until_none(requests), deadline_s=deadline_s) as responses:
            try:
                loan = await _next_of(responses)
                memory = await self._segments.memory(loan.segment)
                yield [_lent(block, memory) for block in loan.blocks]
            finally:
                requests.put_nowait(None)
            await _next_of(responses)

    async def read(self, lent: Lent) -> memoryview:
        """Runs `lent.cells()` off the event loop; over a throttled link, returns when it would have arrived."""
        cells = await asyncio.to_thread(lent.cells)
        await self._arrival(lent.stored.nbytes)
        return cells

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[AsyncIterator[kvstore_pb2.WatchResponse]]:
        """Yields a stream of a snapshot, then changes; see kvstore.proto. Leaving the context ends the watch."""
        request = kvstore_pb2.WatchRequest()
        async with self._peer.stream(self._stub.Watch, request, deadline_s=LONG_LIVED_S) as responses:
            yield responses

    async def _matched(self, request: kvstore_pb2.MatchRequest, deadline_s: float) -> LookUp:
        """Asks for keys. Raises DataLoss for an answer that is none: what a holder says is not trusted."""
        response = await self._peer.call(self._stub.Match, request, deadline_s=deadline_s)
        places = response.places or range(len(response.tiers))  # some holders know leading blocks only
        if len(places) != len(response.tiers) or any(place >= len(request.keys) for place in places):
            raise DataLoss("an answer names other blocks than it was asked for")
        if not _TIERS.keys() >= set(response.tiers):
            raise DataLoss("an answer names a tier that is not known here")
        tiers = {place: _TIERS[tier] for place, tier in zip(places, response.tiers, strict=True)}
        return LookUp(tiers, response.room_idle_s, response.most_by_layer)

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
