"""The Llama family: Llama, SmolLM2, Mistral, Qwen2 (biases on Q, K, V) and Qwen3 (norms on query and key heads).

Q, K, V are fused into one matrix, and so are gate and up. Knows nothing of requests or blocks.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from halfmoon.engine.attention.attention_backend import StepAttention
from halfmoon.engine.checkpoint.model_config import ModelConfig
from halfmoon.engine.models.blocks import Blocks
from halfmoon.engine.models.embedding import Embedding
from halfmoon.engine.models.forward_batch import ForwardBatch
from halfmoon.engine.models.layer_ops import LayerOps, LayerWeights, Rotation, RunLayers
from halfmoon.engine.models.linear import Linear, PackWeight, put_rows, split_rows
from halfmoon.engine.models.model_part import ModelPart, whole_model
from halfmoon.engine.models.rotary import Rotary


class LlamaModel:
    """Owns the weights of a Llama-family transformer, or of one rank's part of it."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: str, ops: LayerOps, part: ModelPart | None = None
    ) -> None:
        self._part = part = part or whole_model(config)
        self._config = config = part.config
        self._ops = ops
        num_embedded = config.vocab_size if part.is_first else 0
        self._embedding = Embedding(num_embedded, config.hidden_size, dtype, device)
        self._layers = [_Layer(part, dtype, device, ops) for _ in range(config.num_layers)]
        self._norm = torch.empty(config.hidden_size, dtype=dtype, device=device)
        rows = part.vocab_rows
        self._is_tied = config.tie_word_embeddings and part.is_first
        self._head = Linear(
            self._embedding.weight[rows.start : rows.stop]
            if self._is_tied
            else self._embedding.weight.new_empty(len(rows), config.hidden_size)
        )
        self._rotary = Rotary(config, dtype, device)
        self._all_layers: RunLayers | None = None  # once packed

    def parameters(self) -> Mapping[str, Tensor]:
        """Views of the weights under their checkpoint names."""
        named: dict[str, Tensor] = {}
        if self._part.is_first:
            named["model.embed_tokens.weight"] = self._embedding.weight
        if self._part.is_last:
            named["model.norm.weight"] = self._norm
            if not self._config.tie_word_embeddings:
                named["lm_head.weight"] = self._head.weight
            elif not self._part.is_first:
                named["model.embed_tokens.weight"] = self._head.weight
        for index, layer in enumerate(self._layers, self._part.shard.layer_start):
            named |= {f"model.layers.{index}.{name}": view for name, view in layer.parameters().items()}
        return named

    def put_blocks(self, name: str, blocks: Blocks) -> bool:
        """See `Model.put_blocks`."""
        if name == "model.embed_tokens.weight" and self._part.is_first:
            self._embedding.put_blocks(blocks)
            if self._is_tied and self._part.is_last:
                rows = self._part.vocab_rows
                self._head.put_blocks(0, blocks.cut(name, (slice(rows.start, rows.stop),)))
            return True
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            self._head.put_blocks(0, blocks)
            return True
        parts = name.split(".", 3)
        if parts[:2] != ["model", "layers"]:
            return False
        return self._layers[int(parts[2]) - self._part.shard.layer_start].put_blocks(parts[3], blocks)

    def pack(self, pack_weight: PackWeight, pack_head: PackWeight | None = None) -> None:
        """See `Model.pack`."""
        if self._part.is_last:
            self._head.pack(pack_head or pack_weight)
        if self._part.is_first:
            has_all = self._is_tied and len(self._part.vocab_rows) == self._config.vocab_size
            self._embedding.pack(pack_weight, self._head.row_source if has_all else None)
        for layer in self._layers:
            layer.pack(pack_weight)
        if self._part.all_reduce is None and self._layers:
            self._all_layers = self._ops.join([layer.weights() for layer in self._layers], self._config, self._rotary)

    def forward(self, batch: ForwardBatch, kv: Tensor, hidden: Tensor | None = None) -> Tensor:
        """See `Model.forward`."""
        if hidden is None:
            hidden = self._embedding(batch.token_ids)  # [num_tokens, hidden_size]
        hidden, delta = self._through_layers(hidden, batch, kv)
        if not self._part.is_last:
            return hidden + delta
        rows = batch.logit_rows
        normed = self._ops.add_rms_norm(delta[rows], hidden[rows], self._norm, self._config.norm_eps)[0]
        if batch.on_outputs is not None:
            batch.on_outputs(normed)
        return self._head(normed)

    def _through_layers(self, hidden: Tensor, batch: ForwardBatch, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the last layer's contribution apart: its addition is fused with the next norm."""
        if self._all_layers is not None and self._all_layers.takes(batch.attention):
            return self._all_layers.run(hidden, batch.positions, batch.attention, kv)
        rotation = self._ops.rotation(self._rotary, batch.positions)
        delta = None
        for layer, layer_kv in zip(self._layers, kv.unbind(0), strict=True):
            hidden, delta = layer.forward(hidden, delta, rotation, layer_kv, batch.attention)
        assert delta is not None, "a model without layers"
        return hidden, delta


class _Layer:
    def __init__(self, part: ModelPart, dtype: torch.dtype, device: str, ops: LayerOps) -> None:
        self._config = config = part.config
        self._ops = ops
        hidden, inner = config.hidden_size, config.intermediate_size
        qkv_size = config.q_size + 2 * config.kv_size
        self._input_norm = torch.empty(hidden, dtype=dtype, device=device)
        self._qkv = Linear.empty(qkv_size, hidden, config.qkv_bias, dtype, device)
        self._q_norm = torch.empty(config.head_dim, dtype=dtype, device=device)
        self._k_norm = torch.empty(config.head_dim, dtype=dtype, device=device)
        self._output = part.summed(Linear.empty(hidden, config.q_size, config.output_bias, dtype, device))
        self._mlp_norm = torch.empty(hidden, dtype=dtype, device=device)
        self._gate_up = Linear.empty(2 * inner, hidden, config.mlp_bias, dtype, device)
        self._down = part.summed(Linear.empty(hidden, inner, config.mlp_bias, dtype, device))

    def parameters(self) -> dict[str, Tensor]:
        config = self._config
        named = {"input_layernorm.weight": self._input_norm, "post_attention_layernorm.weight": self._mlp_norm}
        if config.qk_norm:
            named |= {"self_attn.q_norm.weight": self._q_norm, "self_attn.k_norm.weight": self._k_norm}
        for linear, sizes in self._matrices():
            named |= split_rows(linear, sizes)
        return named

    def put_blocks(self, name: str, blocks: Blocks) -> bool:
        return any(put_rows(linear, sizes, name, blocks) for linear, sizes in self._matrices())

    def _matrices(self) -> tuple[tuple[Linear, dict[str, int]], ...]:
        """Each matrix with the rows of the checkpoint's matrices that it fuses."""
        config = self._config
        qkv = {"q": config.q_size, "k": config.kv_size, "v": config.kv_size}
        inner = config.intermediate_size
        return (
            (self._qkv, {f"self_attn.{part}_proj": size for part, size in qkv.items()}),
            (self._output, {"self_attn.o_proj": config.hidden_size}),
            (self._gate_up, {"mlp.gate_proj": inner, "mlp.up_proj": inner}),
            (self._down, {"mlp.down_proj": config.hidden_size}),
        )

    def pack(self, pack_weight: PackWeight) -> None:
        for linear, _ in self._matrices():
            linear.pack(pack_weight)

    def weights(self) -> LayerWeights:
        q_norm, k_norm = (self._q_norm, self._k_norm) if self._config.qk_norm else (None, None)
        matrices = (self._qkv, self._output, self._gate_up, self._down)
        return LayerWeights(self._input_norm, self._mlp_norm, q_norm, k_norm, matrices)

    def forward(
        self, hidden: Tensor, delta: Tensor | None, rotation: Rotation, layer_kv: Tensor, batch: StepAttention
    ) -> tuple[Tensor, Tensor]:
        """Takes hidden [num_tokens, hidden_size] without the last layer's `delta`; returns it without this layer's."""
        if delta is None:
            heads = self._qkv(self._ops.rms_norm(hidden, self._input_norm, self._config.norm_eps))
        else:
            heads, hidden = self._after_norm(self._qkv, delta, hidden, self._input_norm)
        delta = self._output(self._attention(heads, rotation, layer_kv, batch))
        gate_up, hidden = self._after_norm(self._gate_up, delta, hidden, self._mlp_norm)
        down = self._down
        if down.fused is not None:
            return hidden, down.fused.gated(gate_up, down.bias)
        return hidden, down(self._ops.silu_mul(gate_up))

    def _after_norm(self, linear: Linear, x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The product with the norm of x + residual, and x + residual."""
        eps = self._config.norm_eps
        if linear.fused is not None:
            return linear.fused.normed(x, residual, weight, eps, linear.bias), residual
        normed, total = self._ops.add_rms_norm(x, residual, weight, eps)
        return linear(normed), total

    def _attention(self, heads: Tensor, rotation: Rotation, layer_kv: Tensor, batch: StepAttention) -> Tensor:
        config = self._config
        heads = heads.view(heads.shape[0], -1, config.head_dim)  # [num_tokens, q, k and v heads, head_dim]
        num_qk = config.num_heads + config.num_kv_heads
        qk, v = heads[:, :num_qk], heads[:, num_qk:]
        q, k = rotation(self._norm_heads(qk) if config.qk_norm else qk, config.num_heads)
        return batch.attend(q, k, v, layer_kv, config.head_dim**-0.5)

    def _norm_heads(self, qk: Tensor) -> Tensor:
        q, k = torch.split(qk, [self._config.num_heads, self._config.num_kv_heads], dim=1)
        norm, eps = self._ops.rms_norm, self._config.norm_eps
        return torch.cat((norm(q, self._q_norm, eps), norm(k, self._k_norm, eps)), dim=1)
