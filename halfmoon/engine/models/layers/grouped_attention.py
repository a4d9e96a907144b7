"""Attention whose query heads share key-value heads in groups (Ainslie et al., GQA, 2023): Q, K and V in one matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from halfmoon.engine.attention.attention_backend import AttentionRule, StepAttention
from halfmoon.engine.models.layer_ops import LayerOps, Rotation
from halfmoon.engine.models.linear import FusedMatrix
from halfmoon.engine.models.model_part import ModelPart


class GroupedAttention:
    """Owns the projections, and the norms of query and key heads if the model has them."""

    def __init__(self, part: ModelPart, window: int | None, dtype: torch.dtype, device: str, ops: LayerOps) -> None:
        self._config = config = part.config
        self._ops = ops
        self._rule = AttentionRule(config.score_scale, window, config.attention_softcap)
        hidden, qkv_size = config.hidden_size, config.q_size + 2 * config.kv_size
        self.first = part.linear(qkv_size, hidden, config.qkv_bias, dtype, device)  # what the layer's norm is for
        self.output = part.summed(part.linear(hidden, config.q_size, config.output_bias, dtype, device))
        self.tensors: dict[str, Tensor] = {}  # norms, [head_dim]
        if config.qk_norm:
            wide = torch.float32 if config.norm_offset else dtype
            self.tensors = {
                f"self_attn.{name}_norm.weight": torch.empty(config.head_dim, dtype=wide, device=device)
                for name in ("q", "k")
            }
        sizes = {"q": config.q_size, "k": config.kv_size, "v": config.kv_size}
        names = {f"self_attn.{name}_proj": size for name, size in sizes.items()}
        if config.fused_in_checkpoint:
            names = {"self_attn.qkv_proj": qkv_size}
        self.matrices: tuple[FusedMatrix, ...] = ((self.first, names), (self.output, {"self_attn.o_proj": hidden}))

    def arrange(self) -> None:
        """Nothing is to be done before packing."""

    def attend(self, heads: Tensor, rotation: Rotation, layer_kv: Tensor, attention: StepAttention) -> Tensor:
        """What it adds to the residual, [num_tokens, hidden_size]; heads: what `first` gave."""
        config = self._config
        heads = heads.view(heads.shape[0], -1, config.head_dim)  # [num_tokens, q, k and v heads, head_dim]
        num_qk = config.num_heads + config.num_kv_heads
        qk, v = heads[:, :num_qk], heads[:, num_qk:]
        q, k = rotation(self._norm_heads(qk) if self.tensors else qk, config.num_heads)
        return self._ops.added(self.output, attention.attend(q, k, v, layer_kv, self._rule))

    def _norm_heads(self, qk: Tensor) -> Tensor:
        q, k = torch.split(qk, [self._config.num_heads, self._config.num_kv_heads], dim=1)
        norm, eps = self._ops.rms_norm, self._config.norm_eps
        q_weight, k_weight = self.tensors.values()
        return torch.cat((norm(q, q_weight, eps), norm(k, k_weight, eps)), dim=1)
