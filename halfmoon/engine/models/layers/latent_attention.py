"""Multi-head latent attention (DeepSeek-V2, section 2.1): one row a token and layer is cached for all heads.

A row is a latent, from which keys and values of every head are made, and a rotated part that all heads share. It lies
in KV memory as one head's K and V: its first half is K, its second V. The matrices that make keys and values of the
latent are absorbed: queries are brought to the latent, and what is attended is brought from there to values. So a step
reads the rows as they are, with prompts, too; there that costs more products than to make all keys would.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halfmoon.architectures.model_config import Latent
from halfmoon.engine.attention.attention_backend import AttentionRule, StepAttention
from halfmoon.engine.models.layer_ops import LayerOps, Rotation
from halfmoon.engine.models.linear import FusedMatrix
from halfmoon.engine.models.model_part import ModelPart

_NORM_EPS = 1e-6  # of the latents' norms, whatever the configuration says of the layers'


class LatentAttention:
    """Owns the projections; queries come from the hidden state, or from a latent of their own."""

    def __init__(self, part: ModelPart, latent: Latent, dtype: torch.dtype, device: str, ops: LayerOps) -> None:
        config = part.config
        self._latent, self._ops, self._num_heads = latent, ops, config.num_heads
        self._rule = AttentionRule(config.score_scale, latent_size=latent.size)
        hidden, heads = config.hidden_size, config.num_heads
        query_rows = heads * (latent.plain_size + latent.rotary_size)
        first = {"self_attn.q_a_proj": latent.query_size} if latent.query_size else {"self_attn.q_proj": query_rows}
        first["self_attn.kv_a_proj_with_mqa"] = latent.row_size
        self.first = part.linear(sum(first.values()), hidden, False, dtype, device)  # what the layer's norm is for
        self._queries = part.linear(query_rows, latent.query_size, False, dtype, device) if latent.query_size else None
        self.output = part.summed(part.linear(hidden, heads * latent.value_size, False, dtype, device))
        made = latent.plain_size + latent.value_size
        self._made = torch.empty(heads * made, latent.size, dtype=dtype, device=device)
        # Of keys without rotation and of values, [num_heads, plain_size or value_size, latent.size].
        self._keys, self._values = torch.split(
            self._made.view(heads, made, -1), [latent.plain_size, latent.value_size], dim=1
        )
        self._norm = torch.empty(latent.size, dtype=dtype, device=device)
        self.tensors = {"self_attn.kv_b_proj.weight": self._made, "self_attn.kv_a_layernorm.weight": self._norm}
        self.matrices: tuple[FusedMatrix, ...] = ((self.first, first), (self.output, {"self_attn.o_proj": hidden}))
        if self._queries is not None:
            self._query_norm = torch.empty(latent.query_size, dtype=dtype, device=device)
            self.tensors["self_attn.q_a_layernorm.weight"] = self._query_norm
            self.matrices += ((self._queries, {"self_attn.q_b_proj": query_rows}),)

    def arrange(self) -> None:
        """Puts pairs of numbers that are rotated together half a row apart, as `rotate` has them. Before packing."""
        latent = self._latent
        if not latent.is_interleaved:
            return
        order = torch.cat((torch.arange(0, latent.rotary_size, 2), torch.arange(1, latent.rotary_size, 2)))
        shared = self.first.weight[-latent.rotary_size :]
        shared.copy_(shared[order])
        rows = self.first.weight[: -latent.row_size] if self._queries is None else self._queries.weight
        own = rows.view(self._num_heads, -1, rows.shape[1])[:, latent.plain_size :]
        own.copy_(own[:, order])

    def attend(self, first: Tensor, rotation: Rotation, layer_kv: Tensor, attention: StepAttention) -> Tensor:
        """What it adds to the residual, [num_tokens, hidden_size]; first: what the matrix `first` gave."""
        latent, num_heads = self._latent, self._num_heads
        queries, row = first[:, : -latent.row_size], first[:, -latent.row_size :]
        content, shared = torch.split(row, [latent.size, latent.rotary_size], dim=1)
        content = self._ops.rms_norm(content.contiguous(), self._norm, _NORM_EPS)
        if self._queries is not None:
            queries = self._queries(self._ops.rms_norm(queries.contiguous(), self._query_norm, _NORM_EPS))
        plain, own = torch.split(
            queries.view(len(first), num_heads, -1), [latent.plain_size, latent.rotary_size], dim=2
        )
        own, shared = rotation(torch.cat((own, shared.unsqueeze(1)), dim=1), num_heads)
        k, v = torch.cat((content.unsqueeze(1), shared), dim=2).chunk(2, dim=2)  # each [num_tokens, 1, row_size / 2]
        wanted = torch.einsum("thn,hnl->thl", plain, self._keys)
        out = attention.attend(torch.cat((wanted, own), dim=2), k, v, layer_kv, self._rule)
        values = torch.einsum("thl,hvl->thv", out.view(len(first), num_heads, latent.size), self._values)
        return self._ops.added(self.output, values.flatten(1))
