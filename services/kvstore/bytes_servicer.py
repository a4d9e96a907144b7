"""Block bytes on the wire: raw frames on halfmoon.KVStoreBytes/{Put,Get}. kvstore.proto states both exchanges.

A Put's OPEN body names the block's layout, so one store serves workers of any model; the frames that follow must
carry that layout's fingerprint.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace

import grpc

from halfmoon.errors import Incompatible, InvalidRequest, Unavailable
from halfmoon.kv.codec import Codec
from halfmoon.kv.frame import Frame, FrameKind, KVRange, decode_frame, encode_frame, plan_frames
from halfmoon.kv.layout import KVLayout, Shard
from halfmoon.kv.negotiation import decode_open
from halfmoon.kv.receiver import Commit, Effect, Reserve, Write
from halfmoon.pb import kvstore_pb2
from halfmoon.rpc.transfer import KVIntake, next_message, parse_body, raw_service
from services.kvstore.dram import Draft, cells
from services.kvstore.identity import BlockMeta, block_id
from services.kvstore.pool import Loan, Pool
from services.kvstore.wire import named_layout

BYTES_SERVICE = "halfmoon.KVStoreBytes"


class KVBytesServicer:
    """Translates between frames and a `Pool`."""

    def __init__(self, pool: Pool, intake: KVIntake, lease_s: float) -> None:
        self._pool = pool
        self._intake = intake
        self._lease_s = lease_s

    def registration(self) -> Callable[[grpc.aio.Server], None]:
        """What adds the methods to a server."""
        return raw_service(BYTES_SERVICE, {"Put": self.put, "Get": self.get})

    async def put(self, messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        """One block in. Whatever ends the stream before COMMIT frees the block's room."""
        first = await self._first(messages)
        layout = named_layout(_opened(decode_frame(first)).layout)
        reception = _Reception(self._pool, layout)
        try:
            answers = self._intake.receive(_from(first, messages), layout, reception.act, self._lease_s)
            async with aclosing(answers):
                async for answer in answers:
                    yield answer
            if not reception.is_committed:
                raise Unavailable("the sender ended the stream before its COMMIT")
        finally:
            reception.close()

    async def get(self, messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        """One block out: DATA frames that cover the range of the OPEN, then DONE."""
        request = decode_frame(await self._first(messages))
        opened = _opened(request)
        loan = await self._pool.acquire(block_id(opened.key, opened.tenant_salt))
        try:
            async for frame in _data(loan, request):
                yield encode_frame(frame)
        finally:
            self._pool.give_back(loan)

    async def _first(self, messages: AsyncIterator[bytes]) -> bytes:
        message = await next_message(messages, self._lease_s)
        if message is None:
            raise Unavailable("the sender ended the stream before its OPEN")
        return message


class _Reception:
    """Owns one incoming block's draft until it is committed."""

    def __init__(self, pool: Pool, layout: KVLayout) -> None:
        self._pool = pool
        self._layout = layout
        self._draft: Draft | None = None
        self._token_start = 0
        self.is_committed = False

    async def act(self, effect: Effect) -> None:
        """Does what the receiver's machine says."""
        if isinstance(effect, Reserve):
            self._reserve(effect)
            return
        assert self._draft is not None, "the receiver lets nothing but OPEN come first"
        if isinstance(effect, Write):
            if (effect.codec, effect.dtype) != (Codec.RAW, self._layout.dtype):
                raise Incompatible("a stored block is raw and of its layout's dtype")
            part = replace(effect.range, token_start=effect.range.token_start - self._token_start)
            self._draft.write(part, effect.payload)
        elif isinstance(effect, Commit):
            await self._pool.commit(self._draft)
            self.is_committed = True

    def close(self) -> None:
        """Frees the draft if it was not committed."""
        if self._draft is not None:
            self._pool.discard(self._draft)

    def _reserve(self, effect: Reserve) -> None:
        if effect.range != _whole_block(self._layout, effect.range.token_start):
            raise InvalidRequest(f"a stored block is whole: all layers, heads and tokens, not {effect.range}")
        self._token_start = effect.range.token_start
        opened = parse_body(kvstore_pb2.BlockOpen, effect.body)
        parent = block_id(opened.parent, opened.tenant_salt) if opened.parent else None
        block = block_id(opened.key, opened.tenant_salt)
        if block == parent:
            raise InvalidRequest("a block cannot come before itself", param="parent")
        if not (opened.recompute_s >= 0 and opened.ttl_s >= 0):
            raise InvalidRequest("times cannot be negative", param="ttl_s")
        depth = self._token_start // self._layout.block_tokens
        meta = BlockMeta(block, parent, depth, self._layout, opened.recompute_s)
        self._draft = self._pool.reserve(meta, opened.ttl_s)


async def _data(loan: Loan, request: Frame) -> AsyncIterator[Frame]:
    """The frames that answer a Get's OPEN."""
    layout, wanted = loan.record.meta.layout, request.range
    assert layout is not None
    if request.layout_fingerprint != layout.fingerprint():
        raise Incompatible("the stored block has another KV layout than its reader")
    wanted.check_within(_whole_block(layout, wanted.token_start))
    whole = loan.cells() if loan.record.codec.is_plain else await asyncio.to_thread(loan.cells)
    shard = Shard(wanted.layer_start, wanted.layer_end, wanted.head_start, wanted.head_end)
    sequence = 0
    for part in plan_frames(layout, shard, wanted.token_start, wanted.num_tokens):
        payload = cells(whole, layout, replace(part, token_start=part.token_start - wanted.token_start)).tobytes()
        yield Frame(FrameKind.DATA, request.transfer_id, request.layout_fingerprint, sequence, part, payload=payload)
        sequence += 1
    yield Frame(FrameKind.DONE, request.transfer_id, request.layout_fingerprint, sequence)


async def _from(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for message in rest:
        yield message


def _whole_block(layout: KVLayout, token_start: int) -> KVRange:
    return KVRange(0, layout.num_layers, 0, layout.num_kv_heads, token_start, layout.block_tokens)


def _opened(frame: Frame) -> kvstore_pb2.BlockOpen:
    if frame.kind is not FrameKind.OPEN:
        raise InvalidRequest(f"the first frame must be OPEN, not {frame.kind.name}")
    _, body = decode_open(frame.payload)
    return parse_body(kvstore_pb2.BlockOpen, body)
