"""The interface of an attention back end: it prepares a step's spans as tensors once, and attends with them.

There are four implementations: `sdpa` (`attention.py`: CPU, and the reference), `native` (`native/attention.py`: CPU),
`triton` (`triton_attention.py`: CUDA) and `flex` (`flex_attention.py`). `attention_table.py` says which attends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class TokenSpan(NamedTuple):
    """One sequence's rows in a step: its tokens `start`..`end`. A step's rows are those of its spans in order."""

    blocks: Sequence[int]  # hold at least the sequence's tokens 0..end
    start: int
    end: int


class AttentionRule(NamedTuple):
    """How one layer makes its scores from queries and keys, and which keys its tokens see."""

    scale: float
    window: int | None = None  # the latest tokens that a token sees, itself included; None: all
    softcap: float | None = None  # a scaled score x becomes softcap * tanh(x / softcap)
    # Attention over latents (MLA): K and V of a token are the two halves of one row, the key of all query heads; its
    # first `latent_size` numbers are the value.
    latent_size: int | None = None

    def out_size(self, query_size: int) -> int:
        """Numbers that each query head gets, with queries of this size."""
        return self.latent_size or query_size

    def keys(self, numbers: Tensor) -> Tensor:
        """Keys [num_kv_heads, num_keys, key_size] of numbers: [2, num_kv_heads, num_keys, head_dim]."""
        return numbers[0] if self.latent_size is None else torch.cat((numbers[0], numbers[1]), dim=-1)

    def keys_and_values(self, numbers: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
        """Keys and values of each query head, [num_heads, num_keys, …]; of latents all heads have the same, [1, …]."""
        if self.latent_size is not None:
            keys = self.keys(numbers)
            return keys, keys[..., : self.latent_size]
        keys, values = numbers.repeat_interleave(num_heads // numbers.shape[1], dim=1)
        return keys, values

    def scores(self, q: Tensor, keys: Tensor) -> Tensor:
        """Scaled and capped scores [..., num_rows, num_keys].

        q: [..., num_rows, key_size]; keys: [..., num_keys, key_size].
        """
        scores = q @ keys.transpose(-2, -1) * self.scale
        return scores if self.softcap is None else torch.tanh(scores / self.softcap) * self.softcap


class StepAttention(Protocol):
    """One step's rows, prepared for one back end: made once a step, called once a layer, in order."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer_kv: Tensor, rule: AttentionRule) -> Tensor:
        """Stores K and V, then attends causally: every row over its own sequence.

        q: [num_tokens, num_heads, head_dim]; k, v: [num_tokens, num_kv_heads, head_dim]; layer_kv: [2, num_kv_heads,
        num_slots, row_items], in the model's dtype or quantised (`split_memory`). Returns [num_tokens, num_heads *
        head_dim]. With latents, q has 2 * head_dim numbers a head, and what is returned `latent_size`.
        """


class AttentionBackend(Protocol):
    """Prepares steps. Knows the arena's block size and device, nothing of requests or weights."""

    def step(self, spans: Sequence[TokenSpan]) -> StepAttention:
        """Prepares attention for `spans`: computed and copied to the device once."""
