"""KV of sequence ranks in canonical order: each rank has some of a sequence's blocks, in all layers and heads.

So a hand-over does not know which rank computed which token. Knows nothing of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from halfmoon.engine.kv_memory.canonical_kv import CanonicalKV
from halfmoon.engine.parallel.messages import CopyKV, ReadKV, WriteKV
from halfmoon.engine.parallel.sharded_kv import CopyAll
from halfmoon.engine.scheduling.spread_pool import own_id, rank_of
from halfmoon.kv.kv_layout import KVBytes, KVLayout, KVSlice


class Piece(NamedTuple):
    """What one rank has of some consecutive tokens, in order: its own blocks, read like a sequence of their own."""

    blocks: list[int]  # ids in the rank's memory
    start: int  # in those blocks
    places: list[tuple[int, int]]  # of the tokens among all that are copied, as half-open ranges

    @property
    def num_tokens(self) -> int:
        """Number of tokens."""
        return sum(end - start for start, end in self.places)

    def part(self, whole: KVSlice) -> KVSlice:
        """What is copied here of `whole`."""
        return KVSlice(whole.layer_start, whole.layer_end, self.start, self.num_tokens)


class SpreadKV:
    """`KVArena.read` and `write` over sequence ranks."""

    def __init__(self, layout: KVLayout, num_ranks: int, copy_all: CopyAll, num_steps: Callable[[], int]) -> None:
        self._block_tokens = layout.block_tokens
        self._num_ranks = num_ranks
        self._copy_all = copy_all
        self._num_steps = num_steps
        self._canonical = CanonicalKV(layout)

    def read(self, blocks: Sequence[int], part: KVSlice, out: memoryview | None = None) -> memoryview:
        """See `ShardedKV.read`."""
        self._canonical.check(part, len(blocks))
        values = self._canonical.room(part.num_layers, part.num_tokens, out)
        pieces = self._pieces(blocks, part)
        requests: dict[int, tuple[CopyKV, bytes]] = {
            rank: (ReadKV(self._num_steps(), piece.blocks, piece.part(part)), b"") for rank, piece in pieces.items()
        }
        for rank, payload in self._copy_all(requests).items():
            own = self._canonical.view(payload, part.num_layers, pieces[rank].num_tokens)
            done = 0
            for first, last in pieces[rank].places:
                values[:, :, :, first:last] = own[:, :, :, done : done + last - first]
                done += last - first
        return values.reshape(-1).data.cast("B")

    def write(self, blocks: Sequence[int], part: KVSlice, payload: KVBytes) -> None:
        """See `ShardedKV.write`."""
        self._canonical.check(part, len(blocks))
        values = self._canonical.view(payload, part.num_layers, part.num_tokens)
        requests: dict[int, tuple[CopyKV, bytes]] = {
            rank: (
                WriteKV(self._num_steps(), piece.blocks, piece.part(part)),
                _gathered(values, piece).tobytes(),
            )
            for rank, piece in self._pieces(blocks, part).items()
        }
        self._copy_all(requests)

    def _pieces(self, blocks: Sequence[int], part: KVSlice) -> dict[int, Piece]:
        """Each rank's piece of the tokens of a sequence; ranks without any are left out."""
        size, start, end = self._block_tokens, part.token_start, part.token_end
        pieces: dict[int, Piece] = {}
        for index in range(start // size, -(-end // size)):
            first, last = max(start, index * size), min(end, (index + 1) * size)
            rank = rank_of(blocks[index], self._num_ranks)
            piece = pieces.setdefault(rank, Piece([], first % size, []))
            piece.blocks.append(own_id(blocks[index], self._num_ranks))
            piece.places.append((first - start, last - start))
        return pieces


def _gathered(values: NDArray[np.signedinteger], piece: Piece) -> NDArray[np.signedinteger]:
    return np.concatenate([values[:, :, :, first:last] for first, last in piece.places], axis=3)
