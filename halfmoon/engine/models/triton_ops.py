"""The fused kernels as a table of layer functions. Needs triton."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from halfmoon.engine.kernels.rms_norm import add_rms_norm, rms_norm
from halfmoon.engine.kernels.rotary import rotary as rotary_kernel
from halfmoon.engine.kernels.silu_mul import silu_mul
from halfmoon.engine.models.layer_ops import LayerOps, Rotation
from halfmoon.engine.models.rotary import Rotary


def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return add_rms_norm(x, residual, weight, eps), residual


def _rotation(rotary: Rotary, positions: Tensor) -> Rotation:
    cos, sin = rotary.halves()
    return partial(_rotate_in_place, cos, sin, positions)


def _rotate_in_place(cos: Tensor, sin: Tensor, positions: Tensor, qk: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
    q, k = qk[:, :num_heads], qk[:, num_heads:]
    rotary_kernel(q, k, positions, cos, sin)
    return q, k


TRITON_OPS = LayerOps(rms_norm=rms_norm, add_rms_norm=_add_rms_norm, silu_mul=silu_mul, rotation=_rotation)
