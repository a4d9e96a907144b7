"""The interface of an attention back end: it prepares a step's spans as tensors once, and attends with them.

There are two implementations: `sdpa` (`attention.py`: CPU, and the reference) and `triton` (`triton_attention.py`:
CUDA).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor


class TokenSpan(NamedTuple):
    """One sequence's rows in a step: its tokens `start`..`end`. A step's rows are those of its spans in order."""

    blocks: Sequence[int]  # hold at least the sequence's tokens 0..end
    start: int
    end: int


class StepAttention(Protocol):
    """One step's rows, prepared for one back end: made once a step, called once a layer, in order."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer_kv: Tensor, scale: float) -> Tensor:
        """Stores K and V, then attends causally: every row over its own sequence.

        q: [num_tokens, num_heads, head_dim]; k, v: [num_tokens, num_kv_heads, head_dim]; layer_kv: [2, num_kv_heads,
        num_slots, row_items], in the model's dtype or int8 (`KVLayout`). Returns [num_tokens, num_heads * head_dim].
        """
        ...


class AttentionBackend(Protocol):
    """Prepares steps. Knows the arena's block size and device, nothing of requests or weights."""

    def step(self, spans: Sequence[TokenSpan]) -> StepAttention:
        """Prepares attention for `spans`: computed and copied to the device once."""
        ...
