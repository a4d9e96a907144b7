"""A worker's or gateway's end of the pool: blocks in and out, read where they lie on the store's own host.

Every method's `deadline_s` bounds the call. Absent, damaged and unreachable blocks raise NotFound, DataLoss and
Unavailable: for a caller that can compute a block, each of them is a miss.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from copy import copy
from dataclasses import dataclass, replace
from typing import Literal

import grpc
import numpy as np
import xxhash

from halfmoon.errors import DataLoss, Incompatible, InvalidRequest, Unavailable
from halfmoon.kv.entry_codec import EntryCodec
from halfmoon.kv.frame import Frame, FrameKind, KVRange, decode_frame, encode_frame, plan_frames
from halfmoon.kv.layout import KVBytes, KVLayout
from halfmoon.kv.negotiation import encode_open
from halfmoon.kv.receiver import Coverage
from halfmoon.pb import kvstore_pb2, kvstore_pb2_grpc
from halfmoon.rpc.layout_message import layout_from, layout_message
from halfmoon.rpc.peer import LONG_LIVED_S, Peer
from halfmoon.rpc.status import in_our_tree
from halfmoon.rpc.transfer import transfer_to
from halfmoon.rpc.transport.limiter import LinkLimiter
from halfmoon.rpc.transport.link import KVLink, LinkSettings
from halfmoon.rpc.transport.memfd import host_id, receive_segment

_PUT, _GET = "/halfmoon.KVStoreBytes/Put", "/halfmoon.KVStoreBytes/Get"
_TRANSFER_ID = bytes(16)  # a Get's stream carries one transfer

TierName = Literal["dram", "disk", "cold"]


@dataclass(frozen=True, slots=True)
class Chain:
    """Where a block stands in its prompt, and what computing it took."""

    parent: bytes = b""  # key of the block before it; empty: there is none
    depth: int = 0  # blocks before it
    recompute_s: float = 0.0  # 0: unknown
    ttl_s: float = 0.0  # 0: the store's own


@dataclass(frozen=True, slots=True)
class Lent:
    """One block in the store's memory, as long as the loan lasts."""

    stored: memoryview  # read-only, in the store's mapping
    digest: int
    codec: EntryCodec
    layout: KVLayout

    def cells(self) -> memoryview:
        """The raw block in canonical order; of a plain block a view of the store's memory.

        Raises DataLoss if the bytes are not those that were stored.
        """
        if xxhash.xxh3_64_intdigest(self.stored) != self.digest:
            raise DataLoss("a lent block's digest does not match its bytes")
        return self.codec.decode(self.stored, self.layout)


