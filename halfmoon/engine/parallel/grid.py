"""Ranks in a grid of pipeline stages and tensor ranks, and each one's part of the model. No torch.

Rank `stage * tensor_size + tensor_rank`; rank 0 embeds the tokens, the last stage computes the logits. Sequence ranks
are not in a grid: each has the whole model, and computes some of the tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from halfmoon.architectures.model_config import ModelConfig
from halfmoon.kv.kv_layout import Shard
from halfmoon.policy.parallelism import check_parallelism


@dataclass(frozen=True, slots=True)
class Grid:
    """`pipeline_size` stages of `tensor_size` ranks each, or `sequence_size` ranks with the whole model."""

    tensor_size: int
    pipeline_size: int
    sequence_size: int = 1  # more than 1 only if the others are 1

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.tensor_size * self.pipeline_size * self.sequence_size

    @property
    def ranks(self) -> Iterator[int]:
        """All ranks, the first stage first."""
        return iter(range(self.size))

    def stage(self, rank: int) -> int:
        """The pipeline stage of `rank`."""
        return 0 if self.sequence_size > 1 else rank // self.tensor_size

    def tensor_rank(self, rank: int) -> int:
        """The position of `rank` within its stage."""
        return rank % self.tensor_size

    def check(self, config: ModelConfig) -> None:
        """Raises Incompatible unless heads, inner units and layers can be distributed evenly enough."""
        check_parallelism(
            self.tensor_size,
            self.pipeline_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            intermediate_size=config.divided_inner,
            num_layers=config.num_layers,
        )

    def shard(self, config: ModelConfig, rank: int) -> Shard:
        """The layers and KV heads of `rank`.

        If the layers do not divide evenly, the first stages have one more: the last one also has the head. With more
        tensor ranks than KV heads, neighbouring ranks hold the same KV head (with different query heads).
        """
        stage, tensor_rank = self.stage(rank), self.tensor_rank(rank)
        each, rest = divmod(config.num_layers, self.pipeline_size)
        layer_start = stage * each + min(stage, rest)
        head_start = tensor_rank * config.num_kv_heads // self.tensor_size
        num_heads = max(config.num_kv_heads // self.tensor_size, 1)
        return Shard(layer_start, layer_start + each + (stage < rest), head_start, head_start + num_heads)

    def is_first_holder(self, config: ModelConfig, rank: int) -> bool:
        """Whether no lower rank of the stage holds the same KV heads: reading one copy of each suffices."""
        copies = max(self.tensor_size // config.num_kv_heads, 1)
        return self.tensor_rank(rank) % copies == 0
