"""Our transformers. A model owns its weights; the KV memory and the batch are handed to `forward`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from halfmoon.engine.attention_backend import StepAttention
from halfmoon.engine.model_config import ModelConfig

if TYPE_CHECKING:
    from halfmoon.engine.models.layer_ops import LayerOps
    from halfmoon.engine.models.linear import PackWeight
    from halfmoon.engine.models.part import ModelPart


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """All rows of one forward pass, the sequences one after the other."""

    token_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    logit_rows: Tensor  # [num_logits] int64, the rows whose logits are wanted
    attention: StepAttention
    on_inputs: Callable[[Tensor], None] | None = (
        None  # hears what each OPT layer makes Q, K and V of, before it attends
    )


class Model(Protocol):
    """What the runner needs of a transformer."""

    def parameters(self) -> Mapping[str, Tensor]:
        """Views of the weights under the names (and with the shapes) they have in a checkpoint."""
        ...

    def pack(self, pack_weight: PackWeight) -> None:
        """Re-orders all matrices for speed; `parameters` is of no use afterwards."""
        ...

    def forward(self, batch: ForwardBatch, kv: Tensor, hidden: Tensor | None = None) -> Tensor:
        """Logits [num_logits, vocab_size]; kv: [num_layers, 2, num_kv_heads, num_slots, head_dim].

        A part that is not the model's first is given the hidden states [num_tokens, hidden_size] of the one before;
        one that is not the last returns them.
        """
        ...


def build_model(
    config: ModelConfig,
    dtype: torch.dtype,
    device: str,
    ops: LayerOps | None = None,
    part: ModelPart | None = None,
) -> Model:
    """An uninitialised model of the configuration's family, or the `part` of it that one rank computes.

    `ops` is what Llama layers do between their matrix products; plain torch if not given.
    """
    from halfmoon.engine.models.layer_ops import TORCH_OPS
    from halfmoon.engine.models.llama import LlamaModel
    from halfmoon.engine.models.opt import OPTModel

    if config.family != "llama":
        return OPTModel(config, dtype, device, part)
    return LlamaModel(config, dtype, device, ops or TORCH_OPS, part)
