"""Block bytes to and from the store as raw frames, many blocks per stream. kvstore.proto defines both exchanges."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import grpc
import numpy as np
from numpy.typing import NDArray

from halfmoon.errors import AlreadyHere, DataLoss, HalfmoonError, InvalidRequest, NoCapacity
from halfmoon.kv.codec import LOSSLESS, Codec, check_size, decodable, decode, encode
from halfmoon.kv.codec.floats import UNSIGNED
from halfmoon.kv.frame import Frame, FrameKind, KVRange, decode_frame, encode_frame, plan_frames
from halfmoon.kv.kv_layout import KVBytes, KVLayout, Shard
from halfmoon.kv.negotiation import decode_open, encode_open
from halfmoon.kv.receiver import Coverage
from halfmoon.pb import kvstore_pb2
from halfmoon.rpc.layout_message import layout_message
from halfmoon.rpc.status import in_our_tree
from halfmoon.rpc.store.chain import Chain, Stored
from halfmoon.rpc.transfer import TransferSender, parse_body, transfer_to
from halfmoon.rpc.transport.estimate import LinkEstimator
from halfmoon.rpc.transport.link import KVLink

BYTES_SERVICE = "halfmoon.KVStoreBytes"
_PUT, _GET = f"/{BYTES_SERVICE}/Put", f"/{BYTES_SERVICE}/Get"
_Block = TypeVar("_Block")
_TRANSFER_ID = bytes(16)  # the stream of a Get carries one transfer


class InboundSpeed:
    """Owns how fast what Gets ask for has come over one link, and how small it was."""

    def __init__(self) -> None:
        self.estimators: defaultdict[Codec, LinkEstimator] = defaultdict(LinkEstimator)  # of raw bytes, by codec
        self.num_bytes: defaultdict[Codec, int] = defaultdict(int)  # that came
        self.num_raw_bytes: defaultdict[Codec, int] = defaultdict(int)  # that they stand for


async def put_blocks(
    link: KVLink,
    keys: Sequence[bytes],
    layout: KVLayout,
    cells: Sequence[KVBytes],
    chain: Chain,
    salt: bytes,
    *,
    deadline_s: float,
) -> Stored:
    """Stores successive blocks of a prompt, or half as many when there is no room for all."""
    body = kvstore_pb2.BlocksOpen(
        keys=keys, layout=layout_message(layout), tenant_salt=salt, parent=chain.parent,
        recompute_s=chain.recompute_s, ttl_s=chain.ttl_s, tenant=chain.owner.tenant,
        tenant_quota_bytes=chain.owner.quota_bytes,
    )  # fmt: skip
    start = chain.depth * layout.block_tokens
    try:
        async with transfer_to(link, layout, deadline_s=deadline_s, method=_PUT) as sender:
            await sender.open(whole_blocks(layout, start, len(keys)), body.SerializeToString())
            for index, block in enumerate(cells):
                await _send_block(sender, layout, start + index * layout.block_tokens, block)
            await sender.commit(b"")
    except AlreadyHere:
        return Stored(1, 0)
    except NoCapacity:
        if len(keys) == 1:
            raise
        fewer = len(keys) // 2
        return await put_blocks(link, keys[:fewer], layout, cells[:fewer], chain, salt, deadline_s=deadline_s)
    return Stored(len(keys), len(keys))


async def get_blocks(
    link: KVLink,
    keys: Sequence[bytes],
    layout: KVLayout,
    wanted: KVRange,
    salt: bytes,
    arrival: Callable[[int], Awaitable[None]],
    inbound: InboundSpeed,
    layers_at_once: int = 0,
    codec: Codec = Codec.RAW,
    *,
    deadline_s: float,
) -> AsyncGenerator[memoryview, None]:
    """Implements `KVStoreClient.get_run`; `arrival(num_bytes)` returns when that many bytes would have arrived."""
    body = kvstore_pb2.BlocksOpen(
        keys=keys, tenant_salt=salt, layers_at_once=layers_at_once, codec=codec
    ).SerializeToString()  # fmt: skip
    left_bytes, clock, estimator = 0, link.clock, inbound.estimators[codec]
    opening = Frame(FrameKind.OPEN, _TRANSFER_ID, layout.fingerprint(), 0, wanted, payload=encode_open((), body))
    call = link.peer.raw_stream(_GET, deadline_s=deadline_s)
    try:
        with in_our_tree(link.peer.address):
            await _send(call, encode_frame(opening))
        left_bytes = len(keys) * wanted.num_bytes(layout)
        estimator.sent(left_bytes, clock.time())
        for index, part in parts_in_order(wanted, layers_at_once, range(len(keys))):
            block = _further(part, index * layout.block_tokens)
            cells = await _next_block(call, link, layout, block, arrival, inbound, codec)
            if cells is None:
                return
            estimator.consumed(cells.nbytes, clock.time())
            left_bytes -= cells.nbytes
            yield cells
    finally:
        call.cancel()
        if left_bytes:
            estimator.lost(left_bytes, clock.time())


def parts_in_order(wanted: KVRange, layers_at_once: int, blocks: Sequence[_Block]) -> Iterator[tuple[_Block, KVRange]]:
    """What a Get sends, in order: each block's part of `wanted`, or so many layers of all blocks before the next."""
    parts = [wanted]
    if layers_at_once:
        firsts = range(wanted.layer_start, wanted.layer_end, layers_at_once)
        ends = [*firsts[1:], wanted.layer_end]
        parts = [replace(wanted, layer_start=first, layer_end=end) for first, end in zip(firsts, ends, strict=False)]
    for part in parts:
        for block in blocks:
            yield block, part


