"""One layer: attention and a perceptron, each behind an RMS norm; with Gemma each before another one, too."""

from __future__ import annotations

import torch
from torch import Tensor

from halfmoon.engine.attention.attention_backend import StepAttention
from halfmoon.engine.models.blocks import Blocks
from halfmoon.engine.models.layer_ops import LayerOps, LayerWeights, Rotation
from halfmoon.engine.models.layers.gated_mlp import DenseMlp
from halfmoon.engine.models.layers.grouped_attention import GroupedAttention
from halfmoon.engine.models.layers.latent_attention import LatentAttention
from halfmoon.engine.models.layers.mixture import Mixture
from halfmoon.engine.models.layers.normed_product import normed_product
from halfmoon.engine.models.linear import PackWeight, put_rows, split_rows
from halfmoon.engine.models.model_part import ModelPart

_NORMS = ("input_layernorm", "post_attention_layernorm")
_NORMS_OF_FOUR = (
    "input_layernorm",
    "pre_feedforward_layernorm",
    "post_attention_layernorm",
    "post_feedforward_layernorm",
)


class DecoderLayer:
    """Owns one layer's weights. `index` counts the layers of its part."""

    def __init__(self, part: ModelPart, index: int, dtype: torch.dtype, device: str, ops: LayerOps) -> None:
        self._config = config = part.config
        self._ops = ops
        wide = torch.float32 if config.norm_offset else dtype
        names = _NORMS_OF_FOUR if config.post_norms else _NORMS
        # Those before attention and perceptron; with four norms then those behind them. Each [hidden_size].
        self._norms = {f"{name}.weight": torch.empty(config.hidden_size, dtype=wide, device=device) for name in names}
        self._input_norm, self._mlp_norm, *self._post_norms = self._norms.values()
        self._attention: GroupedAttention | LatentAttention
        if config.latent is not None:
            self._attention = LatentAttention(part, config.latent, dtype, device, ops)
        else:
            self._attention = GroupedAttention(part, config.window(index), dtype, device, ops)
        experts = config.experts
        self._mlp: DenseMlp | Mixture
        if experts is not None and experts.in_layer[index]:
            self._mlp = Mixture(part, experts, dtype, device, ops)
        else:
            self._mlp = DenseMlp(part, dtype, device, ops)
        self._matrices = (*self._attention.matrices, *self._mlp.matrices)

    def parameters(self) -> dict[str, Tensor]:
        """Views of the weights under their checkpoint names, without the layer's."""
        named = self._norms | self._attention.tensors | self._mlp.tensors
        for linear, sizes in (*self._matrices, *self._mlp.exact):
            named |= split_rows(linear, sizes)
        return named

    def put_blocks(self, name: str, blocks: Blocks) -> bool:
        """See `Model.put_blocks`."""
        return any(put_rows(linear, sizes, name, blocks) for linear, sizes in self._matrices)

    def pack(self, pack_weight: PackWeight, pack_exact: PackWeight | None) -> None:
        """See `Model.pack`."""
        self._attention.arrange()
        for linear, _ in self._matrices:
            linear.pack(pack_weight)
        if pack_exact is not None:
            for linear, _ in self._mlp.exact:
                linear.pack(pack_exact)
        if self._config.norm_offset:
            for norm in (self._norms | self._attention.tensors).values():
                norm += 1

    def weights(self) -> LayerWeights | None:
        """What kernels that compute whole layers need; None for a layer that is not Llama's."""
        config, attention, mlp = self._config, self._attention, self._mlp
        if isinstance(mlp, Mixture) or isinstance(attention, LatentAttention):
            return None
        if config.post_norms or config.activation != "silu" or config.rotary_size != config.head_dim:
            return None
        q_norm, k_norm = attention.tensors.values() if attention.tensors else (None, None)
        matrices = (attention.first, attention.output, mlp.gate_up, mlp.down)
        return LayerWeights(self._input_norm, self._mlp_norm, q_norm, k_norm, matrices)

    def forward(
        self, hidden: Tensor, delta: Tensor | None, rotation: Rotation, layer_kv: Tensor, attention: StepAttention
    ) -> tuple[Tensor, Tensor]:
        """Takes hidden [num_tokens, hidden_size] without the last layer's `delta`; returns it without this layer's."""
        eps = self._config.norm_eps
        heads, hidden = normed_product(self._ops, self._attention.first, delta, hidden, self._input_norm, eps)
        delta = self._attention.attend(heads, rotation, layer_kv, attention)
        if not self._post_norms:
            delta, hidden = self._mlp.after_norm(delta, hidden, self._mlp_norm)
            return hidden, delta
        attention_norm, mlp_norm = self._post_norms
        delta = self._ops.rms_norm(delta, attention_norm, eps)
        delta, hidden = self._mlp.after_norm(delta, hidden, self._mlp_norm)
        return hidden, self._ops.rms_norm(delta, mlp_norm, eps)
