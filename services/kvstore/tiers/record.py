"""One block as bytes that say what they are: what the disk and the cold tier hold. Sans-IO.

offset  size  field                            offset  size  field
0       4     magic "HMKB"                     60      4x4   layers, KV heads, head size, block tokens
4       1     version                          76      4     depth
5       1     quantiser                        80      8     seconds that computing it took, float
6       1     entropy coder                    88      8     expiry, wall clock seconds, float
7       1     dtype                            96      8     payload bytes
8       24    id (tenant tag, key)             104     8     xxh3-64 of bytes 0..103 and the payload
32      24    id of its parent                 112     ...   payload
56      4     1 if it has a parent             all integers little-endian
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import get_args

import xxhash

from halfmoon.errors import DataLoss, HalfmoonError
from halfmoon.kv.codec import Codec
from halfmoon.kv.codec.lossless import Lossless
from halfmoon.kv.entry_codec import EntryCodec
from halfmoon.kv.kv_layout import KVBytes, KVDtype, KVLayout
from services.kvstore.catalog.block_identity import ID_BYTES, BlockMeta

VERSION = 1
_MAGIC = b"HMKB"
_FIELDS = struct.Struct("<4sBBBB24s24sIIIIIIddQ")
_DIGEST = struct.Struct("<Q")
HEADER_BYTES = _FIELDS.size + _DIGEST.size
_DTYPES: tuple[KVDtype, ...] = get_args(KVDtype)


@dataclass(frozen=True, slots=True)
class Record:
    """A whole block, read and checked."""

    meta: BlockMeta  # includes the layout
    codec: EntryCodec
    payload: KVBytes

    def cells(self) -> memoryview:
        """Decodes the raw block. Raises DataLoss if the payload is damaged."""
        assert self.meta.layout is not None
        try:
            return self.codec.decode(self.payload, self.meta.layout)
        except HalfmoonError as err:
            raise DataLoss(f"a stored block cannot be decoded: {err.message}") from err


def encode_record(meta: BlockMeta, codec: EntryCodec, payload: KVBytes) -> tuple[bytes, memoryview]:
    """Encodes a block as (header, payload), to be written one after the other."""
    layout = meta.layout
    assert layout is not None
    view = memoryview(payload).cast("B")
    head = _FIELDS.pack(
        _MAGIC, VERSION, codec.quantiser, codec.lossless, _DTYPES.index(layout.dtype), meta.id,
        meta.parent or bytes(ID_BYTES), meta.parent is not None, layout.num_layers, layout.num_kv_heads,
        layout.head_dim, layout.block_tokens, meta.depth, meta.recompute_s, meta.expires_at_s, view.nbytes,
    )  # fmt: skip
    return head + _DIGEST.pack(_digest(head, view)), view


def decode_record(data: KVBytes, expected_id: bytes) -> Record:
    """Parses a record. Raises DataLoss unless `data` is one whole, undamaged record of that block."""
    view = memoryview(data).cast("B")
    if view.nbytes < HEADER_BYTES:
        raise DataLoss("a stored block is shorter than its header")
    head, payload = view[: _FIELDS.size], view[HEADER_BYTES:]
    (magic, version, quantiser, lossless, dtype, block_id, parent, has_parent, layers, heads, head_dim, tokens, depth,
     recompute_s, expires_at_s, payload_bytes) = _FIELDS.unpack(head)  # fmt: skip
    if (magic, version, block_id, payload_bytes) != (_MAGIC, VERSION, expected_id, payload.nbytes):
        raise DataLoss("the stored record is not of the requested block")
    if _DIGEST.unpack_from(view, _FIELDS.size)[0] != _digest(head, payload):
        raise DataLoss("a stored block's digest did not match")
    try:
        layout = KVLayout(layers, heads, head_dim, _DTYPES[dtype], tokens)
        codec = EntryCodec(Codec(quantiser), Lossless(lossless))
    except (HalfmoonError, ValueError, IndexError) as err:
        raise DataLoss(f"a stored block is of a kind unknown here: {err}") from err
    meta = BlockMeta(block_id, parent if has_parent else None, depth, layout, recompute_s, expires_at_s)
    return Record(meta, codec, payload)


def _digest(head: KVBytes, payload: memoryview) -> int:
    hasher = xxhash.xxh3_64(bytes(head))
    hasher.update(payload)
    return hasher.intdigest()
