"""Writes new K and V into the arena, rounded where that keeps codes (`halfmoon/kv/codec/scaled_rows.py`)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfmoon.engine.kernels.paged_kv import PagedKV
from halfmoon.engine.kernels.tensor_check import check_same_device, check_tensor
from halfmoon.engine.kernels.tile_counts import num_tiles, padded
from halfmoon.engine.kv_memory.quantised_rows import BELOW_SCALE, LARGEST_CODE, LARGEST_OF, round_rows, split_rows

_TILE_TOKENS = 16


@triton.jit
def _rounded(
    rows: tl.tensor,  # [TILE, DIM_PAD], 0 beyond the head
    LARGEST: tl.constexpr,  # what infinities count as, and a NaN for the scale
    LARGEST_CODE: tl.constexpr,
    BELOW_SCALE: tl.constexpr,  # the bits of a float32 that a scale has not
    codes: tl.constexpr,  # the dtype of memory
) -> tl.tensor:
    """Returns the codes, [TILE, DIM_PAD], and the bits of their bfloat16 scales, int32 [TILE]."""
    numbers = rows.to(tl.float32)
    is_nan = numbers != numbers
    magnitudes = tl.where(is_nan, LARGEST, tl.minimum(tl.abs(numbers), LARGEST))
    bounds = tl.maximum(tl.div_rn(tl.max(magnitudes, axis=1), LARGEST_CODE), 1.1754943508222875e-38)  # 2**-126
    bits = (bounds.to(tl.int32, bitcast=True) + BELOW_SCALE) >> 16
    bits &= ~(BELOW_SCALE >> 16)
    inverse = tl.div_rn(1.0, (bits << 16).to(tl.float32, bitcast=True))
    finite = tl.where(is_nan, 0.0, tl.minimum(tl.maximum(numbers, -LARGEST), LARGEST))
    scaled = finite * inverse[:, None]
    if codes == tl.uint8:
        return _e4m3(scaled).to(codes), bits
    return (scaled + 12582912.0 - 12582912.0).to(codes), bits  # 1.5 * 2**23: to the nearest, ties to even


@triton.jit
def _e4m3(numbers: tl.tensor) -> tl.tensor:
    """Returns the codes, int32, of float32 numbers below 464, to the nearest, ties to even.

    Adding 2**20 times the power of two below a number, at least 2**-6, leaves three bits of mantissa.
    """
    bits = numbers.to(tl.int32, bitcast=True)
    power = tl.maximum(bits & 0x7F800000, 121 << 23)
    magic = (power + (20 << 23)).to(tl.float32, bitcast=True)
    rounded = tl.abs(numbers) + magic - magic
    normal = (rounded.to(tl.int32, bitcast=True) >> 20) - (120 << 3)
    subnormal = (rounded * 512.0).to(tl.int32)
    return tl.where(rounded < 0.015625, subnormal, normal) | ((bits >> 24) & 0x80)


@triton.jit(do_not_specialize=["num_tokens"])
def _kv_write_kernel(
    k_new: tl.tensor,  # [num_tokens, num_kv_heads, head_dim]
    v_new: tl.tensor,  # [num_tokens, num_kv_heads, head_dim]
    slot_mapping: tl.tensor,  # [num_tokens], -1: skip
    k: tl.tensor,  # [num_kv_heads, num_slots, head_dim]
    v: tl.tensor,  # [num_kv_heads, num_slots, head_dim]
    k_scales: tl.tensor,  # [num_kv_heads, num_slots] int16, of codes
    v_scales: tl.tensor,  # like k_scales
    num_tokens: tl.tensor,
    k_token_stride: tl.tensor,
    k_head_stride: tl.tensor,
    v_token_stride: tl.tensor,
    v_head_stride: tl.tensor,
    kv_head_stride: tl.tensor,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    TILE: tl.constexpr,
    SCALED: tl.constexpr,
    LARGEST: tl.constexpr,
    LARGEST_CODE: tl.constexpr,
    BELOW_SCALE: tl.constexpr,
) -> None:
    head = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    dim = tl.arange(0, DIM_PAD)
    slots = tl.load(slot_mapping + token, mask=token < num_tokens, other=-1)
    kept = slots >= 0
    mask = kept[:, None] & (dim < HEAD_DIM)[None, :]
    keys = tl.load(k_new + token[:, None] * k_token_stride + head * k_head_stride + dim[None, :], mask=mask, other=0.0)
    values = tl.load(
        v_new + token[:, None] * v_token_stride + head * v_head_stride + dim[None, :], mask=mask, other=0.0
    )
    to = head * kv_head_stride + slots[:, None] * HEAD_DIM + dim[None, :]
    if SCALED:
        scales_to = head * (kv_head_stride // 2) + slots
        keys, key_bits = _rounded(keys, LARGEST, LARGEST_CODE, BELOW_SCALE, k.dtype.element_ty)
        values, value_bits = _rounded(values, LARGEST, LARGEST_CODE, BELOW_SCALE, k.dtype.element_ty)
        tl.store(k + to, keys, mask=mask)
        tl.store(v + to, values, mask=mask)
        tl.store(k_scales + scales_to, key_bits.to(tl.int16), mask=kept)
        tl.store(v_scales + scales_to, value_bits.to(tl.int16), mask=kept)
    else:
        tl.store(k + to, keys, mask=mask)
        tl.store(v + to, values, mask=mask)


def kv_write(k: Tensor, v: Tensor, kv: PagedKV, slot_mapping: Tensor) -> None:
    """Stores new K and V in the slots of `slot_mapping`; -1 stores nothing.

    k, v: [num_tokens, num_kv_heads, head_dim], may be views into a fused QKV output. slot_mapping: [num_tokens] int64.
    Raises ValueError or TypeError.
    """
    num_kv_heads, _, head_dim = kv.k.shape
    check_tensor("k", k, (None, num_kv_heads, head_dim), kv.new_dtypes)
    check_tensor("v", v, k.shape, (k.dtype,))
    num_tokens = k.shape[0]
    check_tensor("slot_mapping", slot_mapping, (num_tokens,), (torch.int64,))
    check_same_device(k=k, v=v, kv=kv.k, slot_mapping=slot_mapping)
    if num_tokens == 0:
        return
    _kv_write_kernel[(num_tiles(num_tokens, _TILE_TOKENS), num_kv_heads)](
        k, v, slot_mapping, kv.k, kv.v, *kv.scales, num_tokens,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1), kv.k.stride(0),
        HEAD_DIM=head_dim, DIM_PAD=padded(head_dim), TILE=_TILE_TOKENS,
        SCALED=kv.k_scales is not None,
        LARGEST=LARGEST_OF[k.dtype], LARGEST_CODE=LARGEST_CODE.get(kv.k.dtype),
        BELOW_SCALE=BELOW_SCALE.get(kv.k.dtype),
        num_warps=4, enable_fp_fusion=False,  # codes are rounded twice, as everywhere
    )  # fmt: skip


def kv_write_reference(k: Tensor, v: Tensor, kv: PagedKV, slot_mapping: Tensor) -> None:
    """Does as `kv_write`, in plain torch."""
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    for new, stored, scales in ((k, kv.k, kv.k_scales), (v, kv.v, kv.v_scales)):
        rows = new[kept].transpose(0, 1)  # [num_kv_heads, num_kept, head_dim]
        if scales is None:
            stored[:, slots] = rows
        else:
            codes, bits = split_rows(round_rows(rows, stored.dtype))
            stored[:, slots], scales[:, slots] = codes, bits.view(torch.int16)
