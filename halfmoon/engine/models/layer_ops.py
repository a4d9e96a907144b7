"""Functions of a Llama layer between its matrix products, as a table: plain torch, or fused kernels on CUDA.

A model is built with one table and calls it; nothing is chosen while it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from halfmoon.architectures.model_config import ModelConfig
from halfmoon.engine.attention.attention_backend import StepAttention
from halfmoon.engine.models.linear import Linear
from halfmoon.engine.models.rotary import Rotary, rotate

Rotation = Callable[[Tensor, int], tuple[Tensor, Tensor]]


class LayerWeights(NamedTuple):
    """One packed layer."""

    input_norm: Tensor  # [hidden_size], like mlp_norm
    mlp_norm: Tensor
    q_norm: Tensor | None  # [head_dim], like k_norm; None: heads have no norm
    k_norm: Tensor | None
    matrices: tuple[Linear, Linear, Linear, Linear]  # qkv, output, gate and up, down


class RunLayers(Protocol):
    """Computes all layers of a model at once, with the results of the functions of `LayerOps`."""

    def takes(self, attention: StepAttention) -> bool:
        """Whether it computes a step with this attention, what is to be called between two layers included."""

    def run(self, hidden: Tensor, positions: Tensor, attention: StepAttention, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Returns hidden states [num_tokens, hidden_size] without the last layer's contribution, and that.

        Raises LayerLate.
        """


@dataclass(frozen=True, slots=True)
class LayerOps:
    """One table of functions; `residual` and the inputs of a `Rotation` may be overwritten."""

    # (x [..., size], weight [size], eps) -> like x
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    # (x, residual, weight, eps) -> norm of x + residual, x + residual; all [num_tokens, size]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    # (gate_up [num_tokens, 2 * size]) -> silu(gate) * up, [num_tokens, size]
    silu_mul: Callable[[Tensor], Tensor]
    # (rotary, positions [num_tokens]) -> (qk [num_tokens, num_heads + num_kv_heads, head_dim], num_heads) -> q, k;
    # called once per forward pass
    rotation: Callable[[Rotary, Tensor], Rotation]
    # packed layers -> how to compute all of them at once, None if that is not possible
    join: Callable[[Sequence[LayerWeights], ModelConfig, Rotary], RunLayers | None] = lambda *of: None
    # whether the residual and all that is added to it are float32, whatever the model's dtype
    wide_residual: bool = False

    def added(self, linear: Linear, x: Tensor) -> Tensor:
        """The product that a layer adds to the residual, in its dtype; x: [num_tokens, in_features]."""
        return linear.sums(x) if self.wide_residual else linear(x)


def suited_ops(ops: LayerOps, config: ModelConfig, dtype: torch.dtype) -> LayerOps:
    """`ops`, with torch's functions where kernels do not compute what `config` says: wide norms, partial rotation."""
    if config.norm_offset:
        ops = replace(ops, rms_norm=_wide_rms_norm, add_rms_norm=partial(_add_wide_rms_norm, dtype))
    if config.rotary_size != config.head_dim:
        ops = replace(ops, rotation=_rotation)
    return ops


def _wide_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight: float32, with the offset."""
    return functional.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)


def _add_wide_rms_norm(
    dtype: torch.dtype, x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    total = residual + x
    return _wide_rms_norm(total, weight, eps).to(dtype), total


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return functional.rms_norm(x, weight.shape, weight, eps)


def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = residual + x
    return _rms_norm(total, weight, eps), total


def _silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def _rotation(rotary: Rotary, positions: Tensor) -> Rotation:
    cos, sin = rotary.rows(positions)
    return partial(_rotate_and_split, cos, sin)


def _rotate_and_split(cos: Tensor, sin: Tensor, qk: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
    rotated = rotate(qk[..., : cos.shape[-1]], cos, sin)
    if cos.shape[-1] < qk.shape[-1]:
        rotated = torch.cat((rotated, qk[..., cos.shape[-1] :]), dim=-1)
    q, k = torch.split(rotated, [num_heads, qk.shape[1] - num_heads], dim=1)
    return q, k


TORCH_OPS = LayerOps(rms_norm=_rms_norm, add_rms_norm=_add_rms_norm, silu_mul=_silu_mul, rotation=_rotation)
