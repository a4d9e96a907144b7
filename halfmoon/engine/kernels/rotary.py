"""Rotary position embedding (Su et al., RoFormer) of queries and keys, in place. Rotates halves, not pairs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfmoon.engine.kernels.tensor_check import FLOATS, check_same_device, check_tensor
from halfmoon.engine.kernels.tile_counts import padded


@triton.jit
def _rotate_heads(
    heads: tl.tensor,  # one token's [num_heads, head_dim]
    head_stride: tl.tensor,
    cos: tl.tensor,  # [HALF_PAD] float32
    sin: tl.tensor,  # [HALF_PAD] float32
    NUM_HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
) -> None:
    head = tl.arange(0, HEADS_PAD)
    column = tl.arange(0, HALF_PAD)
    mask = (head < NUM_HEADS)[:, None] & (column < HALF)[None, :]
    at = heads + head[:, None] * head_stride + column[None, :]
    first = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
    rotated_first = first * cos[None, :] - second * sin[None, :]
    rotated_second = second * cos[None, :] + first * sin[None, :]
    tl.store(at, rotated_first.to(heads.dtype.element_ty), mask=mask)
    tl.store(at + HALF, rotated_second.to(heads.dtype.element_ty), mask=mask)


@triton.jit
def _rotary_kernel(
    q: tl.tensor,  # [num_tokens, num_q_heads, head_dim]
    k: tl.tensor,  # [num_tokens, num_kv_heads, head_dim]
    positions: tl.tensor,  # [num_tokens]
    cos_table: tl.tensor,  # [num_positions, half]
    sin_table: tl.tensor,  # [num_positions, half]
    q_token_stride: tl.tensor,
    q_head_stride: tl.tensor,
    k_token_stride: tl.tensor,
    k_head_stride: tl.tensor,
    cos_stride: tl.tensor,
    sin_stride: tl.tensor,
    NUM_Q_HEADS: tl.constexpr,
    Q_HEADS_PAD: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    KV_HEADS_PAD: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token).to(tl.int64)
    column = tl.arange(0, HALF_PAD)
    cos = tl.load(cos_table + position * cos_stride + column, mask=column < HALF, other=0.0).to(tl.float32)
    sin = tl.load(sin_table + position * sin_stride + column, mask=column < HALF, other=0.0).to(tl.float32)
    _rotate_heads(q + token * q_token_stride, q_head_stride, cos, sin, NUM_Q_HEADS, Q_HEADS_PAD, HALF, HALF_PAD)
    _rotate_heads(k + token * k_token_stride, k_head_stride, cos, sin, NUM_KV_HEADS, KV_HEADS_PAD, HALF, HALF_PAD)


def rotary(q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotates in place the first `2 * half` dimensions of every head; q and k may be views into a fused QKV output.

    q: [num_tokens, num_q_heads, head_dim]; k: [num_tokens, num_kv_heads, head_dim]; positions: [num_tokens] int64 or
    int32; cos, sin: [num_positions, half]. Raises ValueError or TypeError.
    """
    check_tensor("q", q, (None, None, None), FLOATS)
    num_tokens, num_q_heads, head_dim = q.shape
    check_tensor("k", k, (num_tokens, None, head_dim), (q.dtype,))
    check_tensor("positions", positions, (num_tokens,), (torch.int64, torch.int32))
    check_tensor("cos", cos, (None, None), FLOATS)
    check_tensor("sin", sin, cos.shape, FLOATS)
    half, num_kv_heads = cos.shape[1], k.shape[1]
    if 2 * half > head_dim:
        raise ValueError(f"cos: {half} frequencies are too many for heads of {head_dim}")
    check_same_device(q=q, k=k, positions=positions, cos=cos, sin=sin)
    if num_tokens == 0:
        return
    _rotary_kernel[(num_tokens,)](
        q, k, positions, cos, sin,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), cos.stride(0), sin.stride(0),
        NUM_Q_HEADS=num_q_heads, Q_HEADS_PAD=padded(num_q_heads),
        NUM_KV_HEADS=num_kv_heads, KV_HEADS_PAD=padded(num_kv_heads),
        HALF=half, HALF_PAD=padded(half), num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip


def rotary_reference(q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
    """`rotary` in plain torch, also in place."""
    half = cos.shape[1]
    c, s = cos[positions].float().unsqueeze(1), sin[positions].float().unsqueeze(1)  # [num_tokens, 1, half]
    for heads in (q, k):
        first, second = heads[..., :half].float(), heads[..., half : 2 * half].float()
        rotated = torch.cat((first * c - second * s, second * c + first * s), dim=-1)
        heads[..., : 2 * half] = rotated.to(heads.dtype)
