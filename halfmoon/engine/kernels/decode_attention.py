"""Attention of one new token per sequence over its paged K and V, split along the keys (FlashDecoding, Dao, 2023).

The query heads of a KV head are the rows of one program, so its keys are read once. The grid depends only on the
numbers of sequences and splits; the kernel computes from `context_lens` which keys a row attends to, so a captured CUDA
graph stays correct as sequences grow. `key_splits` merges the splits.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfmoon.engine.kernels.key_splits import (
    MIN_SPLIT_TOKENS,
    check_num_splits,
    merge_splits,
    split_parts,
    split_tokens,
)
from halfmoon.engine.kernels.paged_kv import PagedKV, num_sms, num_stages, tile_numbers, tile_scales, tile_slots
from halfmoon.engine.kernels.tensor_check import check_same_device, check_tensor
from halfmoon.engine.kernels.tile_counts import padded

PROGRAMS_PER_SM = 4  # so many run at once, or nearly
_LOG2_E = math.log2(math.e)
_MIN_ROWS = 16  # minimum of a tensor-core product; a smaller group of query heads is padded
# From so many programs to a multiprocessor on, those over numbers load two tiles ahead instead of three: then one more
# fits. Programs over codes fit anyway.
_CROWDED = 3


@triton.jit
def decode_split(
    seq: tl.tensor,  # int64
    kv_head: tl.tensor,
    split: tl.tensor,
    q: tl.tensor,  # [num_seqs, num_q_heads, head_dim]
    k: tl.tensor,  # [num_kv_heads, num_slots, head_dim]
    v: tl.tensor,  # [num_kv_heads, num_slots, head_dim]
    k_scales: tl.tensor,  # [num_kv_heads, num_slots] int16, of codes
    v_scales: tl.tensor,  # like k_scales
    block_table: tl.tensor,  # [num_seqs, max_blocks]
    context_lens: tl.tensor,  # [num_seqs]
    out: tl.tensor,  # [num_seqs, num_q_heads, NUM_SPLITS, head_dim]
    out_lse: tl.tensor,  # [num_seqs, num_q_heads, NUM_SPLITS], base 2
    scale_log2: tl.tensor,
    q_seq_stride: tl.tensor,
    q_head_stride: tl.tensor,
    kv_head_stride: tl.tensor,
    table_stride: tl.tensor,
    NUM_Q_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    SCALED: tl.constexpr,
) -> None:
    """Attends from one sequence's row to one split of its keys in one KV head; to none where the split is empty."""
    context = tl.load(context_lens + seq)
    first, last = 0, context
    if NUM_SPLITS > 1:
        share = split_tokens(context, NUM_SPLITS, MIN_SPLIT, TILE)
        first = split * share
        last = tl.minimum(first + share, context)
        if first >= last:
            return  # the merge skips this split, too

    row = tl.arange(0, ROWS)
    dim = tl.arange(0, DIM_PAD)
    head = kv_head * GROUP + row
    row_mask = (row < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    query = tl.load(
        q + seq * q_seq_stride + head[:, None] * q_head_stride + dim[None, :], mask=row_mask, other=0.0
    )  # [ROWS, DIM_PAD]
    k += kv_head.to(tl.int64) * kv_head_stride
    v += kv_head.to(tl.int64) * kv_head_stride
    if SCALED:
        k_scales += kv_head.to(tl.int64) * (kv_head_stride // 2)
        v_scales += kv_head.to(tl.int64) * (kv_head_stride // 2)
    block_row = block_table + seq * table_stride

    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM_PAD], tl.float32)
    next_slots = tile_slots(block_row, first, last, TILE, BLOCK_TOKENS)  # one tile ahead: loads need not wait
    for start in range(first, last, TILE):
        seen = start + tl.arange(0, TILE) < last
        slots, next_slots = next_slots, tile_slots(block_row, start + TILE, last, TILE, BLOCK_TOKENS)
        at = slots[:, None] * HEAD_DIM + dim[None, :]
        mask = seen[:, None] & (dim < HEAD_DIM)[None, :]
        keys = tile_numbers(tl.load(k + at, mask=mask, other=0), query.dtype)  # [TILE, DIM_PAD]
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale_log2  # [ROWS, TILE]
        if SCALED:
            scores = scores * tile_scales(k_scales, slots, seen)[None, :]
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        shrink = tl.exp2(best - new_best)
        weights = tl.exp2(scores - new_best[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        values = tile_numbers(tl.load(v + at, mask=mask, other=0), query.dtype)  # [TILE, DIM_PAD]
        if SCALED:
            weights = weights * tile_scales(v_scales, slots, seen)[None, :]
        acc = acc * shrink[:, None] + tl.dot(weights.to(query.dtype), values, input_precision="ieee")
        best = new_best

    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]  # zeros for an empty context
    where = (seq * NUM_Q_HEADS + head) * NUM_SPLITS + split
    tl.store(out + where[:, None] * HEAD_DIM + dim[None, :], result.to(out.dtype.element_ty), mask=row_mask)
    if NUM_SPLITS > 1:
        tl.store(out_lse + where, best + tl.log2(total), mask=row < GROUP)


@triton.jit(do_not_specialize=["table_stride"])
def _decode_attention_kernel(
    q: tl.tensor,  # [num_seqs, num_q_heads, head_dim]
    k: tl.tensor,  # [num_kv_heads, num_slots, head_dim]
    v: tl.tensor,  # [num_kv_heads, num_slots, head_dim]
    k_scales: tl.tensor,  # [num_kv_heads, num_slots] int16, of codes
    v_scales: tl.tensor,  # like k_scales
    block_table: tl.tensor,  # [num_seqs, max_blocks]
    context_lens: tl.tensor,  # [num_seqs]
    out: tl.tensor,  # [num_seqs, num_q_heads, NUM_SPLITS, head_dim]
    out_lse: tl.tensor,  # [num_seqs, num_q_heads, NUM_SPLITS], base 2
    scale_log2: tl.tensor,
    q_seq_stride: tl.tensor,
    q_head_stride: tl.tensor,
    kv_head_stride: tl.tensor,
    table_stride: tl.tensor,
    NUM_Q_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    SCALED: tl.constexpr,
) -> None:
    decode_split(
        tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2),
        q, k, v, k_scales, v_scales, block_table, context_lens, out, out_lse, scale_log2,
        q_seq_stride, q_head_stride, kv_head_stride, table_stride,
        NUM_Q_HEADS, GROUP, ROWS, HEAD_DIM, DIM_PAD, BLOCK_TOKENS, TILE, NUM_SPLITS, MIN_SPLIT, SCALED,
    )  # fmt: skip


def check_decodes(q: Tensor, kv: PagedKV, block_table: Tensor, context_lens: Tensor, num_splits: int) -> int:
    """Checks what `decode_attention` is called with; returns the query heads per KV head. Raises as it does."""
    group = kv.check_query(q)
    num_seqs = q.shape[0]
    check_tensor("block_table", block_table, (num_seqs, None), (torch.int32,))
    check_tensor("context_lens", context_lens, (num_seqs,), (torch.int32,))
    check_same_device(q=q, kv=kv.k, block_table=block_table, context_lens=context_lens)
    check_num_splits(num_splits)
    return group


def decode_tile_sizes(head_dim: int, group: int) -> tuple[int, int, int]:
    """Rows of a program, keys of a tile, and the padded head size."""
    dim_pad = max(16, padded(head_dim))
    rows = max(_MIN_ROWS, padded(group))
    return rows, max(32, min(128, 8192 // dim_pad)), dim_pad  # 64 tokens at head size 128


def decode_attention(
    q: Tensor, kv: PagedKV, block_table: Tensor, context_lens: Tensor, scale: float, num_splits: int
) -> Tensor:
    """Attends from the last token of each sequence, whose K and V are already stored, to the whole sequence.

    q: [num_seqs, num_q_heads, head_dim]; block_table: [num_seqs, max_blocks] int32; context_lens: [num_seqs] int32, 0
    for a row that pads a CUDA graph (its output is zeros). Returns a new [num_seqs, num_q_heads, head_dim].
    `num_splits` is a power of two (`choose_num_splits`). Raises ValueError or TypeError.
    """
    group = check_decodes(q, kv, block_table, context_lens, num_splits)
    num_seqs, num_q_heads, head_dim = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if num_seqs == 0:
        return out
    parts, parts_lse = split_parts(out, num_splits)
    rows, tile, dim_pad = decode_tile_sizes(head_dim, group)
    is_coded = kv.k_scales is not None
    is_crowded = not is_coded and num_seqs * kv.k.shape[0] * num_splits >= _CROWDED * num_sms(q.device)
    _decode_attention_kernel[(num_seqs, kv.k.shape[0], num_splits)](
        q, kv.k, kv.v, *kv.scales, block_table, context_lens, parts, parts_lse, scale * _LOG2_E,
        q.stride(0), q.stride(1), kv.k.stride(0), block_table.stride(0),
        NUM_Q_HEADS=num_q_heads, GROUP=group, ROWS=rows,
        HEAD_DIM=head_dim, DIM_PAD=dim_pad, BLOCK_TOKENS=kv.block_tokens, TILE=tile,
        NUM_SPLITS=num_splits, MIN_SPLIT=MIN_SPLIT_TOKENS,
        SCALED=is_coded,
        num_warps=2 if is_coded else 4, enable_fp_fusion=True,
        num_stages=min(2 if is_crowded else 3, num_stages(q.device, kv.tile_bytes(tile), 0)),
    )  # fmt: skip
    if num_splits > 1:
        merge_splits(parts, parts_lse, context_lens, out, tile)
    return out


def decode_attention_reference(
    q: Tensor, kv: PagedKV, block_table: Tensor, context_lens: Tensor, scale: float, num_splits: int
) -> Tensor:
    """`decode_attention` in plain torch, float32 inside; the number of splits has no effect."""
    del num_splits
    out = torch.zeros_like(q)
    group = kv.check_query(q)
    for seq, context in enumerate(context_lens.tolist()):
        if context:
            keys, values = (x.repeat_interleave(group, dim=0) for x in kv.gathered(block_table[seq], context))
            scores = torch.einsum("hd,htd->ht", q[seq].float(), keys) * scale
            out[seq] = torch.einsum("ht,htd->hd", scores.softmax(dim=-1), values).to(q.dtype)
    return out
