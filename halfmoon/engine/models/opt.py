"""OPT (Zhang et al., 2022): learned positions, layer norms before or after each half of a layer, biases everywhere.

Knows nothing of requests or blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from halfmoon.architectures.model_config import Activation, ModelConfig
from halfmoon.engine.attention.attention_backend import AttentionRule
from halfmoon.engine.models.blocks import Blocks
from halfmoon.engine.models.forward_batch import ForwardBatch
from halfmoon.engine.models.linear import Linear, PackLayer, PackWeight, alike, split_rows
from halfmoon.engine.models.model_part import ModelPart, whole_model

_POSITION_OFFSET = 2  # the first two rows of OPT's position table are never used
_TORCH_NUMBERS = 64  # that torch computes at once at most, on a CPU


class OPTModel:
    """Owns the weights of an OPT transformer, or of one rank's part of it."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str, part: ModelPart | None = None) -> None:
        self._part = part = part or whole_model(config)
        self._config = config = part.config
        self.hidden_dtype = dtype
        hidden, width = config.hidden_size, config.embed_proj_dim
        num_embedded = config.vocab_size if part.is_first else 0
        self._embedding = torch.empty(num_embedded, width, dtype=dtype, device=device)
        num_positions = config.max_positions + _POSITION_OFFSET if part.is_first else 0
        self._positions = torch.empty(num_positions, hidden, dtype=dtype, device=device)
        projected = width != hidden
        self._project_in = Linear.empty(hidden, width, False, dtype, device) if projected and part.is_first else None
        self._project_out = Linear.empty(width, hidden, False, dtype, device) if projected and part.is_last else None
        self._layers = [_Layer(part.of_layer(index), dtype, device) for index in range(config.num_layers)]
        self._norm = _Norm(config, dtype, device) if config.final_norm and part.is_last else None
        rows = part.vocab_rows
        tied = config.tie_word_embeddings and part.is_first
        self._head = Linear(
            self._embedding[rows.start : rows.stop] if tied else self._embedding.new_empty(len(rows), width)
        )

    def parameters(self) -> Mapping[str, Tensor]:
        """Views of the weights under their checkpoint names."""
        named: dict[str, Tensor] = {}
        if self._part.is_first:
            named = {"embed_tokens.weight": self._embedding, "embed_positions.weight": self._positions}
        elif self._part.is_last and self._config.tie_word_embeddings:
            named["embed_tokens.weight"] = self._head.weight
        if self._project_in is not None:
            named["project_in.weight"] = self._project_in.weight
        if self._project_out is not None:
            named["project_out.weight"] = self._project_out.weight
        if self._norm is not None:
            named |= self._norm.parameters("final_layer_norm")
        for index, layer in enumerate(self._layers, self._part.shard.layer_start):
            named |= {f"layers.{index}.{name}": view for name, view in layer.parameters().items()}
        named = {f"model.decoder.{name}": view for name, view in named.items()}
        if self._part.is_last and not self._config.tie_word_embeddings:
            named["lm_head.weight"] = self._head.weight
        return named

    def ignores(self, name: str) -> bool:
        """See `Model.ignores`."""
        return False

    def put_blocks(self, name: str, blocks: Blocks) -> bool:
        """See `Model.put_blocks`: no GGUF file of an OPT is read."""
        return False

    def pack(
        self,
        pack_weight: PackWeight,
        pack_head: PackWeight | None = None,
        pack_layer: PackLayer = alike,
        pack_exact: PackWeight | None = None,
    ) -> None:
        """See `Model.pack`."""
        for linear in (self._project_in, self._project_out):
            if linear is not None:
                linear.pack(pack_weight)
        if self._part.is_last:
            self._head.pack(pack_head or pack_weight)
        for index, layer in enumerate(self._layers):
            layer.pack(pack_layer(pack_weight, index))
            layer.pack_kv_projection(pack_weight)

    def keep_kv_projections(self) -> None:
        """Keeps another copy of K's and V's weights for `keys_values`. Call it before `pack`."""
        for layer in self._layers:
            layer.keep_kv_projection()

    def keys_values(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """K and V, each [num_tokens, num_heads, head_dim], from the inputs that `on_inputs` got for a layer."""
        return self._layers[layer].keys_values(x)

    def forward(self, batch: ForwardBatch, kv: Tensor, hidden: Tensor | None = None) -> Tensor:
        """See `Model.forward`."""
        if hidden is None:
            hidden = self._embed(batch)
        for layer, layer_kv in zip(self._layers, kv.unbind(0), strict=True):
            hidden = layer.forward(hidden, layer_kv, batch)
        if not self._part.is_last:
            return hidden
        hidden = hidden[batch.logit_rows]
        if self._norm is not None:
            hidden = self._norm(hidden)
        hidden = hidden if self._project_out is None else self._project_out(hidden)
        if batch.on_outputs is not None:
            batch.on_outputs(hidden)
        return self._head.sums(hidden)

    def _embed(self, batch: ForwardBatch) -> Tensor:
        hidden = functional.embedding(batch.token_ids, self._embedding)  # [num_tokens, embed_proj_dim]
        if self._project_in is not None:
            hidden = self._project_in(hidden)
        return hidden + self._positions[batch.positions + _POSITION_OFFSET]  # [num_tokens, hidden_size]


class _Layer:
    def __init__(self, part: ModelPart, dtype: torch.dtype, device: str) -> None:
        self._config = config = part.config
        hidden, inner = config.hidden_size, config.intermediate_size
        self._attention_norm = _Norm(config, dtype, device)
        self._qkv = part.linear(3 * config.q_size, hidden, config.qkv_bias, dtype, device)
        self._output = part.summed(part.linear(hidden, config.q_size, config.output_bias, dtype, device))
        self._mlp_norm = _Norm(config, dtype, device)
        self._up = part.linear(inner, hidden, config.mlp_bias, dtype, device)
        self._down = part.summed(part.linear(hidden, inner, config.mlp_bias, dtype, device))
        self._activation = _activation(config.activation)
        self._kv: Linear | None = None  # the K and V rows of `_qkv`, if they are needed alone

    def parameters(self) -> dict[str, Tensor]:
        hidden = self._config.hidden_size
        named = split_rows(self._qkv, {f"self_attn.{part}_proj": self._config.q_size for part in ("q", "k", "v")})
        named |= split_rows(self._output, {"self_attn.out_proj": hidden})
        named |= split_rows(self._up, {"fc1": self._config.intermediate_size})
        named |= split_rows(self._down, {"fc2": hidden})
        named |= self._attention_norm.parameters("self_attn_layer_norm")
        return named | self._mlp_norm.parameters("final_layer_norm")

    def pack(self, pack_weight: PackWeight) -> None:
        for linear in (self._qkv, self._output, self._up, self._down):
            linear.pack(pack_weight)

    def keep_kv_projection(self) -> None:
        first, bias = self._config.q_size, self._qkv.bias
        weight = self._qkv.weight[first:].to(self._attention_norm.device, copy=True)
        self._kv = Linear(weight, None if bias is None else bias[first:].clone())

    def pack_kv_projection(self, pack_weight: PackWeight) -> None:
        """It stays on the device: KV may be read at any time."""
        if self._kv is not None:
            self._kv.pack(pack_weight)

    def keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        assert self._kv is not None, "keep_kv_projection was not called"
        k, v = self._kv(x).view(x.shape[0], 2, -1, self._config.head_dim).unbind(1)
        return k, v

    def forward(self, hidden: Tensor, layer_kv: Tensor, batch: ForwardBatch) -> Tensor:
        if self._config.norm_before:
            hidden = hidden + self._attention(self._attention_norm(hidden), layer_kv, batch)
            return hidden + self._mlp(self._mlp_norm(hidden))
        hidden = self._attention_norm(hidden + self._attention(hidden, layer_kv, batch))
        return self._mlp_norm(hidden + self._mlp(hidden))

    def _attention(self, x: Tensor, layer_kv: Tensor, batch: ForwardBatch) -> Tensor:
        if batch.on_inputs is not None:
            batch.on_inputs(x)
        head_dim = self._config.head_dim
        q, k, v = self._qkv(x).view(x.shape[0], 3, -1, head_dim).unbind(1)  # each [num_tokens, num_heads, head_dim]
        return self._output(batch.attention.attend(q, k, v, layer_kv, AttentionRule(head_dim**-0.5)))

    def _mlp(self, x: Tensor) -> Tensor:
        return self._down(self._activation(self._up(x)))


class _Norm:
    """A layer norm, with weight and bias unless the model has plain norms."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str) -> None:
        self._eps = config.norm_eps
        self._affine = config.norm_affine
        self._weight = torch.ones(config.hidden_size, dtype=dtype, device=device)
        self._bias = torch.zeros(config.hidden_size, dtype=dtype, device=device)

    @property
    def device(self) -> torch.device:
        return self._weight.device

    def parameters(self, name: str) -> dict[str, Tensor]:
        return {f"{name}.weight": self._weight, f"{name}.bias": self._bias} if self._affine else {}

    def __call__(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, self._weight.shape, self._weight, self._bias, self._eps)


def _activation(name: Activation) -> Callable[[Tensor], Tensor]:
    if name == "relu":
        return torch.relu
    approximate = "tanh" if name == "gelu_new" else "none"

    def gelu(x: Tensor) -> Tensor:
        """Of each row, whichever others are there: torch computes a tensor's last few numbers by another formula."""
        width = x.shape[-1]
        if width % _TORCH_NUMBERS == 0:
            return functional.gelu(x, approximate=approximate)
        return functional.gelu(functional.pad(x, (0, -width % _TORCH_NUMBERS)), approximate=approximate)[..., :width]

    return gelu