def opened_run(frame: Frame) -> kvstore_pb2.BlocksOpen:
    """The body of the first frame of a Put or Get. Raises InvalidRequest if it is none."""
    if frame.kind is not FrameKind.OPEN:
        raise InvalidRequest(f"the first frame must be OPEN, not {frame.kind.name}")
    _, body = decode_open(frame.payload)
    return parse_body(kvstore_pb2.BlocksOpen, body)


def asked_codec(opened: kvstore_pb2.BlocksOpen) -> Codec:
    """The codec of a Get's frames: what its reader wants, or RAW if that is not known, lossy, or not installed."""
    wanted = next((codec for codec in LOSSLESS if codec == opened.codec), Codec.RAW)
    return wanted if wanted in decodable() else Codec.RAW


async def block_frames(
    cells: KVBytes,
    layout: KVLayout,
    opening: Frame,
    index: int,
    num_sent: int,
    first_layer: int = 0,
    codec: Codec = Codec.RAW,
) -> AsyncGenerator[Frame, None]:
    """The DATA frames of a Get's `index`th block, or of a part of it, numbered after the first `num_sent`.

    `cells` are the block's raw bytes from `first_layer` on. A frame that `codec` would not make smaller is raw.
    """
    wanted, rows = opening.range, np.frombuffer(cells, np.uint8).reshape(-1, *_row_shape(layout)[1:])
    shard = Shard(wanted.layer_start, wanted.layer_end, wanted.head_start, wanted.head_end)
    parts = plan_frames(layout, shard, wanted.token_start, wanted.num_tokens)
    for sequence, part in enumerate(parts, num_sent):
        layers = slice(part.layer_start - first_layer, part.layer_end - first_layer)
        raw = np.ascontiguousarray(rows[layers, *_slices(_further(part, -wanted.token_start))[1:]])
        payload, used = raw.reshape(-1).data, Codec.RAW
        if codec is not Codec.RAW:
            coded = await asyncio.to_thread(encode, codec, raw.view(UNSIGNED[layout.dtype]), layout.dtype)
            payload, used = (coded, codec) if coded.nbytes < payload.nbytes else (payload, used)
        place = _further(part, index * layout.block_tokens)
        yield Frame(FrameKind.DATA, opening.transfer_id, opening.layout_fingerprint, sequence, place, used, payload)


