"""RMSNorm (Zhang and Sennrich, 2019), alone and fused with the residual addition before it. Sums in float32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfmoon.engine.kernels.tensor_check import FLOATS, check_same_device, check_tensor
from halfmoon.engine.kernels.tile_counts import num_tiles, padded

_TILE_ELEMENTS = 2048  # short rows (the heads of a query-key norm) share a program up to this size


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x: tl.tensor,  # [num_tokens, num_heads, size], only the last dimension dense
    weight: tl.tensor,  # [size]
    out: tl.tensor,  # [num_tokens * num_heads, size]
    num_rows: tl.tensor,
    num_heads: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    eps: tl.tensor,
    SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, SIZE_PAD)
    mask = (row < num_rows)[:, None] & (column < SIZE)[None, :]
    at = (row // num_heads) * token_stride + (row % num_heads) * head_stride
    values = tl.load(x + at[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(weight + column, mask=column < SIZE, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(values * values, axis=1) / SIZE + eps)
    normed = values * inverse[:, None] * scale[None, :]
    tl.store(out + row[:, None] * SIZE + column[None, :], normed.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _add_rms_norm_kernel(
    x: tl.tensor,  # [num_tokens, size]
    residual: tl.tensor,  # [num_tokens, size], replaced by the sum
    weight: tl.tensor,  # [size]
    out: tl.tensor,  # [num_tokens, size]
    num_rows: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    eps: tl.tensor,
    SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, SIZE_PAD)
    mask = (row < num_rows)[:, None] & (column < SIZE)[None, :]
    residual_at = residual + row[:, None] * residual_stride + column[None, :]
    total = tl.load(residual_at, mask=mask, other=0.0).to(tl.float32)
    total += tl.load(x + row[:, None] * x_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    stored = total.to(residual.dtype.element_ty)  # the norm sees what the next layer will: the rounded sum
    tl.store(residual_at, stored, mask=mask)
    values = stored.to(tl.float32)
    scale = tl.load(weight + column, mask=column < SIZE, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(values * values, axis=1) / SIZE + eps)
    normed = values * inverse[:, None] * scale[None, :]
    tl.store(out + row[:, None] * SIZE + column[None, :], normed.to(out.dtype.element_ty), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Norm of x: [num_tokens, size] or [num_tokens, num_heads, size], only the last dimension dense; weight: [size].

    Returns a new contiguous tensor of x's shape and dtype. Raises ValueError or TypeError.
    """
    check_tensor("x", x, (None,) * (3 if x.ndim == 3 else 2), FLOATS)
    size = x.shape[-1]
    check_tensor("weight", weight, (size,), FLOATS)
    check_same_device(x=x, weight=weight)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    num_heads = x.shape[1] if x.ndim == 3 else 1
    num_rows = x.shape[0] * num_heads
    if num_rows:
        size_pad, rows, num_warps = _tiling(size)
        _rms_norm_kernel[(num_tiles(num_rows, rows),)](
            x, weight, out, num_rows, num_heads, x.stride(0), x.stride(1) if x.ndim == 3 else 0, eps,
            SIZE=size, SIZE_PAD=size_pad, ROWS=rows, num_warps=num_warps, enable_fp_fusion=True,
        )  # fmt: skip
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Computes `residual += x` in place; returns the norm of the sum. x, residual: [num_tokens, size]; weight: [size].

    Raises ValueError or TypeError.
    """
    check_tensor("x", x, (None, None), FLOATS)
    size = x.shape[1]
    check_tensor("residual", residual, x.shape, FLOATS)
    check_tensor("weight", weight, (size,), FLOATS)
    check_same_device(x=x, residual=residual, weight=weight)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.shape[0]:
        size_pad, rows, num_warps = _tiling(size)
        _add_rms_norm_kernel[(num_tiles(x.shape[0], rows),)](
            x, residual, weight, out, x.shape[0], x.stride(0), residual.stride(0), eps,
            SIZE=size, SIZE_PAD=size_pad, ROWS=rows, num_warps=num_warps, enable_fp_fusion=True,
        )  # fmt: skip
    return out


def _tiling(size: int) -> tuple[int, int, int]:
    """Padded row size, rows per program, and warps."""
    size_pad = padded(size)
    rows = max(1, _TILE_ELEMENTS // size_pad)
    return size_pad, rows, min(16, max(4, size_pad * rows // 1024))


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` in plain torch."""
    values = x.float()
    normed = values * torch.rsqrt(values.pow(2).mean(dim=-1, keepdim=True) + eps)
    return (normed * weight.float()).to(x.dtype)


def add_rms_norm_reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`add_rms_norm` in plain torch."""
    residual.copy_(residual.float() + x.float())
    return rms_norm_reference(residual, weight, eps).to(x.dtype)
