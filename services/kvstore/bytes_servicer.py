"""Block bytes on the wire: raw frames on halfmoon.KVStoreBytes/{Put,Get}. kvstore.proto states both exchanges.

A Put's OPEN body names the blocks' layout, so one store serves workers of any model. The frames that follow must carry
that layout's fingerprint.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace

import grpc

from halfmoon.catalog.block_identity import block_id
from halfmoon.errors import HalfmoonError, Incompatible, InvalidRequest, Unavailable
from halfmoon.kv.codec import LOSSLESS, Codec
from halfmoon.kv.entry_codec import EntryCodec
from halfmoon.kv.frame import MAX_PAYLOAD_BYTES, Frame, FrameKind, decode_frame, encode_frame
from halfmoon.kv.kv_layout import KVLayout
from halfmoon.kv.owner import KVOwner
from halfmoon.kv.receiver import Commit, Effect, Reserve, Write
from halfmoon.pb import kvstore_pb2
from halfmoon.rpc.store.block_streams import (
    BYTES_SERVICE,
    block_frames,
    opened_run,
    requested_codec,
    whole_blocks,
)
from halfmoon.rpc.transfer import KVIntake, next_message, parse_body, raw_service
from services.kvstore.movement.incoming import Arrivals, Run, run_metas
from services.kvstore.pool import Loan, Pool
from services.kvstore.tiers.dram import Draft
from services.kvstore.wire import named_layout


class KVBytesServicer:
    """Translates between frames and a `Pool`."""

    def __init__(self, pool: Pool, arrivals: Arrivals, intake: KVIntake, lease_s: float) -> None:
        self._pool = pool
        self._arrivals = arrivals
        self._intake = intake
        self._lease_s = lease_s

    def registration(self) -> Callable[[grpc.aio.Server], None]:
        """Registration of the methods at a server."""
        return raw_service(BYTES_SERVICE, {"Put": self.put, "Get": self.get})

    async def put(self, messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        """Receives a run of blocks. Whatever ends the stream before COMMIT frees their room."""
        first = await self._first(messages)
        opened = opened_run(decode_frame(first))
        layout = named_layout(opened.layout)
        async with AsyncExitStack() as stack:
            reception = _Reception(self._pool, self._arrivals, stack, layout)
            answers = self._intake.receive(_from(first, messages), layout, reception.act, self._lease_s)
            async with aclosing(answers):
                async for answer in answers:
                    yield answer
            if not reception.is_committed:
                raise Unavailable("the sender ended the stream before its COMMIT")

    async def get(self, messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        """Sends blocks: for each the DATA frames that cover the OPEN's range, then DONE."""
        request = decode_frame(await self._first(messages))
        opened = opened_run(request)
        codec = requested_codec(opened)
        blocks = [block_id(key, opened.tenant_salt) for key in opened.keys]
        if not blocks:
            raise InvalidRequest("a Get must name the blocks that it wants", param="keys")
        if opened.layers_at_once:
            raise InvalidRequest("a store sends each block with all its layers", param="layers_at_once")
        num_sent = 0  # frames
        for index, block in enumerate(blocks):
            try:
                loan = await self._pool.acquire(block)
            except HalfmoonError:
                if num_sent:
                    break
                raise
            try:
                async for frame in _data(loan, request, index, num_sent, codec):
                    yield encode_frame(frame)
                    num_sent += 1
            finally:
                self._pool.give_back(loan)
        yield encode_frame(Frame(FrameKind.DONE, request.transfer_id, request.layout_fingerprint, num_sent))

    async def _first(self, messages: AsyncIterator[bytes]) -> bytes:
        message = await next_message(messages, self._lease_s)
        if message is None:
            raise Unavailable("the sender ended the stream before its OPEN")
        return message


class _Reception:
    """Owns the drafts of an arriving run; the given stack ends them."""

    def __init__(self, pool: Pool, arrivals: Arrivals, stack: AsyncExitStack, layout: KVLayout) -> None:
        self._pool = pool
        self._arrivals = arrivals
        self._stack = stack
        self._layout = layout
        self._drafts: Sequence[Draft] = ()
        self._token_start = 0
        self.is_committed = False

    async def act(self, effect: Effect) -> None:
        """Carries out an effect of the receiver."""
        if isinstance(effect, Reserve):
            await self._reserve(effect)
        elif isinstance(effect, Write):
            self._write(effect)
        elif isinstance(effect, Commit):
            for draft in self._drafts:
                await self._pool.commit(draft)
            self.is_committed = True

    def _write(self, effect: Write) -> None:
        if (effect.codec, effect.dtype) != (Codec.RAW, self._layout.dtype):
            raise Incompatible("a stored block is raw and of its layout's dtype")
        index, start = divmod(effect.range.token_start - self._token_start, self._layout.block_tokens)
        if start + effect.range.num_tokens > self._layout.block_tokens:
            raise InvalidRequest("a DATA frame of a Put must lie within one block")
        self._drafts[index].write(replace(effect.range, token_start=start), effect.payload)

    async def _reserve(self, effect: Reserve) -> None:
        opened = parse_body(kvstore_pb2.BlocksOpen, effect.body)
        block_tokens = self._layout.block_tokens
        self._token_start = effect.range.token_start
        if effect.range != whole_blocks(self._layout, self._token_start, len(opened.keys)):
            raise InvalidRequest(f"stored blocks are whole: all layers, heads and tokens, not {effect.range}")
        owner = KVOwner(opened.tenant, opened.tenant_quota_bytes)
        metas = run_metas(
            opened.keys, opened.parent, self._token_start // block_tokens, opened.tenant_salt, self._layout,
            opened.recompute_s, owner,
        )  # fmt: skip
        run = Run(metas, owner)
        arrival = await self._stack.enter_async_context(self._arrivals.expecting(run))
        arrival.check_whole()
        self._drafts = arrival.drafts


async def _data(loan: Loan, request: Frame, index: int, num_sent: int, codec: Codec) -> AsyncIterator[Frame]:
    """Yields the frames of a Get's `index`th block, numbered after the first `num_sent` frames.

    A block that is kept in `codec` goes as it is, if it fits one frame.
    """
    layout, wanted = loan.record.meta.layout, request.range
    assert layout is not None
    if request.layout_fingerprint != layout.fingerprint():
        raise Incompatible("the stored block has another KV layout than its reader")
    whole_range = whole_blocks(layout, wanted.token_start, 1)
    wanted.check_within(whole_range)
    payload = memoryview(loan.record.payload).cast("B")
    is_kept_so = codec in LOSSLESS and loan.record.codec == EntryCodec(lossless=LOSSLESS[codec])
    if is_kept_so and wanted == whole_range and payload.nbytes < layout.block_bytes <= MAX_PAYLOAD_BYTES:
        place = wanted.moved(index * layout.block_tokens)
        yield Frame(FrameKind.DATA, request.transfer_id, request.layout_fingerprint, num_sent, place, codec, payload)
        return
    whole = loan.cells() if loan.record.codec.is_plain else await asyncio.to_thread(loan.cells)
    async for frame in block_frames(whole, layout, request, index, num_sent, codec=codec):
        yield frame


async def _from(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for message in rest:
        yield message
