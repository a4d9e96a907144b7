"""Attention of a step with decodes and prefills in one launch (POD-Attention, Kamath et al., ASPLOS 2025).

A prefill is bound by arithmetic, a decode by memory: side by side on a multiprocessor they use both. Each program is a
prefill's tile (`prefill_tile`) or a split of a decode's keys (`decode_split`). The two kinds alternate over the grid by
the ratio of their numbers, and a program is small enough that at least two fit a multiprocessor. POD-Attention binds
kinds to multiprocessors as programs start (a counter for each, by %smid). Triton has no such index, and inline PTX
would not run in its interpreter, so here the order of the grid is all that mixes them, and the hardware guarantees
nothing.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfmoon.engine.kernels.decode_attention import (
    check_decodes,
    decode_attention_reference,
    decode_split,
    decode_tile_sizes,
)
from halfmoon.engine.kernels.key_splits import MIN_SPLIT_TOKENS, merge_splits, split_parts
from halfmoon.engine.kernels.paged_kv import PagedKV, num_stages
from halfmoon.engine.kernels.prefill_attention import (
    check_prefills,
    prefill_attention_reference,
    prefill_tile,
    prefill_tile_sizes,
)
from halfmoon.engine.kernels.tile_counts import num_tiles

_LOG2_E = math.log2(math.e)
_MOST_ROWS = 64  # of a prefill's tile; the 128 of `prefill_attention` would leave no room for a second program
_PROGRAMS = 2  # on a multiprocessor


class Decodes(NamedTuple):
    """Sequences with one new token each: arguments of `decode_attention`."""

    block_table: Tensor  # [num_decodes, max_blocks] int32
    context_lens: Tensor  # [num_decodes] int32
    num_splits: int


class Prefills(NamedTuple):
    """Sequences with new tokens: arguments of `prefill_attention`."""

    block_table: Tensor  # [num_prefills, max_blocks] int32
    cu_seqlens: Tensor  # [num_prefills + 1] int32, counted from the first prefill's first row
    context_lens: Tensor  # [num_prefills] int32
    max_new_tokens: int


@triton.jit
def prefills_before(program: tl.tensor, num_prefill_programs: tl.tensor, num_programs: tl.tensor) -> tl.tensor:
    """Programs below `program` that take prefill tiles: spread evenly over the grid. int64."""
    return program.to(tl.int64) * num_prefill_programs // num_programs


@triton.jit(
    do_not_specialize=["num_decodes", "num_row_tiles", "num_prefills", "decode_table_stride", "prefill_table_stride"]
)
def _mixed_attention_kernel(
    q: tl.tensor,  # [num_decodes + prefill tokens, num_q_heads, head_dim]
    k: tl.tensor,  # [num_kv_heads, num_slots, head_dim]
    v: tl.tensor,  # [num_kv_heads, num_slots, head_dim]
    k_scales: tl.tensor,  # [num_kv_heads, num_slots] int16, of codes
    v_scales: tl.tensor,  # like k_scales
    decode_block_table: tl.tensor,  # [num_decodes, max_blocks]
    decode_context_lens: tl.tensor,  # [num_decodes]
    prefill_block_table: tl.tensor,  # [num_prefills, max_blocks]
    cu_seqlens: tl.tensor,  # [num_prefills + 1]
    prefill_context_lens: tl.tensor,  # [num_prefills]
    out: tl.tensor,  # like q, dense
    parts: tl.tensor,  # [num_decodes, num_q_heads, NUM_SPLITS, head_dim]
    parts_lse: tl.tensor,  # [num_decodes, num_q_heads, NUM_SPLITS], base 2
    scale_log2: tl.tensor,
    num_decodes: tl.tensor,
    num_row_tiles: tl.tensor,  # of a prefill
    num_prefills: tl.tensor,
    q_token_stride: tl.tensor,
    q_head_stride: tl.tensor,
    kv_head_stride: tl.tensor,
    decode_table_stride: tl.tensor,
    prefill_table_stride: tl.tensor,
    NUM_Q_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DECODE_ROWS: tl.constexpr,
    PREFILL_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    DECODE_TILE: tl.constexpr,
    PREFILL_TILE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    SCALED: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    NUM_KV_HEADS: tl.constexpr = NUM_Q_HEADS // GROUP
    num_prefill_programs = num_row_tiles * num_prefills * NUM_KV_HEADS
    index = prefills_before(program, num_prefill_programs, tl.num_programs(0))
    if prefills_before(program + 1, num_prefill_programs, tl.num_programs(0)) > index:
        tile = index.to(tl.int32)
        row_tile = num_row_tiles - 1 - tile // (NUM_KV_HEADS * num_prefills)  # the longest first
        seq = tile // NUM_KV_HEADS % num_prefills
        prefill_tile(
            row_tile, tile % NUM_KV_HEADS, seq.to(tl.int64),
            q + num_decodes * q_token_stride, k, v, k_scales, v_scales,
            prefill_block_table, cu_seqlens, prefill_context_lens, out + num_decodes * (NUM_Q_HEADS * HEAD_DIM),
            scale_log2, q_token_stride, q_head_stride, kv_head_stride, prefill_table_stride,
            NUM_Q_HEADS, GROUP, PREFILL_ROWS, HEAD_DIM, DIM_PAD, BLOCK_TOKENS, PREFILL_TILE, SCALED,
        )  # fmt: skip
        return
    rest = program - index.to(tl.int32)
    decode_split(
        (rest % num_decodes).to(tl.int64), rest // num_decodes % NUM_KV_HEADS, rest // (num_decodes * NUM_KV_HEADS),
        q, k, v, k_scales, v_scales, decode_block_table, decode_context_lens, parts, parts_lse,
        scale_log2, q_token_stride, q_head_stride, kv_head_stride, decode_table_stride,
        NUM_Q_HEADS, GROUP, DECODE_ROWS, HEAD_DIM, DIM_PAD, BLOCK_TOKENS, DECODE_TILE, NUM_SPLITS, MIN_SPLIT,
        SCALED,
    )  # fmt: skip


def mixed_attention(q: Tensor, kv: PagedKV, decodes: Decodes, prefills: Prefills, scale: float) -> Tensor:
    """`decode_attention` of the first rows and `prefill_attention` of the others; there are rows of both.

    q: [num_decodes + prefill tokens, num_q_heads, head_dim]. Returns a new tensor like q. Raises ValueError or
    TypeError as these two do.
    """
    num_decodes, num_prefills = len(decodes.block_table), len(prefills.block_table)
    if not 0 < num_decodes < len(q):
        raise ValueError(
            f"{num_decodes} of {len(q)} rows are decodes: a step without both kinds has kernels of its own"
        )
    group = check_decodes(q[:num_decodes], kv, decodes.block_table, decodes.context_lens, decodes.num_splits)
    check_prefills(q[num_decodes:], kv, *prefills)
    _, num_q_heads, head_dim = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    parts, parts_lse = split_parts(out[:num_decodes], decodes.num_splits)
    decode_rows, decode_tile, dim_pad = decode_tile_sizes(head_dim, group)
    most_rows = 32 if q.dtype == torch.float32 else _MOST_ROWS
    prefill_rows, keys, _ = prefill_tile_sizes(q, prefills.max_new_tokens * group, most_rows)
    num_row_tiles = num_tiles(prefills.max_new_tokens * group, prefill_rows)
    num_kv_heads = kv.k.shape[0]
    num_programs = num_kv_heads * (num_row_tiles * num_prefills + num_decodes * decodes.num_splits)
    _mixed_attention_kernel[(num_programs,)](
        q, kv.k, kv.v, *kv.scales, decodes.block_table, decodes.context_lens,
        prefills.block_table, prefills.cu_seqlens, prefills.context_lens, out, parts, parts_lse, scale * _LOG2_E,
        num_decodes, num_row_tiles, num_prefills,
        q.stride(0), q.stride(1), kv.k.stride(0), decodes.block_table.stride(0), prefills.block_table.stride(0),
        NUM_Q_HEADS=num_q_heads, GROUP=group, DECODE_ROWS=decode_rows, PREFILL_ROWS=prefill_rows,
        HEAD_DIM=head_dim, DIM_PAD=dim_pad, BLOCK_TOKENS=kv.block_tokens, DECODE_TILE=decode_tile, PREFILL_TILE=keys,
        NUM_SPLITS=decodes.num_splits, MIN_SPLIT=MIN_SPLIT_TOKENS,
        SCALED=kv.k_scales is not None,
        num_warps=4, enable_fp_fusion=True,
        num_stages=num_stages(
            q.device, kv.tile_bytes(max(decode_tile, keys)), prefill_rows * dim_pad * q.element_size(), _PROGRAMS
        ),
    )  # fmt: skip
    if decodes.num_splits > 1:
        merge_splits(parts, parts_lse, decodes.context_lens, out[:num_decodes], decode_tile)
    return out


def mixed_attention_reference(q: Tensor, kv: PagedKV, decodes: Decodes, prefills: Prefills, scale: float) -> Tensor:
    """`mixed_attention` in plain torch, float32 inside."""
    num_decodes = len(decodes.block_table)
    first = decode_attention_reference(
        q[:num_decodes], kv, decodes.block_table, decodes.context_lens, scale, decodes.num_splits
    )
    return torch.cat((first, prefill_attention_reference(q[num_decodes:], kv, *prefills, scale)))
