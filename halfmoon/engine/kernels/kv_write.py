"""Writes new K and V into the arena."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfmoon.engine.kernels.paged_kv import PagedKV
from halfmoon.engine.kernels.tensor_check import check_same_device, check_tensor

_TILE_TOKENS = 16


@triton.jit(do_not_specialize=["num_tokens"])
def _kv_write_kernel(
    k_new: tl.tensor,  # [num_tokens, num_kv_heads, head_dim]
    v_new: tl.tensor,  # [num_tokens, num_kv_heads, head_dim]
    slot_mapping: tl.tensor,  # [num_tokens], -1: skip
    k: tl.tensor,  # [num_kv_heads, num_slots, head_dim]
    v: tl.tensor,  # [num_kv_heads, num_slots, head_dim]
    num_tokens: tl.tensor,
    k_token_stride: tl.tensor,
    k_head_stride: tl.tensor,
    v_token_stride: tl.tensor,
    v_head_stride: tl.tensor,
    kv_head_stride: tl.tensor,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    TILE: tl.constexpr,
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
    tl.store(k + to, keys, mask=mask)
    tl.store(v + to, values, mask=mask)


def kv_write(k: Tensor, v: Tensor, kv: PagedKV, slot_mapping: Tensor) -> None:
    """Stores new K and V in the slots of `slot_mapping`; -1 stores nothing.

    k, v: [num_tokens, num_kv_heads, head_dim], may be views into a fused QKV output. slot_mapping: [num_tokens] int64.
    Raises ValueError or TypeError.
    """
    num_kv_heads, _, head_dim = kv.k.shape
    check_tensor("k", k, (None, num_kv_heads, head_dim), (kv.k.dtype,))
    check_tensor("v", v, k.shape, (k.dtype,))
    num_tokens = k.shape[0]
    check_tensor("slot_mapping", slot_mapping, (num_tokens,), (torch.int64,))
    check_same_device(k=k, v=v, kv=kv.k, slot_mapping=slot_mapping)
    if num_tokens == 0:
        return
    _kv_write_kernel[(triton.cdiv(num_tokens, _TILE_TOKENS), num_kv_heads)](
        k, v, slot_mapping, kv.k, kv.v, num_tokens,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1), kv.k.stride(0),
        HEAD_DIM=head_dim, DIM_PAD=triton.next_power_of_2(head_dim), TILE=_TILE_TOKENS,
        num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip


def kv_write_reference(k: Tensor, v: Tensor, kv: PagedKV, slot_mapping: Tensor) -> None:
    """Does as `kv_write`, in plain torch."""
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    for new, stored in ((k, kv.k), (v, kv.v)):
        stored[:, slots] = new[kept].transpose(0, 1)  # [num_kv_heads, num_kept, head_dim]
