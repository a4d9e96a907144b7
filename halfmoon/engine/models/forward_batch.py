"""The rows of one forward pass, as every model takes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from halfmoon.engine.attention.attention_backend import StepAttention


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """All rows of one forward pass, sequence by sequence."""

    token_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    logit_rows: Tensor  # [num_logits] int64, the rows whose logits are needed
    attention: StepAttention
    on_outputs: Callable[[Tensor], None] | None = None  # called with what the head gets, [num_logits, hidden_size]
    on_inputs: Callable[[Tensor], None] | None = None  # called with each OPT layer's attention input
