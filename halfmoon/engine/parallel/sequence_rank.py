"""One rank of a sequence-parallel worker: the whole model, some of the blocks, and the tokens that belong into them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from halfmoon.engine.checkpoint.checkpoint import Checkpoint
from halfmoon.engine.chunk import Chunk
from halfmoon.engine.config import EngineConfig
from halfmoon.engine.kv_memory.kv_watch import LayerWatch
from halfmoon.engine.models.forward_batch import ForwardBatch
from halfmoon.engine.models.weights import Progress
from halfmoon.engine.parallel.grid import Grid
from halfmoon.engine.parallel.links import Links
from halfmoon.engine.parallel.rank import Rank, StepRank
from halfmoon.engine.parallel.ring_attention import RingAttention
from halfmoon.engine.parallel.token_shares import TokenShares


@dataclass(frozen=True, slots=True)
class SharedBatch:
    """One rank's part of a step."""

    shares: TokenShares
    own: ForwardBatch | None  # None: it computes nothing, and no other rank needs it
    reaches_all: bool  # whether this rank's progress through the layers is that of all ranks

    @property
    def num_spread_tokens(self) -> int:
        """Tokens of a step in which ranks exchange keys or queries; 0 in others."""
        return 0 if self.shares.is_local else sum(len(chunk.token_ids) for chunk in self.shares.chunks)


class SequenceRank:
    """Computes a rank's share of each step, and exchanges what attention needs. Owns nothing of its own but `Rank`."""

    def __init__(self, rank: Rank, index: int, num_ranks: int) -> None:
        self._rank, self._index, self._num_ranks = rank, index, num_ranks
        self.memory, self.runner, self.abort = rank.memory, rank.runner, rank.abort
        self.offload = None  # `EngineConfig` refuses it
        self.weights = rank.weights

    @torch.inference_mode()
    def batch(self, chunks: Sequence[Chunk]) -> SharedBatch:
        """This rank's tokens of a step over `chunks`; involves no other rank.

        Prompts that are on one rank each are computed there as by an engine of one rank. In another step a rank without
        tokens computes one row for nothing: its keys are needed in every layer.
        """
        shares = TokenShares(chunks, self._rank.block_tokens, self._num_ranks)
        if shares.is_local:
            own = shares.own_chunks(self._index)
            return SharedBatch(shares, self.runner.batch(own) if own else None, reaches_all=False)
        tokens: list[int] = []
        positions: list[int] = []
        for chunk, runs in zip(chunks, shares.rows(self._index), strict=True):
            for run in runs:
                tokens += chunk.token_ids[run.start - chunk.start : run.end - chunk.start]
                positions += range(run.start, run.end)
        batch = ForwardBatch(
            token_ids=self._tensor(tokens or [0]),
            positions=self._tensor(positions or [0]),
            logit_rows=self._tensor([row for row, _ in shares.logit_places(self._index)]),
            attention=RingAttention(shares, self._index, self._num_ranks, self._rank.links),
        )
        return SharedBatch(shares, batch, reaches_all=bool(tokens))

    @torch.inference_mode()
    def compute(self, batch: SharedBatch, watch: LayerWatch | None = None) -> Tensor | None:
        """See `Rank.compute`. `watch` is notified only where a layer done here is done on all ranks."""
        logits = None
        if batch.own is not None:
            logits = self.runner.forward(batch.own, None, watch if batch.reaches_all else None)
            self.runner.finish()  # see `Rank.compute`
        places = [[place for _, place in batch.shares.logit_places(rank)] for rank in range(self._num_ranks)]
        num_logits = sum(map(len, places))
        if self._index:
            if places[self._index]:
                assert logits is not None
                self._rank.links.send_rows(logits)
            return None
        if not num_logits:
            return None
        whole = self._rank.empty_logits(num_logits)
        for rank, where in enumerate(places):
            if where:
                rows = logits if rank == 0 else self._rank.links.receive_rows(self._rank.empty_logits(len(where)), rank)
                assert rows is not None
                whole[torch.tensor(where, device=whole.device)] = rows
        return whole

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._rank.arena.tensor.device)


def load_rank(
    checkpoint: Checkpoint,
    config: EngineConfig,
    grid: Grid,
    index: int,
    links: Links,
    on_progress: Progress | None = None,
) -> StepRank:
    """Rank `index` of `grid`; see `Rank`."""
    rank = Rank(checkpoint, config, grid, index, links, on_progress)
    return rank if grid.sequence_size == 1 else SequenceRank(rank, index, grid.sequence_size)
