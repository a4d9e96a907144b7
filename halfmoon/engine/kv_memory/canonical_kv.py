"""Arrays of KV bytes in canonical order `[layers, 2, kv_heads, num_tokens, head_dim]`. Knows nothing of tensors."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from halfmoon.errors import InvalidRequest
from halfmoon.kv.kv_layout import KVBytes, KVLayout, KVSlice


class CanonicalKV:
    """Shapes, checks and views of one layout's canonical bytes, shared by all owners of KV memory."""

    def __init__(self, layout: KVLayout) -> None:
        self._layout = layout
        # Integers of the elements' size: numpy has no bfloat16, and copying does not need it.
        self.integer: np.dtype[np.signedinteger] = np.dtype(f"i{layout.item_bytes}")

    def check(self, part: KVSlice, num_blocks: int) -> None:
        """Raises InvalidRequest for layers outside the layout or tokens outside the sequence's blocks."""
        layer_start, layer_end, start, num_tokens = part
        if not 0 <= layer_start < layer_end <= self._layout.num_layers:
            raise InvalidRequest(f"layers {layer_start}..{layer_end} are outside 0..{self._layout.num_layers}")
        if start < 0 or num_tokens < 1 or start + num_tokens > num_blocks * self._layout.block_tokens:
            raise InvalidRequest(f"tokens {start}..{start + num_tokens} are outside the sequence's {num_blocks} blocks")

    def room(self, num_layers: int, num_tokens: int, out: memoryview | None) -> NDArray[np.signedinteger]:
        """An array of the needed size: the first bytes of `out`, or new memory without it."""
        shape = self._layout.memory_shape(num_layers, num_tokens)
        if out is None:
            return np.empty(shape, dtype=self.integer)
        return np.frombuffer(out, dtype=self.integer, count=math.prod(shape)).reshape(shape)

    def view(self, payload: KVBytes, num_layers: int, num_tokens: int) -> NDArray[np.signedinteger]:
        """`payload` as an array, not copied. Raises InvalidRequest when its size does not match the ranges."""
        shape = self._layout.memory_shape(num_layers, num_tokens)
        num_bytes = math.prod(shape) * self._layout.item_bytes
        if memoryview(payload).nbytes != num_bytes:
            raise InvalidRequest(f"KV payload has {memoryview(payload).nbytes} bytes; {shape} has {num_bytes}")
        return np.frombuffer(payload, dtype=self.integer).reshape(shape)
