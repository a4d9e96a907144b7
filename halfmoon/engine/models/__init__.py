"""Our transformers. A model owns its weights; the KV memory and the batch are passed to `forward`.

Read in this order: llama, opt, layers, embedding, linear, blocks, layer_ops, rotary, weights, model_part, triton_ops.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from halfmoon.architectures.model_config import ModelConfig
from halfmoon.engine.models.forward_batch import ForwardBatch
from halfmoon.errors import Incompatible
from halfmoon.host_limits import free_memory_bytes

if TYPE_CHECKING:
    from halfmoon.engine.models.blocks import Blocks
    from halfmoon.engine.models.layer_ops import LayerOps
    from halfmoon.engine.models.linear import PackLayer, PackWeight
    from halfmoon.engine.models.model_part import ModelPart

_TOO_LARGE = ("can't allocate memory", "Storage size calculation overflowed")  # in torch's words


class Model(Protocol):
    """The interface of a transformer to the runner."""

    hidden_dtype: torch.dtype  # of the hidden states between its parts

    def parameters(self) -> Mapping[str, Tensor]:
        """Views of the weights under the names (and with the shapes) they have in a checkpoint."""

    def ignores(self, name: str) -> bool:
        """Whether a checkpoint has the tensor `name` for something that we do not compute."""

    def put_blocks(self, name: str, blocks: Blocks) -> bool:
        """Takes the weight `name` of `parameters` in blocks instead of numbers; returns whether it can."""

    def pack(
        self,
        pack_weight: PackWeight,
        pack_head: PackWeight | None = None,
        pack_layer: PackLayer = ...,
        pack_exact: PackWeight | None = None,
    ) -> None:
        """Reorders all matrices for speed; `parameters` cannot be used afterwards.

        pack_head: for the head; pack_layer: makes what the matrices of a layer are packed by; pack_exact: for what is
        never rounded, which stays plain without it.
        """

    def forward(self, batch: ForwardBatch, kv: Tensor, hidden: Tensor | None = None) -> Tensor:
        """Logits [num_logits, vocab_size] float32; kv: [num_layers, 2, num_kv_heads, num_slots, head_dim].

        A part that is not the model's first is given the hidden states [num_tokens, hidden_size] of the part before it,
        which it may overwrite; one that is not the last returns hidden states.
        """


def build_model(
    config: ModelConfig,
    dtype: torch.dtype,
    device: str,
    ops: LayerOps | None = None,
    part: ModelPart | None = None,
) -> Model:
    """An uninitialised model of the configuration's family, or the `part` of it that one rank computes.

    `ops` are the Llama layers' functions between their matrix products; plain torch by default. Raises Incompatible if
    a CPU's memory does not hold it.
    """
    from halfmoon.engine.models.layer_ops import TORCH_OPS
    from halfmoon.engine.models.llama import LlamaModel
    from halfmoon.engine.models.opt import OPTModel

    try:
        if config.family != "llama":
            return OPTModel(config, dtype, device, part)
        return LlamaModel(config, dtype, device, ops or TORCH_OPS, part)
    except RuntimeError as error:  # torch has no narrower one
        if device not in ("cpu", "meta") or not any(sign in str(error) for sign in _TOO_LARGE):
            raise
        raise Incompatible(
            f"this host has no memory for the model of {config.num_layers} layers, {config.hidden_size} wide, with "
            f"{config.vocab_size} tokens and {config.context_tokens} positions; {free_memory_bytes() >> 20} MiB are "
            "free: if its config.json is right, take a smaller model or a larger host, or make max_context_tokens "
            "smaller",
            param="model",
        ) from error