class KVStoreClient:
    """Owns a channel to one store, and its mapped memory. Close it."""

    def __init__(self, address: str, tenant_salt: bytes = b"", link_settings: LinkSettings | None = None) -> None:
        """tenant_salt: only blocks stored under the same salt are seen."""
        self._peer = Peer(address)
        self._link = KVLink(Peer(address), link_settings)  # bulk bytes do not delay control
        self._stub = kvstore_pb2_grpc.KVStoreStub(self._peer.channel)
        self._salt = tenant_salt
        settings = self._link.settings
        self._inbound = LinkLimiter(settings.bytes_per_s, settings.delay_s)  # its own direction of a slower link
        self._segments: dict[str, tuple[memoryview, socket.socket]] = {}
        self._mapping: dict[str, asyncio.Task[None]] = {}

    def of_tenant(self, salt: bytes) -> KVStoreClient:
        """The same store to another tenant, on the same channels. Not to be closed."""
        view = copy(self)
        view._salt = salt
        return view

    async def close(self) -> None:
        """Closes the channels and lets go of the store's memory."""
        await asyncio.gather(*self._mapping.values(), return_exceptions=True)
        for name in list(self._segments):
            self._leave(name)
        await self._link.close()
        await self._peer.close()

    async def match(self, keys: Sequence[bytes], *, deadline_s: float) -> list[TierName]:
        """Of the leading keys that are there the fastest tier that has each."""
        request = kvstore_pb2.MatchRequest(keys=keys, tenant_salt=self._salt)
        response = await self._peer.call(self._stub.Match, request, deadline_s=deadline_s)
        return [_TIERS[tier] for tier in response.tiers]

    async def prefetch(self, keys: Sequence[bytes], *, deadline_s: float) -> int:
        """Has leading blocks brought to the store's DRAM; gives how many are there or will come."""
        request = kvstore_pb2.PrefetchRequest(keys=keys, tenant_salt=self._salt)
        return int((await self._peer.call(self._stub.Prefetch, request, deadline_s=deadline_s)).num_coming)

    async def replicate(self, source: str, keys: Sequence[bytes], layout: KVLayout, *, deadline_s: float) -> int:
        """Has this store copy a prompt's blocks from the store at `source`, behind the call; gives how many it lacks.

        Raises NoCapacity if it has enough to copy.
        """
        request = kvstore_pb2.ReplicateRequest(
            source=source, keys=keys, tenant_salt=self._salt, layout=layout_message(layout)
        )
        return int((await self._peer.call(self._stub.Replicate, request, deadline_s=deadline_s)).num_coming)

    async def delete(self, keys: Sequence[bytes], *, deadline_s: float) -> int:
        """Forgets blocks and those that follow them; gives how many."""
        request = kvstore_pb2.DeleteRequest(keys=keys, tenant_salt=self._salt)
        return int((await self._peer.call(self._stub.Delete, request, deadline_s=deadline_s)).num_deleted)

    async def stats(self, *, deadline_s: float) -> kvstore_pb2.StatsResponse:
        """The store's figures."""
        response = await self._peer.call(self._stub.Stats, kvstore_pb2.StatsRequest(), deadline_s=deadline_s)
        assert isinstance(response, kvstore_pb2.StatsResponse)
        return response

    async def put(
        self, key: bytes, layout: KVLayout, cells: KVBytes, chain: Chain | None = None, *, deadline_s: float
    ) -> None:
        """Stores one whole block: raw bytes in canonical order. Returns when it is visible.

        Raises NotFound if the block before it is not there, NoCapacity, Incompatible or Unavailable.
        """
        place = chain or Chain()
        view = np.frombuffer(cells, np.uint8).reshape(_row_shape(layout))
        whole = _whole_block(layout, place.depth * layout.block_tokens)
        body = kvstore_pb2.BlockOpen(
            key=key, layout=layout_message(layout), tenant_salt=self._salt, parent=place.parent,
            recompute_s=place.recompute_s, ttl_s=place.ttl_s,
        )  # fmt: skip
        async with transfer_to(self._link, layout, deadline_s=deadline_s, method=_PUT) as sender:
            await sender.open(whole, body.SerializeToString())
            for part in plan_frames(layout, layout.whole(), whole.token_start, whole.num_tokens):
                buffer = await sender.buffer(part.num_bytes(layout))
                source = view[_slices(replace(part, token_start=part.token_start - whole.token_start))]
                np.copyto(np.frombuffer(buffer.view, np.uint8).reshape(source.shape), source)
                await sender.data(part, buffer)
            await sender.commit(b"")

    async def get(self, key: bytes, layout: KVLayout, part: KVRange | None = None, *, deadline_s: float) -> memoryview:
        """One block's raw bytes in canonical order, or a part of it, `token_start` counting from where you like."""
        wanted = part or _whole_block(layout, 0)
        out = np.empty((*wanted.shape(layout)[:-1], layout.head_dim * layout.item_bytes), np.uint8)
        body = kvstore_pb2.BlockOpen(key=key, tenant_salt=self._salt).SerializeToString()
        opening = Frame(
            FrameKind.OPEN, _TRANSFER_ID, layout.fingerprint(), 0, wanted, payload=encode_open((), body)
        )  # fmt: skip
        call = self._link.peer.raw_stream(_GET, deadline_s=deadline_s)
        coverage = Coverage(wanted)
        try:
            with in_our_tree(self._peer.address):
                await _send(call, encode_frame(opening))
                async for message in call:
                    frame = decode_frame(message)
                    if frame.kind is FrameKind.DONE:
                        break
                    coverage.add(frame.range)
                    into = out[_slices(_from_start(frame.range, wanted))]
                    np.copyto(into, np.frombuffer(frame.payload, np.uint8).reshape(into.shape))
                    await self._arrival(into.nbytes)
        finally:
            call.cancel()
        if not coverage.is_whole():
            raise DataLoss("the store sent only a part of the block")
        return memoryview(out.reshape(-1).data)

    @asynccontextmanager
    async def borrow(self, keys: Sequence[bytes], *, deadline_s: float) -> AsyncIterator[list[Lent]]:
        """The leading blocks that are there, where they lie. What was read counts only if the block ends without error.

        Raises Incompatible if the store is on another host, DeadlineExceeded if the loan lasted too long.
        """
        requests: asyncio.Queue[kvstore_pb2.BorrowRequest | None] = asyncio.Queue()
        requests.put_nowait(kvstore_pb2.BorrowRequest(keys=keys, tenant_salt=self._salt))
        async with self._peer.stream(self._stub.Borrow, _until_none(requests), deadline_s=deadline_s) as responses:
            loan = await _next_of(responses)
            memory = await self._memory(loan.segment)
            yield [_lent(block, memory) for block in loan.blocks]
            requests.put_nowait(None)
            await _next_of(responses)

    async def read(self, lent: Lent) -> memoryview:
        """`lent.cells()` beside the event loop; over a link made slow on purpose, when it would have arrived."""
        cells = await asyncio.to_thread(lent.cells)
        await self._arrival(lent.stored.nbytes)
        return cells

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[AsyncIterator[kvstore_pb2.WatchResponse]]:
        """A snapshot, then what changes; see kvstore.proto. Leaving the block ends it."""
        request = kvstore_pb2.WatchRequest()
        async with self._peer.stream(self._stub.Watch, request, deadline_s=LONG_LIVED_S) as responses:
            yield responses

    async def _arrival(self, num_bytes: int) -> None:
        clock = self._link.clock
        await clock.sleep(max(0.0, self._inbound.arrival_s(num_bytes, clock.time()) - clock.time()))

    async def _memory(self, segment: str) -> memoryview:
        host, _, name = segment.partition("/")
        if name not in self._segments:
            if host != host_id():
                raise Incompatible("the store is on another host or in another network namespace")
            if name not in self._mapping:
                self._mapping[name] = asyncio.create_task(self._map(name))
            await asyncio.shield(self._mapping[name])  # whoever else waits wants it still, and nobody could close it
        if name not in self._segments:
            raise Unavailable("the store has gone")
        return self._segments[name][0]

    async def _map(self, name: str) -> None:
        try:
            mapped = await asyncio.to_thread(receive_segment, name)
            self._segments[name] = mapped
            asyncio.get_running_loop().add_reader(mapped[1], self._leave, name)
        finally:
            del self._mapping[name]

    def _leave(self, name: str) -> None:
        _, connection = self._segments.pop(name)
        asyncio.get_running_loop().remove_reader(connection)
        connection.close()


