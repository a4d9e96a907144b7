"""The gated activation between a transformer's fused gate-up projection and its down projection."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from halfmoon.engine.kernels.tensor_check import FLOATS, check_tensor
from halfmoon.engine.kernels.tile_counts import num_tiles

_TILE = 1024


@triton.jit
def _silu_mul_kernel(
    gate_up: tl.tensor,  # [num_tokens, 2 * size]
    out: tl.tensor,  # [num_tokens, size]
    row_stride: tl.tensor,
    size: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = column < size
    at = gate_up + row * row_stride + column
    gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(at + size, mask=mask, other=0.0).to(tl.float32)
    product = gate * tl.sigmoid(gate) * up
    tl.store(out + row * size + column, product.to(out.dtype.element_ty), mask=mask)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Returns silu(gate) * up, [num_tokens, size]; gate_up: [num_tokens, 2 * size], gate first.

    Raises ValueError or TypeError.
    """
    check_tensor("gate_up", gate_up, (None, None), FLOATS)
    num_tokens, width = gate_up.shape
    if width % 2:
        raise ValueError(f"gate_up: {width} columns are not two halves")
    size = width // 2
    out = gate_up.new_empty((num_tokens, size))
    if num_tokens:
        grid = (num_tokens, num_tiles(size, _TILE))
        _silu_mul_kernel[grid](gate_up, out, gate_up.stride(0), size, TILE=_TILE, num_warps=4, enable_fp_fusion=True)
    return out


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    """`silu_mul` in plain torch."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(gate_up.dtype)