async def _send_block(sender: TransferSender, layout: KVLayout, start: int, cells: KVBytes) -> None:
    view = np.frombuffer(cells, np.uint8).reshape(_row_shape(layout))
    for part in plan_frames(layout, layout.whole(), start, layout.block_tokens):
        buffer = await sender.buffer(part.num_bytes(layout))
        source = view[_slices(replace(part, token_start=part.token_start - start))]
        np.copyto(np.frombuffer(buffer.view, np.uint8).reshape(source.shape), source)
        await sender.data(part, buffer)


async def _next_block(
    call: grpc.aio.StreamStreamCall,
    link: KVLink,
    layout: KVLayout,
    wanted: KVRange,
    arrival: Callable[[int], Awaitable[None]],
    inbound: InboundSpeed,
    codec: Codec,
) -> memoryview | None:
    """The next block, or None after the last one."""
    out: NDArray[np.uint8] | None = None
    coverage = Coverage(wanted)
    while not coverage.is_whole():
        with in_our_tree(link.peer.address):
            message = await call.read()
        frame = None if message is grpc.aio.EOF else decode_frame(message)
        if frame is None or frame.kind is FrameKind.DONE:
            if frame is not None and out is None:
                return None
            raise DataLoss("the store sent only a part of the block")
        if out is None:
            out = np.empty((*wanted.shape(layout)[:-1], layout.head_dim * layout.item_bytes), np.uint8)
        coverage.add(frame.range)
        _check(frame, layout, codec)
        into = out[_slices(_from_start(frame.range, wanted))]
        await arrival(frame.payload_bytes)
        payload = frame.payload
        if frame.codec is not Codec.RAW:
            payload = await _decoded(frame, layout)
        np.copyto(into, np.frombuffer(payload, np.uint8).reshape(into.shape))
        inbound.num_bytes[codec] += frame.payload_bytes
        inbound.num_raw_bytes[codec] += into.nbytes
    assert out is not None, "no block is empty"
    return memoryview(out.reshape(-1).data)


def _check(frame: Frame, layout: KVLayout, codec: Codec) -> None:
    """Raises DataLoss unless the frame carries KV of its range in this layout, raw or in `codec`."""
    is_asked_for = frame.kind is FrameKind.DATA and frame.codec in (Codec.RAW, codec)
    try:
        if is_asked_for and frame.layout_fingerprint == layout.fingerprint():
            check_size(frame.codec, frame.payload_bytes, frame.range.shape(layout), layout.dtype)
            return
    except InvalidRequest:
        pass
    raise DataLoss("a block came in another layout, encoding or size than it was asked for")


async def _decoded(frame: Frame, layout: KVLayout) -> memoryview:
    """The raw bytes of a compressed frame. Raises DataLoss if they are no encoding."""
    shape = frame.range.shape(layout)
    try:
        bits = await asyncio.to_thread(decode, frame.codec, frame.payload, shape, layout.dtype)
    except HalfmoonError as error:
        raise DataLoss(f"a block came damaged: {error.message}") from error
    return bits.reshape(-1).view(np.uint8).data


def whole_blocks(layout: KVLayout, token_start: int, num_blocks: int) -> KVRange:
    """The range of `num_blocks` whole successive blocks."""
    num_tokens = num_blocks * layout.block_tokens
    return KVRange(0, layout.num_layers, 0, layout.num_kv_heads, token_start, num_tokens)


def _further(part: KVRange, num_tokens: int) -> KVRange:
    return replace(part, token_start=part.token_start + num_tokens)


def _row_shape(layout: KVLayout) -> tuple[int, ...]:
    return layout.num_layers, 2, layout.num_kv_heads, layout.block_tokens, layout.head_dim * layout.item_bytes


def _from_start(part: KVRange, whole: KVRange) -> KVRange:
    """`part`, counted from the start of `whole` in every dimension."""
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
    except asyncio.InvalidStateError:  # the store has already refused: reading says why
        return
