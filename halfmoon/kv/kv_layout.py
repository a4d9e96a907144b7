"""How the KV cache of one model is cut into blocks, and which part of it (shard) one worker holds.

Knows nothing of where the bytes are stored or how they travel.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

from halfmoon.errors import Incompatible

FloatDtype = Literal["float32", "float16", "bfloat16"]
QuantisedDtype = Literal["int8", "fp8"]
KVDtype = Literal["float32", "float16", "bfloat16", "int8", "fp8"]  # stored blocks number them: append only
KVBytes = bytes | bytearray | memoryview
QUANTISED: frozenset[KVDtype] = frozenset(get_args(QuantisedDtype))
"""Dtypes of rows that are codes and their scale, as `codec/scaled_rows.py` defines them."""
_ITEM_BYTES: dict[KVDtype, int] = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "fp8": 1}
_SCALE_BYTES = 2  # behind the codes of each quantised row, in bfloat16
_MAX_INDEX = 0xFFFF  # a frame header names layers and heads in 16 bits


def row_items(head_dim: int, dtype: KVDtype) -> int:
    """Elements that hold a row of `head_dim` values."""
    return head_dim + _SCALE_BYTES if dtype in QUANTISED else head_dim


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of the whole model's KV cache. Two workers can exchange KV if their layouts differ only in dtype.

    Canonical order of KV bytes, in memory views and in frames: `[num_layers, 2 (K, V), num_kv_heads, num_tokens,
    head_dim]`, keys after rotary embedding. A row, K or V of one token, layer and head, is `head_dim` codes and their
    scale where it is quantised.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: KVDtype
    block_tokens: int = 64

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_tokens"):
            if getattr(self, name) < 1:
                raise Incompatible(f"KV layout: {name} must be at least 1, got {getattr(self, name)}", param=name)
        for name in ("num_layers", "num_kv_heads"):
            if getattr(self, name) > _MAX_INDEX:
                raise Incompatible(
                    f"KV layout: {name} must be at most {_MAX_INDEX}, got {getattr(self, name)}", param=name
                )
        if self.dtype not in get_args(KVDtype):
            raise Incompatible(f"KV layout: dtype {self.dtype!r} is not one of {get_args(KVDtype)}", param="dtype")

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return _ITEM_BYTES[self.dtype]

    @property
    def row_items(self) -> int:
        """Elements of a row of memory: the head's values and, where they are codes, the bytes of their scale."""
        return row_items(self.head_dim, self.dtype)

    @property
    def row_bytes(self) -> int:
        """Bytes of K or V of one token, layer and head."""
        return self.row_items * self.item_bytes

    @property
    def token_layer_bytes(self) -> int:
        """Bytes of K and V of one token in one layer, all heads."""
        return 2 * self.num_kv_heads * self.row_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token in all layers."""
        return self.num_layers * self.token_layer_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one whole block."""
        return self.block_tokens * self.token_bytes

    def shape(self, num_layers: int, num_tokens: int) -> tuple[int, int, int, int, int]:
        """`[layers, 2, heads, tokens, head_dim]`: KV of `num_tokens` tokens in `num_layers` layers, all heads."""
        return num_layers, 2, self.num_kv_heads, num_tokens, self.head_dim

    def memory_shape(self, num_layers: int, num_tokens: int) -> tuple[int, int, int, int, int]:
        """`shape`, in elements of memory: `[layers, 2, heads, tokens, row_items]`."""
        return num_layers, 2, self.num_kv_heads, num_tokens, self.row_items

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens, the last one possibly partly filled."""
        return -(-num_tokens // self.block_tokens)

    def fingerprint(self) -> int:
        """64-bit name of this layout, the same on every machine, carried in a frame's header."""
        text = f"halfmoon-kv-1/{self.num_layers}/{self.num_kv_heads}/{self.head_dim}/{self.dtype}/{self.block_tokens}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")

    def dtype_by_fingerprint(self) -> dict[int, KVDtype]:
        """Dtypes by fingerprint of all layouts that differ from this one in dtype at most, itself included."""
        return {replace(self, dtype=dtype).fingerprint(): dtype for dtype in get_args(KVDtype)}

    def whole(self) -> Shard:
        """The shard of a worker that holds everything."""
        return Shard(0, self.num_layers, 0, self.num_kv_heads)


class KVSlice(NamedTuple):
    """The KV of successive tokens in successive layers, in all heads: what one call reads or writes."""

    layer_start: int
    layer_end: int
    token_start: int  # from the beginning of a sequence, or of its blocks
    num_tokens: int

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return self.layer_end - self.layer_start

    @property
    def layers(self) -> slice:
        """The layers as an index."""
        return slice(self.layer_start, self.layer_end)

    @property
    def token_end(self) -> int:
        """The token behind the last one."""
        return self.token_start + self.num_tokens


@dataclass(frozen=True, slots=True)
class Shard:
    """Half-open layer and KV-head ranges of a layout: what one rank of a (TP, PP) worker holds."""

    layer_start: int
    layer_end: int
    head_start: int
    head_end: int
