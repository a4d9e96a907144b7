"""One block as bytes that say what they are: what the disk and the cold tier hold. Sans-IO.

offset  size  field                            offset  size  field
0       4     magic "HMKB"                     84      4     depth
4       1     version                          88      8     seconds that computing it took, float
5       1     quantiser                        96      8     expiry, wall clock seconds, float
6       1     entropy coder                    104     8     payload bytes
7       1     dtype                            112     64    tenant, filled up with zeros
8       8     id of the key of the digest      176     32    keyed digest of bytes 0..175 and the payload
16      24    id (tenant tag, key)             208     ...   payload
40      24    id of its parent
64      4     1 if it has a parent             all integers little-endian
68      4x4   layers, KV heads, head size, block tokens
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import get_args

from halfmoon.catalog.block_identity import ID_BYTES, BlockMeta
from halfmoon.errors import DataLoss, HalfmoonError
from halfmoon.kv.codec import Codec
from halfmoon.kv.codec.lossless import Lossless
from halfmoon.kv.entry_codec import EntryCodec
from halfmoon.kv.kv_layout import KVBytes, KVDtype, KVLayout
from halfmoon.kv.owner import MAX_TENANT_CHARS
from services.kvstore.tiers.seal import DIGEST_BYTES, Seal

VERSION = 2
_MAGIC = b"HMKB"
_FIELDS = struct.Struct(f"<4sBBBB8s24s24sIIIIIIddQ{MAX_TENANT_CHARS}s")
HEADER_BYTES = _FIELDS.size + DIGEST_BYTES
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

    def check_is(self, known: BlockMeta) -> None:
        """Raises DataLoss if an index or an object's name, which nobody sealed, says otherwise of the block."""
        own = self.meta
        if (own.id, own.parent, own.depth) != (known.id, known.parent, known.depth) or known.layout not in (
            None, own.layout,
        ):  # fmt: skip
            raise DataLoss("a stored block is not what the tier's index says")


def encode_record(meta: BlockMeta, codec: EntryCodec, payload: KVBytes, seal: Seal) -> tuple[bytes, memoryview]:
    """Encodes a block as (header, payload), to be written one after the other."""
    layout = meta.layout
    assert layout is not None
    view = memoryview(payload).cast("B")
    head = _FIELDS.pack(
        _MAGIC, VERSION, codec.quantiser, codec.lossless, _DTYPES.index(layout.dtype), seal.key_id, meta.id,
        meta.parent or bytes(ID_BYTES), meta.parent is not None, layout.num_layers, layout.num_kv_heads,
        layout.head_dim, layout.block_tokens, meta.depth, meta.recompute_s, meta.expires_at_s, view.nbytes,
        meta.tenant.encode("ascii"),
    )  # fmt: skip
    return head + seal.digest(head, view), view


def decode_record(data: KVBytes, expected_id: bytes, seal: Seal) -> Record:
    """Parses a record. Raises DataLoss unless `data` is one whole record of that block, sealed with this key."""
    view = memoryview(data).cast("B")
    if view.nbytes < HEADER_BYTES:
        raise DataLoss("a stored block is shorter than its header")
    head, digest, payload = view[: _FIELDS.size], view[_FIELDS.size : HEADER_BYTES], view[HEADER_BYTES:]
    (magic, version, quantiser, lossless, dtype, key_id, block_id, parent, has_parent, layers, heads, head_dim, tokens,
     depth, recompute_s, expires_at_s, payload_bytes, tenant) = _FIELDS.unpack(head)  # fmt: skip
    if (magic, version, block_id, payload_bytes) != (_MAGIC, VERSION, expected_id, payload.nbytes):
        raise DataLoss("the stored record is not of the requested block")
    if key_id != seal.key_id:
        raise DataLoss("a stored block is sealed with the key of another cluster")
    if not seal.holds(digest, head, payload):
        raise DataLoss("a stored block's digest did not match: it is damaged or forged")
    try:
        layout = KVLayout(layers, heads, head_dim, _DTYPES[dtype], tokens)
        codec = EntryCodec(Codec(quantiser), Lossless(lossless))
        owner = tenant.rstrip(b"\0").decode("ascii")
    except (HalfmoonError, ValueError, IndexError) as err:
        raise DataLoss(f"a stored block is of a kind unknown here: {err}") from err
    meta = BlockMeta(block_id, parent if has_parent else None, depth, layout, recompute_s, expires_at_s, owner)
    return Record(meta, codec, payload)
