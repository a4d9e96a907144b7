"""Which tokens of a step each rank of a sequence-parallel worker computes, and which keys it holds. No torch.

A token belongs to the rank in whose memory its block lies. So the shares follow from the blocks of the chunks alone,
and every rank knows those of all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from halfmoon.engine.chunk import Chunk
from halfmoon.engine.scheduling.spread_pool import own_id, rank_of


class Run(NamedTuple):
    """Consecutive positions of one sequence, in one rank's memory; `slot` is that of the first."""

    start: int
    end: int
    slot: int

    @property
    def length(self) -> int:
        """Number of positions."""
        return self.end - self.start


class TokenShares:
    """One step's chunks, shared out to `num_ranks` ranks with blocks of `block_tokens`."""

    def __init__(self, chunks: Sequence[Chunk], block_tokens: int, num_ranks: int) -> None:
        self.chunks = chunks
        self._block_tokens = block_tokens
        self._num_ranks = num_ranks
        # Whether each chunk's tokens and all keys before them are on one rank, so that ranks exchange nothing.
        self.is_local = all(
            len({rank_of(block, num_ranks) for block in chunk.blocks[: -(-chunk.end // block_tokens)]}) == 1
            for chunk in chunks
        )
        self._rows = [[self._runs(chunk, rank, chunk.start) for chunk in chunks] for rank in range(num_ranks)]

    def rows(self, rank: int) -> list[list[Run]]:
        """The tokens that `rank` computes, by chunk."""
        return self._rows[rank]

    def num_rows(self, rank: int) -> int:
        """Number of tokens that `rank` computes."""
        return sum(run.length for runs in self._rows[rank] for run in runs)

    def keys(self, rank: int, window: int | None) -> list[list[Run]]:
        """The keys on `rank`, by chunk, in order of position, that any token of the step sees."""
        starts = (0 if window is None else max(chunk.start - window + 1, 0) for chunk in self.chunks)
        return [self._runs(chunk, rank, start) for chunk, start in zip(self.chunks, starts, strict=True)]

    def own_chunks(self, rank: int) -> list[Chunk]:
        """The chunks of a local step that `rank` computes, with the block ids of its memory."""
        return [
            Chunk(chunk.token_ids, chunk.start, [own_id(b, self._num_ranks) for b in chunk.blocks], chunk.num_logits)
            for chunk, runs in zip(self.chunks, self._rows[rank], strict=True)
            if runs
        ]

    def logit_places(self, rank: int) -> list[tuple[int, int]]:
        """Of the wanted logits whose tokens `rank` computes: the row there, and the place among all of the step."""
        places = []
        first_row = 0
        ends = accumulate(chunk.num_logits for chunk in self.chunks)
        for chunk, runs, end in zip(self.chunks, self._rows[rank], ends, strict=True):
            for run in runs:
                first = max(run.start, chunk.end - chunk.num_logits)
                places += [(first_row + p - run.start, end - chunk.end + p) for p in range(first, run.end)]
                first_row += run.length
        return places

    def _runs(self, chunk: Chunk, rank: int, start: int) -> list[Run]:
        """Positions from `start` to the chunk's end on `rank`, neighbouring ones joined."""
        runs: list[Run] = []
        size = self._block_tokens
        for index in range(start // size, -(-chunk.end // size)):
            block = chunk.blocks[index]
            if rank_of(block, self._num_ranks) != rank:
                continue
            first, end = max(start, index * size), min(chunk.end, (index + 1) * size)
            slot = own_id(block, self._num_ranks) * size + first % size
            if runs and runs[-1].end == first and runs[-1].slot + runs[-1].length == slot:
                runs[-1] = runs[-1]._replace(end=end)
            else:
                runs.append(Run(first, end, slot))
        return runs
