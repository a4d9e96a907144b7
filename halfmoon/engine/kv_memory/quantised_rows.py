"""Rows of quantised KV in torch: what `halfmoon/kv/codec/scaled_rows.py` defines, for paths without a kernel.

They are the kernels' reference, too. A tensor's dtype says what its rows are: int8 has codes of int8, uint8 those of
e4m3. (Torch's own float8 cannot be indexed, compared or sent, and the scale in a row is none.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from halfmoon.kv.codec.floats import LARGEST

LARGEST_OF = {getattr(torch, dtype): float(limit) for dtype, limit in LARGEST.items()}
"""What an infinity of each dtype counts as."""
LARGEST_CODE = {torch.int8: 127.0, torch.uint8: 448.0}
"""The largest code, by the dtype of memory."""
BELOW_SCALE = {torch.int8: 0xFFFF, torch.uint8: 0x7FFFFF}
"""The bits of a float32 that a scale has not, by the dtype of memory."""
CODES = {torch.int8: torch.int8, torch.uint8: torch.float8_e4m3fn}
"""The dtype of codes, by that of memory."""
_SMALLEST_SCALE = 2.0**-126


def is_quantised(memory: torch.dtype) -> bool:
    """Whether KV memory of this dtype has rows of codes."""
    return memory in CODES


def round_rows(numbers: Tensor, memory: torch.dtype) -> Tensor:
    """[..., head_dim] in any float -> [..., head_dim + 2] of `memory`: codes, and the bytes of their bfloat16 scale."""
    limit, numbers = LARGEST_OF[numbers.dtype], numbers.float()
    largest = torch.where(numbers.isnan(), limit, numbers.abs().clamp(max=limit)).amax(dim=-1, keepdim=True)
    bounds = (largest / LARGEST_CODE[memory]).clamp(min=_SMALLEST_SCALE)
    below = BELOW_SCALE[memory]
    scales = ((bounds.contiguous().view(torch.int32) + below) & ~below) >> 16  # rounded up
    inverse = 1 / (scales << 16).view(torch.float32)
    finite = numbers.nan_to_num(nan=0.0, posinf=limit, neginf=-limit).clamp(-limit, limit)
    scaled = finite * inverse
    codes = scaled.round().to(torch.int8) if memory is torch.int8 else scaled.to(CODES[memory])
    return torch.cat((codes.view(memory), scales.to(torch.int16).view(memory)), dim=-1)


def widen_rows(rows: Tensor) -> Tensor:
    """The float32 numbers [..., head_dim] of rows [..., head_dim + 2]."""
    codes, scales = split_rows(rows)
    return codes.view(CODES[rows.dtype]).float() * scales.float().unsqueeze(-1)


def split_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Views of the codes [..., head_dim], in the dtype of memory, and the scales [...] bfloat16 of quantised rows."""
    return rows[..., :-2], rows[..., -2:].view(torch.bfloat16)[..., 0]


def split_memory(memory: Tensor) -> tuple[Tensor, Tensor]:
    """Views of quantised KV memory [..., num_slots, row_items]: codes [..., num_slots, head_dim] and scales, bfloat16.

    A head has first all codes, then all scales, [..., num_slots]: so GPUs load both in aligned pieces, as they could
    not if each row's scale followed it. Head sizes are even.
    """
    num_slots, row_items = memory.shape[-2:]
    head = memory.view(*memory.shape[:-2], num_slots * row_items)
    codes, scales = torch.split(head, [num_slots * (row_items - 2), num_slots * 2], dim=-1)
    return codes.view(*memory.shape[:-1], row_items - 2), scales.view(torch.bfloat16)


def rows_at(memory: Tensor, slots: Tensor | slice) -> Tensor:
    """The rows [..., num_tokens, row_items] of KV memory [..., num_slots, row_items] of any dtype."""
    if not is_quantised(memory.dtype):
        return memory[..., slots, :]
    codes, scales = split_memory(memory)
    return torch.cat((codes[..., slots, :], scales[..., slots].unsqueeze(-1).view(memory.dtype)), dim=-1)


def put_rows(memory: Tensor, slots: Tensor | slice, rows: Tensor) -> None:
    """Stores rows [..., num_tokens, row_items] where `rows_at` finds them."""
    if not is_quantised(memory.dtype):
        memory[..., slots, :] = rows
        return
    codes, scales = split_memory(memory)
    codes[..., slots, :], scales[..., slots] = split_rows(rows)


def numbers_of(rows: Tensor) -> Tensor:
    """The float32 numbers [..., head_dim] of rows [..., row_items] of any dtype."""
    return widen_rows(rows) if is_quantised(rows.dtype) else rows.float()