_TIERS: dict[int, TierName] = {kvstore_pb2.DRAM: "dram", kvstore_pb2.DISK: "disk", kvstore_pb2.COLD: "cold"}


def _lent(block: kvstore_pb2.LentBlock, memory: memoryview) -> Lent:
    message = block.layout
    layout = layout_from(message)
    if block.offset + block.num_bytes > memory.nbytes:
        raise InvalidRequest("a lent block lies outside the store's memory")
    return Lent(
        memory[block.offset : block.offset + block.num_bytes], block.digest, EntryCodec.parse(block.codec), layout
    )


def _whole_block(layout: KVLayout, token_start: int) -> KVRange:
    return KVRange(0, layout.num_layers, 0, layout.num_kv_heads, token_start, layout.block_tokens)


def _row_shape(layout: KVLayout) -> tuple[int, ...]:
    return layout.num_layers, 2, layout.num_kv_heads, layout.block_tokens, layout.head_dim * layout.item_bytes


def _from_start(part: KVRange, whole: KVRange) -> KVRange:
    """`part`, counted from the beginning of `whole` in every direction."""
    return KVRange(
        part.layer_start - whole.layer_start,
        part.layer_end - whole.layer_start,
        part.head_start - whole.head_start,
        part.head_end - whole.head_start,
        part.token_start - whole.token_start,
        part.num_tokens,
    )


def _slices(part: KVRange) -> tuple[slice, ...]:
    return (
        slice(part.layer_start, part.layer_end),
        slice(None),
        slice(part.head_start, part.head_end),
        slice(part.token_start, part.token_start + part.num_tokens),
    )


async def _send(call: grpc.aio.StreamStreamCall, message: bytes) -> None:
    try:
        await call.write(message)
        await call.done_writing()
    except asyncio.InvalidStateError:  # the store refused already: reading says why
        return


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
