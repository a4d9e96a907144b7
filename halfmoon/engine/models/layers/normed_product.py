"""A matrix product behind an RMS norm, which some packed matrices compute at once."""

from __future__ import annotations

from torch import Tensor

from halfmoon.engine.models.layer_ops import LayerOps
from halfmoon.engine.models.linear import Linear


def normed_product(
    ops: LayerOps, linear: Linear, x: Tensor | None, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The product with the norm of x + residual, and x + residual; both [num_tokens, hidden_size].

    `residual` may be overwritten. Without x it is what the first layer is given, and stays.
    """
    if x is None:
        return linear(ops.rms_norm(residual, weight, eps)), residual
    if linear.fused is not None and weight.dtype == linear.weight.dtype:
        return linear.fused.normed(x, residual, weight, eps, linear.bias), residual
    normed, total = ops.add_rms_norm(x, residual, weight, eps)
    return linear(normed), total
