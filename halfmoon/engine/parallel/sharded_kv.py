"""KV of several ranks in the canonical order of the whole model: gathered from the shards, scattered to them.

So a hand-over is independent of how either side is cut. Knows nothing of processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from halfmoon.engine.kv_memory.canonical_kv import CanonicalKV
from halfmoon.engine.parallel.messages import CopyKV, ReadKV, StageKV, WriteKV, WriteStagedKV
from halfmoon.errors import Incompatible, Unavailable
from halfmoon.kv.kv_layout import KVBytes, KVLayout, KVSlice, Shard
from halfmoon.kv.staged_shards import Ticket, WorkerRanks, rows_of

# Runs each rank's request, a write with its payload, and returns each rank's bytes.
CopyAll = Callable[[Mapping[int, tuple[CopyKV, bytes | memoryview]]], Mapping[int, bytes | memoryview]]


class ShardedKV:
    """`KVArena.read` and `write` over all ranks."""

    def __init__(self, layout: KVLayout, ranks: WorkerRanks, copy_all: CopyAll, num_steps: Callable[[], int]) -> None:
        self._ranks = ranks
        self._shards = [rank.shard for rank in ranks.shards]
        self._readable = ranks.readable
        self._copy_all = copy_all
        self._num_steps = num_steps
        self._canonical = CanonicalKV(layout)
        self._row_bytes = layout.row_bytes

    def read(self, blocks: Sequence[int], part: KVSlice, out: memoryview | None = None) -> memoryview:
        """Canonical bytes `[layers, 2, kv_heads, num_tokens, head_dim]`, in `out` if given."""
        self._canonical.check(part, len(blocks))
        values = self._canonical.room(part.num_layers, part.num_tokens, out)
        places = self._places(part, self._readable)
        requests = {
            rank: (ReadKV(self._num_steps(), blocks, self._own(rank, place, part)), b"")
            for rank, place in places.items()
        }
        for rank, payload in self._copy_all(requests).items():
            view = _view(values, places[rank], part.layer_start)
            view[...] = np.frombuffer(payload, dtype=self._canonical.integer).reshape(view.shape)
        return values.reshape(-1).data.cast("B")

    def write(self, blocks: Sequence[int], part: KVSlice, payload: KVBytes) -> None:
        """Scatters canonical bytes to every rank that holds some of them. Raises InvalidRequest for a wrong size."""
        self._canonical.check(part, len(blocks))
        values = self._canonical.view(payload, part.num_layers, part.num_tokens)
        places = self._places(part, [True] * len(self._shards))
        requests: dict[int, tuple[CopyKV, bytes | memoryview]] = {
            rank: (
                WriteKV(self._num_steps(), blocks, self._own(rank, place, part)),
                _view(values, place, part.layer_start).tobytes(),
            )
            for rank, place in places.items()
        }
        self._copy_all(requests)

    def stage(self, blocks: Sequence[int], part: KVSlice, ticket: Ticket) -> None:
        """`read` where each host keeps the bytes of its own ranks, for the ranks of another worker."""
        self._canonical.check(part, len(blocks))
        places = self._places(part, self._readable)
        requests: dict[int, tuple[CopyKV, bytes | memoryview]] = {}
        for rank, place in places.items():
            where = (self._num_steps(), blocks, self._own(rank, place, part))
            requests[rank] = (ReadKV(*where) if self._is_here(rank) else StageKV(*where, ticket, place), b"")
        for rank, payload in self._copy_all(requests).items():
            if self._is_here(rank):
                rows = rows_of(places[rank], part.num_tokens, payload)
                self._ranks.staged.put(ticket, rank, places[rank], rows, time.monotonic())

    def write_staged(self, blocks: Sequence[int], part: KVSlice, ticket: Ticket) -> None:
        """`write` of what the ranks' hosts keep.

        Raises Unavailable where they do not any more, Incompatible if it is not as long as the place.
        """
        self._canonical.check(part, len(blocks))
        requests: dict[int, tuple[CopyKV, bytes | memoryview]] = {}
        for rank, place in self._places(part, [True] * len(self._shards)).items():
            where = (self._num_steps(), blocks, self._own(rank, place, part))
            if self._is_here(rank):
                payload = self._ranks.staged.take(ticket, rank)
                if payload.nbytes != self._num_bytes(place, part.num_tokens):  # the rank itself would fail, and end all
                    raise Incompatible(f"the ranks of the other worker sent {payload.nbytes} bytes for {place}")
                requests[rank] = WriteKV(*where), payload
            else:
                requests[rank] = WriteStagedKV(*where, ticket), b""
        for reason in self._copy_all(requests).values():
            if reason:
                raise Unavailable(bytes(reason).decode())

    def _num_bytes(self, place: Shard, num_tokens: int) -> int:
        num_rows = (place.layer_end - place.layer_start) * 2 * (place.head_end - place.head_start) * num_tokens
        return num_rows * self._row_bytes

    def _is_here(self, rank: int) -> bool:
        return self._ranks.shards[rank].address is None

    def _places(self, part: KVSlice, wanted: Sequence[bool]) -> dict[int, Shard]:
        """Each wanted rank's share of these layers, in the whole model's numbering."""
        places = {}
        for rank, shard in enumerate(self._shards):
            first, last = max(part.layer_start, shard.layer_start), min(part.layer_end, shard.layer_end)
            if wanted[rank] and first < last:
                places[rank] = Shard(first, last, shard.head_start, shard.head_end)
        return places

    def _own(self, rank: int, place: Shard, part: KVSlice) -> KVSlice:
        """The part of a rank's place, in its own layers."""
        first = self._shards[rank].layer_start
        return KVSlice(place.layer_start - first, place.layer_end - first, part.token_start, part.num_tokens)


def _view(values: NDArray[np.signedinteger], place: Shard, layer_start: int) -> NDArray[np.signedinteger]:
    """Cuts values: [layers from layer_start, 2, kv_heads, num_tokens, head_dim] to one shard's place."""
    layers = slice(place.layer_start - layer_start, place.layer_end - layer_start)
    return values[layers, :, place.head_start : place.head_end]
