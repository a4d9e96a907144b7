"""Writes new K and V into the arena, quantised on the way where the arena is."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from halfmoon.engine.kernels.paged_kv import PagedKV
from halfmoon.engine.kernels.tensor_check import FLOATS, check_same_device, check_tensor

_TILE_TOKENS = 16
_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # what a token's largest element is stored as


@triton.jit
def _store_rows(
    values: tl.tensor,  # [TILE, DIM_PAD]
    stored: tl.tensor,  # one head's [num_slots, head_dim]
    scales: tl.tensor,  # one head's [num_slots]
    slots: tl.tensor,  # [TILE]
    kept: tl.tensor,  # [TILE]
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    LARGEST: tl.constexpr,  # what the largest element becomes; 0 when not quantised
) -> None:
    dim = tl.arange(0, DIM_PAD)
    if LARGEST > 0.0:
        values = values.to(tl.float32)
        extent = tl.max(tl.abs(values), axis=1)
        scale = tl.where(extent > 0.0, extent / LARGEST, 1.0)
        tl.store(scales + slots, scale, mask=kept)
        values = tl.minimum(tl.maximum(values / scale[:, None], -LARGEST), LARGEST)
        if stored.dtype.element_ty == tl.int8:
            values = tl.floor(values + 0.5)
    mask = kept[:, None] & (dim < HEAD_DIM)[None, :]
    tl.store(stored + slots[:, None] * HEAD_DIM + dim[None, :], values.to(stored.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def _kv_store_kernel(
    k_new: tl.tensor,  # [num_tokens, num_kv_heads, head_dim]
    v_new: tl.tensor,  # [num_tokens, num_kv_heads, head_dim]
    slot_mapping: tl.tensor,  # [num_tokens], -1: skip
    k: tl.tensor,  # [num_kv_heads, num_slots, head_dim]
    v: tl.tensor,  # [num_kv_heads, num_slots, head_dim]
    k_scales: tl.tensor,  # [num_kv_heads, num_slots]; None when not quantised
    v_scales: tl.tensor,  # like k_scales
    num_tokens: tl.tensor,
    k_token_stride: tl.tensor,
    k_head_stride: tl.tensor,
    v_token_stride: tl.tensor,
    v_head_stride: tl.tensor,
    kv_head_stride: tl.tensor,
    scale_head_stride: tl.tensor,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    TILE: tl.constexpr,
    LARGEST: tl.constexpr,
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
    k += head * kv_head_stride
    v += head * kv_head_stride
    if LARGEST > 0.0:
        k_scales += head * scale_head_stride
        v_scales += head * scale_head_stride
    _store_rows(keys, k, k_scales, slots, kept, HEAD_DIM, DIM_PAD, LARGEST)
    _store_rows(values, v, v_scales, slots, kept, HEAD_DIM, DIM_PAD, LARGEST)


def kv_store(k: Tensor, v: Tensor, kv: PagedKV, slot_mapping: Tensor) -> None:
    """Stores new K and V where `slot_mapping` says; -1 stores nothing.

    k, v: [num_tokens, num_kv_heads, head_dim], views into a fused QKV output will do; slot_mapping: [num_tokens] int64.
    Raises ValueError or TypeError. Triton's interpreter rounds to fp8 wrongly without saying so (a carry out of the
    mantissa is lost, 3.9): storing fp8 is refused there, reading it is right.
    """
    if kv.k.dtype == torch.float8_e4m3fn and knobs.runtime.interpret:
        raise TypeError("kv: Triton's interpreter rounds to fp8 wrongly; use int8")
    num_kv_heads, _, head_dim = kv.k.shape
    check_tensor("k", k, (None, num_kv_heads, head_dim), FLOATS if kv.quantised else (kv.k.dtype,))
    check_tensor("v", v, k.shape, (k.dtype,))
    num_tokens = k.shape[0]
    check_tensor("slot_mapping", slot_mapping, (num_tokens,), (torch.int64,))
    check_same_device(k=k, v=v, kv=kv.k, slot_mapping=slot_mapping)
    if num_tokens == 0:
        return
    _kv_store_kernel[(triton.cdiv(num_tokens, _TILE_TOKENS), num_kv_heads)](
        k, v, slot_mapping, kv.k, kv.v, kv.k_scales, kv.v_scales, num_tokens,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1), kv.k.stride(0), kv.scale_stride,
        HEAD_DIM=head_dim, DIM_PAD=triton.next_power_of_2(head_dim), TILE=_TILE_TOKENS,
        LARGEST=_LARGEST.get(kv.k.dtype, 0.0), num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip


def kv_store_reference(k: Tensor, v: Tensor, kv: PagedKV, slot_mapping: Tensor) -> None:
    """`kv_store` in plain torch."""
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    for new, stored, scales in ((k, kv.k, kv.k_scales), (v, kv.v, kv.v_scales)):
        rows = new[kept].transpose(0, 1)  # [num_kv_heads, num_kept, head_dim]
        if scales is not None:
            rows = rows.float()
            largest = _LARGEST[stored.dtype]
            extent = rows.abs().amax(dim=-1)
            scale = torch.where(extent > 0, extent / largest, torch.ones_like(extent))
            scales[:, slots] = scale
            rows = (rows / scale.unsqueeze(-1)).clamp(-largest, largest)
            rows = torch.floor(rows + 0.5) if stored.dtype == torch.int8 else rows
        stored[:, slots] = rows.to(stored.dtype)
