"""Our transformers. A model owns its weights; the KV memory and the batch are handed to `forward`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from halfmoon.engine.attention_backend import StepAttention
from halfmoon.engine.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """All rows of one forward pass, the sequences one after the other."""

    token_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    logit_rows: Tensor  # [num_logits] int64, the rows whose logits are wanted
    attention: StepAttention


class Model(Protocol):
    """What the runner needs of a transformer."""

    def parameters(self) -> Mapping[str, Tensor]:
        """Views of the weights under the names (and with the shapes) they have in a checkpoint."""
        ...

    def pack(self) -> None:
        """Re-orders the weights for speed; `parameters` is of no use afterwards."""
        ...

    def forward(self, batch: ForwardBatch, kv: Tensor) -> Tensor:
        """Logits [num_logits, vocab_size]; kv: [num_layers, 2, num_kv_heads, num_slots, head_dim]."""
        ...


def build_model(config: ModelConfig, dtype: torch.dtype, device: str) -> Model:
    """An uninitialised model of the configuration's family."""
    from halfmoon.engine.models.llama import LlamaModel
    from halfmoon.engine.models.opt import OPTModel

    return (LlamaModel if config.family == "llama" else OPTModel)(config, dtype, device)
