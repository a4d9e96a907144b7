"""Rows of int8 KV in torch: what `halfmoon/kv/codec/int8.py` defines, for paths without a kernel, and as reference."""

from __future__ import annotations

import torch
from torch import Tensor

from halfmoon.engine.kv_memory.kv_arena import TORCH_DTYPES
from halfmoon.kv.codec.floats import LARGEST

LARGEST_OF = {TORCH_DTYPES[dtype]: float(limit) for dtype, limit in LARGEST.items()}
"""What an infinity of each dtype counts as."""
_SMALLEST_SCALE = 2.0**-126


def round_rows(numbers: Tensor) -> Tensor:
    """[..., head_dim] in any float -> [..., head_dim + 2] int8: the codes, and the bytes of their bfloat16 scale."""
    limit, numbers = LARGEST_OF[numbers.dtype], numbers.float()
    largest = torch.where(numbers.isnan(), limit, numbers.abs().clamp(max=limit)).amax(dim=-1, keepdim=True)
    bounds = (largest / 127).clamp(min=_SMALLEST_SCALE)
    scales = (bounds.contiguous().view(torch.int32) + 0xFFFF) >> 16  # rounded up
    inverse = 1 / (scales << 16).view(torch.float32)
    finite = numbers.nan_to_num(nan=0.0, posinf=limit, neginf=-limit).clamp(-limit, limit)
    codes = (finite * inverse).round().to(torch.int8)
    return torch.cat((codes, scales.to(torch.int16).view(torch.int8)), dim=-1)


def widen_rows(rows: Tensor) -> Tensor:
    """The float32 numbers [..., head_dim] of rows [..., head_dim + 2] int8."""
    codes, scales = split_rows(rows)
    return codes.float() * scales.float().unsqueeze(-1)


def split_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Views of the codes [..., head_dim] int8 and the scales [...] bfloat16 of rows [..., head_dim + 2] int8."""
    return rows[..., :-2], rows[..., -2:].view(torch.bfloat16)[..., 0]
