"""Block bytes as raw frames, many blocks per stream: what a Put sends, and what a Get is answered with.

kvstore.proto defines both exchanges; `block_reads` is the reader's end of a Get.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

import numpy as np

from halfmoon.errors import AlreadyHere, InvalidRequest, NoCapacity
from halfmoon.kv.codec import LOSSLESS, Codec, decodable, encode
from halfmoon.kv.codec.floats import UNSIGNED
from halfmoon.kv.frame import Frame, FrameKind, KVRange, plan_frames
from halfmoon.kv.kv_layout import KVBytes, KVLayout, Shard
from halfmoon.kv.negotiation import decode_open
from halfmoon.pb import kvstore_pb2
from halfmoon.rpc.layout_message import layout_message
from halfmoon.rpc.store.chain import Chain, Stored
from halfmoon.rpc.transfer import TransferSender, parse_body, transfer_to
from halfmoon.rpc.transport.link import KVLink

BYTES_SERVICE = "halfmoon.KVStoreBytes"
_PUT = f"/{BYTES_SERVICE}/Put"


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
        recompute_s=chain.recompute_s, tenant=chain.owner.tenant, tenant_quota_bytes=chain.owner.quota_bytes,
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


def layer_parts(wanted: KVRange, layers_at_once: int) -> list[KVRange]:
    """The parts of `wanted` of which a Get sends each for all its blocks before the next; 0: all layers at once."""
    firsts = range(wanted.layer_start, wanted.layer_end, layers_at_once or wanted.layer_end)
    ends = [*firsts[1:], wanted.layer_end]
    return [replace(wanted, layer_start=first, layer_end=end) for first, end in zip(firsts, ends, strict=True)]


def opened_run(frame: Frame) -> kvstore_pb2.BlocksOpen:
    """The body of the first frame of a Put or Get. Raises InvalidRequest if it is none."""
    if frame.kind is not FrameKind.OPEN:
        raise InvalidRequest(f"the first frame must be OPEN, not {frame.kind.name}")
    _, body = decode_open(frame.payload)
    return parse_body(kvstore_pb2.BlocksOpen, body)


def requested_codec(opened: kvstore_pb2.BlocksOpen) -> Codec:
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
        raw = np.ascontiguousarray(rows[layers, *part.moved(-wanted.token_start).slices[1:]])
        payload, used = raw.reshape(-1).data, Codec.RAW
        if codec is not Codec.RAW:
            coded = await asyncio.to_thread(encode, codec, raw.view(UNSIGNED[layout.dtype]), layout.dtype)
            payload, used = (coded, codec) if coded.nbytes < payload.nbytes else (payload, used)
        place = part.moved(index * layout.block_tokens)
        yield Frame(FrameKind.DATA, opening.transfer_id, opening.layout_fingerprint, sequence, place, used, payload)


async def _send_block(sender: TransferSender, layout: KVLayout, start: int, cells: KVBytes) -> None:
    view = np.frombuffer(cells, np.uint8).reshape(_row_shape(layout))
    for part in plan_frames(layout, layout.whole(), start, layout.block_tokens):
        buffer = await sender.buffer(part.num_bytes(layout))
        source = view[part.moved(-start).slices]
        np.copyto(np.frombuffer(buffer.view, np.uint8).reshape(source.shape), source)
        await sender.data(part, buffer)


def whole_blocks(layout: KVLayout, token_start: int, num_blocks: int) -> KVRange:
    """The range of `num_blocks` whole successive blocks."""
    num_tokens = num_blocks * layout.block_tokens
    return KVRange(0, layout.num_layers, 0, layout.num_kv_heads, token_start, num_tokens)


def _row_shape(layout: KVLayout) -> tuple[int, ...]:
    return layout.num_layers, 2, layout.num_kv_heads, layout.block_tokens, layout.row_bytes
