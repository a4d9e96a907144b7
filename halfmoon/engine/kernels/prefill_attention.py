"""Causal attention of packed new tokens over paged K and V: a cached prefix and the new tokens themselves.

FlashAttention (Dao et al., 2022): tiles of keys, running softmax. The query heads of a KV head are rows of one tile,
row r being token r // GROUP, so that short chunks still fill it and keys are read once for the whole group.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfmoon.engine.kernels.paged_kv import PagedKV, num_stages, tile_numbers, tile_scales, tile_slots
from halfmoon.engine.kernels.tensor_check import check_same_device, check_tensor
from halfmoon.engine.kernels.tile_counts import num_tiles, padded

_LOG2_E = math.log2(math.e)
_MIN_ROWS = 16  # minimum of a tensor-core product


@triton.jit
def _attend_tiles(
    query: tl.tensor,  # [ROWS, DIM_PAD]
    position: tl.tensor,  # [ROWS], each row's last visible key
    acc: tl.tensor,  # [ROWS, DIM_PAD]
    best: tl.tensor,  # [ROWS]
    total: tl.tensor,  # [ROWS]
    k: tl.tensor,  # one head's [num_slots, head_dim]
    v: tl.tensor,
    k_scales: tl.tensor,  # one head's [num_slots], of codes
    v_scales: tl.tensor,
    block_row: tl.tensor,
    first: tl.tensor,  # keys first..last, first a multiple of TILE
    last: tl.tensor,
    scale_log2: tl.tensor,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    SCALED: tl.constexpr,
    VISIBILITY: tl.constexpr,  # "all" (every row sees whole tiles) or "causal"
) -> tl.tensor:
    dim = tl.arange(0, DIM_PAD)
    next_slots = tile_slots(block_row, first, last, TILE, BLOCK_TOKENS)  # one tile ahead: loads need not wait
    for start in range(first, last, TILE):
        key = start + tl.arange(0, TILE)
        slots, next_slots = next_slots, tile_slots(block_row, start + TILE, last, TILE, BLOCK_TOKENS)
        at = slots[:, None] * HEAD_DIM + dim[None, :]
        mask = (dim < HEAD_DIM)[None, :]
        if VISIBILITY == "causal":  # only then can a tile extend past the last key
            mask = (key < last)[:, None] & mask
        keys = tile_numbers(tl.load(k + at, mask=mask, other=0), query.dtype)  # [TILE, DIM_PAD]
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale_log2  # [ROWS, TILE]
        if SCALED:
            scores = scores * tile_scales(k_scales, slots, key < last)[None, :]
        if VISIBILITY == "causal":
            scores = tl.where(key[None, :] <= position[:, None], scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        shrink = tl.exp2(best - new_best)
        weights = tl.exp2(scores - new_best[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        values = tile_numbers(tl.load(v + at, mask=mask, other=0), query.dtype)  # [TILE, DIM_PAD]
        if SCALED:
            weights = weights * tile_scales(v_scales, slots, key < last)[None, :]
        acc = tl.dot(weights.to(query.dtype), values, acc * shrink[:, None], input_precision="ieee")
        best = new_best
    return acc, best, total


@triton.jit
def prefill_tile(
    row_tile: tl.tensor,
    kv_head: tl.tensor,
    seq: tl.tensor,  # int64
    q: tl.tensor,  # [num_tokens, num_q_heads, head_dim]
    k: tl.tensor,  # [num_kv_heads, num_slots, head_dim]
    v: tl.tensor,  # [num_kv_heads, num_slots, head_dim]
    k_scales: tl.tensor,  # [num_kv_heads, num_slots] int16, of codes
    v_scales: tl.tensor,  # like k_scales
    block_table: tl.tensor,  # [num_seqs, max_blocks]
    cu_seqlens: tl.tensor,  # [num_seqs + 1]
    context_lens: tl.tensor,  # [num_seqs]
    out: tl.tensor,  # [num_tokens, num_q_heads, head_dim]
    scale_log2: tl.tensor,
    q_token_stride: tl.tensor,
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
    SCALED: tl.constexpr,
) -> None:
    """Attends from ROWS rows of one sequence and KV head; from none past the sequence's last."""
    token_start = tl.load(cu_seqlens + seq)
    num_new = tl.load(cu_seqlens + seq + 1) - token_start
    num_cached = tl.load(context_lens + seq) - num_new
    if row_tile * ROWS >= num_new * GROUP:
        return

    row = row_tile * ROWS + tl.arange(0, ROWS)
    token = row // GROUP
    head = kv_head * GROUP + row % GROUP
    dim = tl.arange(0, DIM_PAD)
    mask = (token < num_new)[:, None] & (dim < HEAD_DIM)[None, :]
    packed = (token_start + token).to(tl.int64)
    query = tl.load(
        q + packed[:, None] * q_token_stride + head[:, None] * q_head_stride + dim[None, :], mask=mask, other=0.0
    )  # [ROWS, DIM_PAD]
    k += kv_head.to(tl.int64) * kv_head_stride
    v += kv_head.to(tl.int64) * kv_head_stride
    if SCALED:
        k_scales += kv_head.to(tl.int64) * (kv_head_stride // 2)
        v_scales += kv_head.to(tl.int64) * (kv_head_stride // 2)
    block_row = block_table + seq * table_stride

    position = num_cached + token
    seen_by_all = num_cached + row_tile * ROWS // GROUP + 1
    last_token = tl.minimum((row_tile * ROWS + ROWS - 1) // GROUP, num_new - 1)
    whole = seen_by_all // TILE * TILE
    acc = tl.zeros([ROWS, DIM_PAD], tl.float32)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc, best, total = _attend_tiles(
        query, position, acc, best, total, k, v, k_scales, v_scales, block_row, 0, whole, scale_log2,
        HEAD_DIM, DIM_PAD, BLOCK_TOKENS, TILE, SCALED, "all",
    )  # fmt: skip
    acc, best, total = _attend_tiles(
        query, position, acc, best, total, k, v, k_scales, v_scales, block_row, whole, num_cached + last_token + 1,
        scale_log2, HEAD_DIM, DIM_PAD, BLOCK_TOKENS, TILE, SCALED, "causal",
    )  # fmt: skip
    result = acc / total[:, None]
    to = out + (packed * NUM_Q_HEADS + head)[:, None] * HEAD_DIM + dim[None, :]
    tl.store(to, result.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["table_stride"])
def _prefill_attention_kernel(
    q: tl.tensor,  # [num_tokens, num_q_heads, head_dim]
    k: tl.tensor,  # [num_kv_heads, num_slots, head_dim]
    v: tl.tensor,  # [num_kv_heads, num_slots, head_dim]
    k_scales: tl.tensor,  # [num_kv_heads, num_slots] int16, of codes
    v_scales: tl.tensor,  # like k_scales
    block_table: tl.tensor,  # [num_seqs, max_blocks]
    cu_seqlens: tl.tensor,  # [num_seqs + 1]
    context_lens: tl.tensor,  # [num_seqs]
    out: tl.tensor,  # [num_tokens, num_q_heads, head_dim]
    scale_log2: tl.tensor,
    q_token_stride: tl.tensor,
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
    SCALED: tl.constexpr,
) -> None:
    row_tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest first
    prefill_tile(
        row_tile, tl.program_id(1), tl.program_id(2).to(tl.int64),
        q, k, v, k_scales, v_scales, block_table, cu_seqlens, context_lens, out, scale_log2,
        q_token_stride, q_head_stride, kv_head_stride, table_stride,
        NUM_Q_HEADS, GROUP, ROWS, HEAD_DIM, DIM_PAD, BLOCK_TOKENS, TILE, SCALED,
    )  # fmt: skip


def check_prefills(
    q: Tensor, kv: PagedKV, block_table: Tensor, cu_seqlens: Tensor, context_lens: Tensor, max_new_tokens: int
) -> int:
    """Checks what `prefill_attention` is called with; returns the query heads per KV head. Raises as it does."""
    group = kv.check_query(q)
    check_tensor("block_table", block_table, (None, None), (torch.int32,))
    num_seqs = block_table.shape[0]
    check_tensor("cu_seqlens", cu_seqlens, (num_seqs + 1,), (torch.int32,))
    check_tensor("context_lens", context_lens, (num_seqs,), (torch.int32,))
    check_same_device(q=q, kv=kv.k, block_table=block_table, cu_seqlens=cu_seqlens, context_lens=context_lens)
    num_tokens = q.shape[0]
    if num_tokens and not 0 < max_new_tokens <= num_tokens:
        raise ValueError(f"max_new_tokens: {max_new_tokens} of {num_tokens} packed tokens")
    return group


def prefill_tile_sizes(q: Tensor, num_rows: int, most_rows: int) -> tuple[int, int, int]:
    """Rows of a tile, its keys, and the padded head size, where a sequence has at most `num_rows` rows a KV head.

    float32 has no tensor cores at full precision: it is for debugging, in tiles that fit the registers.
    """
    dim_pad = max(16, padded(q.shape[2]))
    rows = min(most_rows, max(_MIN_ROWS, padded(num_rows)))
    return rows, max(32, min(32 if q.dtype == torch.float32 else 64, 8192 // dim_pad)), dim_pad


def prefill_attention(
    q: Tensor,
    kv: PagedKV,
    block_table: Tensor,
    cu_seqlens: Tensor,
    context_lens: Tensor,
    max_new_tokens: int,
    scale: float,
) -> Tensor:
    """Attends from each sequence's new tokens, whose K and V are already stored, to all before them and to themselves.

    q: [num_tokens, num_q_heads, head_dim], packed sequence by sequence; block_table: [num_seqs, max_blocks] int32;
    cu_seqlens: [num_seqs + 1] int32, where each sequence begins; context_lens: [num_seqs] int32, cached and new tokens
    together; max_new_tokens: over all sequences, known to the host. Returns a new tensor like q. Raises ValueError or
    TypeError.
    """
    group = check_prefills(q, kv, block_table, cu_seqlens, context_lens, max_new_tokens)
    num_tokens, num_q_heads, head_dim = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if num_tokens == 0:
        return out
    most_rows = 32 if q.dtype == torch.float32 else 128
    rows, tile, dim_pad = prefill_tile_sizes(q, max_new_tokens * group, most_rows)
    _prefill_attention_kernel[(num_tiles(max_new_tokens * group, rows), kv.k.shape[0], block_table.shape[0])](
        q, kv.k, kv.v, *kv.scales, block_table, cu_seqlens, context_lens, out, scale * _LOG2_E,
        q.stride(0), q.stride(1), kv.k.stride(0), block_table.stride(0),
        NUM_Q_HEADS=num_q_heads, GROUP=group, ROWS=rows, HEAD_DIM=head_dim, DIM_PAD=dim_pad,
        BLOCK_TOKENS=kv.block_tokens, TILE=tile, SCALED=kv.k_scales is not None,
        num_warps=8 if rows == most_rows and dim_pad >= 128 else 4, enable_fp_fusion=True,
        num_stages=num_stages(q.device, kv.tile_bytes(tile), rows * dim_pad * q.element_size()),
    )  # fmt: skip
    return out


def prefill_attention_reference(
    q: Tensor,
    kv: PagedKV,
    block_table: Tensor,
    cu_seqlens: Tensor,
    context_lens: Tensor,
    max_new_tokens: int,
    scale: float,
) -> Tensor:
    """`prefill_attention` in plain torch, float32 inside."""
    del max_new_tokens
    out = torch.empty_like(q)
    group = kv.check_query(q)
    starts = cu_seqlens.tolist()
    for seq, context in enumerate(context_lens.tolist()):
        rows = slice(starts[seq], starts[seq + 1])
        num_new = starts[seq + 1] - starts[seq]
        keys, values = (x.repeat_interleave(group, dim=0) for x in kv.gathered(block_table[seq], context))
        scores = torch.einsum("nhd,htd->hnt", q[rows].float(), keys) * scale
        future = torch.ones(num_new, context, dtype=torch.bool, device=q.device).triu(context - num_new + 1)
        weights = scores.masked_fill(future, float("-inf")).softmax(dim=-1)
        out[rows] = torch.einsum("hnt,htd->nhd", weights, values).to(q.dtype)
    return out
