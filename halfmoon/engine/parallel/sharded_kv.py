"""KV of several ranks in the canonical order of the whole model: gathered from the shards, scattered to them.

So a hand-over does not know how either side is cut. Knows nothing of processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from halfmoon.engine.parallel.messages import CopyKV, ReadKV, WriteKV
from halfmoon.errors import InvalidRequest
from halfmoon.kv.layout import KVBytes, KVLayout, Shard

# Runs each rank's request, a write with its payload, and returns each rank's bytes.
CopyAll = Callable[[Mapping[int, tuple[CopyKV, bytes]]], Mapping[int, bytes | memoryview]]


class ShardedKV:
    """As `KVArena.read` and `write`, over all ranks. `shards` and `readable` (no copies of a head twice) by rank."""

    def __init__(
        self,
        layout: KVLayout,
        shards: Sequence[Shard],
        readable: Sequence[bool],
        copy_all: CopyAll,
        num_steps: Callable[[], int],
    ) -> None:
        self._layout = layout
        self._shards = shards
        self._readable = readable
        self._copy_all = copy_all
        self._num_steps = num_steps
        self._integer = np.dtype(f"i{layout.item_bytes}")

    def read(self, blocks: Sequence[int], layer_start: int, layer_end: int, start: int, num_tokens: int) -> memoryview:
        """Canonical bytes `[layers, 2, kv_heads, num_tokens, head_dim]`."""
        self._check(layer_start, layer_end, start, num_tokens, len(blocks))
        values = np.empty(self._shape(layer_start, layer_end, num_tokens), dtype=self._integer)
        places = self._places(layer_start, layer_end, self._readable)
        requests = {
            rank: (ReadKV(self._num_steps(), blocks, *self._own_layers(rank, place), start, num_tokens), b"")
            for rank, place in places.items()
        }
        for rank, payload in self._copy_all(requests).items():
            part = _view(values, places[rank], layer_start)
            part[...] = np.frombuffer(payload, dtype=self._integer).reshape(part.shape)
        return values.reshape(-1).data.cast("B")

    def write(
        self, blocks: Sequence[int], layer_start: int, layer_end: int, start: int, num_tokens: int, payload: KVBytes
    ) -> None:
        """Scatters canonical bytes to every rank that holds some of them. Raises InvalidRequest for a wrong size."""
        self._check(layer_start, layer_end, start, num_tokens, len(blocks))
        shape = self._shape(layer_start, layer_end, num_tokens)
        num_bytes = math.prod(shape) * self._layout.item_bytes
        if memoryview(payload).nbytes != num_bytes:
            raise InvalidRequest(f"KV payload has {memoryview(payload).nbytes} bytes; {shape} has {num_bytes}")
        values = np.frombuffer(payload, dtype=self._integer).reshape(shape)
        places = self._places(layer_start, layer_end, [True] * len(self._shards))
        requests: dict[int, tuple[CopyKV, bytes]] = {
            rank: (
                WriteKV(self._num_steps(), blocks, *self._own_layers(rank, place), start, num_tokens),
                _view(values, place, layer_start).tobytes(),
            )
            for rank, place in places.items()
        }
        self._copy_all(requests)

    def _places(self, layer_start: int, layer_end: int, wanted: Sequence[bool]) -> dict[int, Shard]:
        """What each wanted rank has of these layers, in the whole model's numbers."""
        places = {}
        for rank, shard in enumerate(self._shards):
            first, last = max(layer_start, shard.layer_start), min(layer_end, shard.layer_end)
            if wanted[rank] and first < last:
                places[rank] = Shard(first, last, shard.head_start, shard.head_end)
        return places

    def _own_layers(self, rank: int, place: Shard) -> tuple[int, int]:
        first = self._shards[rank].layer_start
        return place.layer_start - first, place.layer_end - first

    def _shape(self, layer_start: int, layer_end: int, num_tokens: int) -> tuple[int, ...]:
        return (layer_end - layer_start, 2, self._layout.num_kv_heads, num_tokens, self._layout.head_dim)

    def _check(self, layer_start: int, layer_end: int, start: int, num_tokens: int, num_blocks: int) -> None:
        if not 0 <= layer_start < layer_end <= self._layout.num_layers:
            raise InvalidRequest(f"layers {layer_start}..{layer_end} are outside 0..{self._layout.num_layers}")
        if start < 0 or num_tokens < 1 or start + num_tokens > num_blocks * self._layout.block_tokens:
            raise InvalidRequest(f"tokens {start}..{start + num_tokens} are outside the sequence's {num_blocks} blocks")


def _view(values: NDArray[np.signedinteger], place: Shard, layer_start: int) -> NDArray[np.signedinteger]:
    """values: [layers from layer_start, 2, kv_heads, num_tokens, head_dim], cut to one shard's place."""
    layers = slice(place.layer_start - layer_start, place.layer_end - layer_start)
    return values[layers, :, place.head_start : place.head_end]
