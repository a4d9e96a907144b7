"""Attention over paged latents (MLA): one row a token is the key of all query heads, and its front their value.

The queries are absorbed (DeepSeek-V2, section 2.1.2), so a program reads each row once for up to 64 query heads, as
FlashMLA does. A decode's keys are split as in `decode_attention`; a prompt's are not. Row r of a program is token
r // num_heads of its sequence. In memory the first half of a row is K, the second V.
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
from halfmoon.engine.kernels.paged_kv import PagedKV, generation, num_stages, tile_numbers, tile_scales, tile_slots
from halfmoon.engine.kernels.tensor_check import check_same_device, check_tensor
from halfmoon.engine.kernels.tile_counts import num_tiles, padded

_LOG2_E = math.log2(math.e)
_MIN_ROWS = 16  # minimum of a tensor-core product
PROGRAMS_PER_SM = 2  # of decodes: one runs at a time, and two waves end nearly together
_MOST_ROWS = 64  # their outputs, 512 numbers each, fill the registers of eight warps


@triton.jit
def _latent_tile(
    rows: tl.tensor,  # [num_slots, HALF], the first halves
    to_second_half: tl.tensor,  # what lies between a row's halves
    scales: tl.tensor,  # [num_slots] int16, of the first halves of codes
    slots: tl.tensor,  # [TILE]
    seen: tl.tensor,  # [TILE]
    FIRST: tl.constexpr,  # numbers FIRST..FIRST + SIZE of each row
    SIZE: tl.constexpr,
    PAD: tl.constexpr,
    HALF: tl.constexpr,
    SCALED: tl.constexpr,
    dtype: tl.constexpr,
) -> tl.tensor:
    """Returns [TILE, PAD], zeros beyond SIZE and for what is not seen."""
    number = FIRST + tl.arange(0, PAD)
    within = number + tl.where(number < HALF, 0, to_second_half - HALF)
    mask = seen[:, None] & (number < FIRST + SIZE)[None, :]
    tile = tl.load(rows + slots[:, None] * HALF + within[None, :], mask=mask, other=0)
    if SCALED:
        first = tile_scales(scales, slots, seen)
        second = tile_scales(scales + to_second_half // 2, slots, seen)
        tile = tile_numbers(tile, tl.float32) * tl.where((number < HALF)[None, :], first[:, None], second[:, None])
    return tile.to(dtype)


@triton.jit(do_not_specialize=["table_stride"])
def _latent_attention_kernel(
    q: tl.tensor,  # [num_tokens, NUM_HEADS, SIZE + SHARED]
    rows: tl.tensor,  # [num_slots, HALF], the first halves
    scales: tl.tensor,  # [num_slots] int16, of codes
    block_table: tl.tensor,  # [num_seqs, max_blocks]
    cu_seqlens: tl.tensor,  # [num_seqs + 1]; not read where each sequence has one token
    context_lens: tl.tensor,  # [num_seqs]
    out: tl.tensor,  # [num_tokens, NUM_HEADS, NUM_SPLITS, SIZE]
    out_lse: tl.tensor,  # [num_tokens, NUM_HEADS, NUM_SPLITS], base 2
    scale_log2: tl.tensor,
    q_token_stride: tl.tensor,
    q_head_stride: tl.tensor,
    to_second_half: tl.tensor,
    table_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,  # of the latent
    SIZE_PAD: tl.constexpr,
    SHARED: tl.constexpr,  # of the rotated part
    SHARED_PAD: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    SCALED: tl.constexpr,
    IS_DECODE: tl.constexpr,
) -> None:
    row_tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest first
    split = tl.program_id(1)
    seq = tl.program_id(2).to(tl.int64)
    context = tl.load(context_lens + seq)
    token_start, num_new = seq, 1
    if not IS_DECODE:
        token_start = tl.load(cu_seqlens + seq).to(tl.int64)
        num_new = (tl.load(cu_seqlens + seq + 1) - token_start).to(tl.int32)
    if row_tile * ROWS >= num_new * NUM_HEADS:
        return
    row = row_tile * ROWS + tl.arange(0, ROWS)
    position = context - num_new + row // NUM_HEADS
    last_token = tl.minimum((row_tile * ROWS + ROWS - 1) // NUM_HEADS, num_new - 1)
    first, last = 0, context - num_new + last_token + 1
    if IS_DECODE:
        last = context
    if NUM_SPLITS > 1:
        share = split_tokens(context, NUM_SPLITS, MIN_SPLIT, TILE)
        first = split * share
        last = tl.minimum(first + share, context)
        if first >= last:
            return  # the merge skips this split, too

    at = (token_start + row // NUM_HEADS) * q_token_stride + row % NUM_HEADS * q_head_stride
    number = tl.arange(0, SIZE_PAD)
    more = tl.arange(0, SHARED_PAD)
    is_row = row < num_new * NUM_HEADS
    query = tl.load(q + at[:, None] + number[None, :], mask=is_row[:, None] & (number < SIZE)[None, :], other=0.0)
    query_shared = tl.load(
        q + at[:, None] + SIZE + more[None, :], mask=is_row[:, None] & (more < SHARED)[None, :], other=0.0
    )  # [ROWS, SHARED_PAD]
    block_row = block_table + seq * table_stride

    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, SIZE_PAD], tl.float32)
    next_slots = tile_slots(block_row, first, last, TILE, BLOCK_TOKENS)  # one tile ahead: loads need not wait
    for start in range(first, last, TILE):
        key = start + tl.arange(0, TILE)
        seen = key < last
        slots, next_slots = next_slots, tile_slots(block_row, start + TILE, last, TILE, BLOCK_TOKENS)
        latent = _latent_tile(
            rows, to_second_half, scales, slots, seen, 0, SIZE, SIZE_PAD, HALF, SCALED, query.dtype
        )  # [TILE, SIZE_PAD]
        shared = _latent_tile(
            rows, to_second_half, scales, slots, seen, SIZE, SHARED, SHARED_PAD, HALF, SCALED, query.dtype
        )  # [TILE, SHARED_PAD]
        scores = tl.dot(query, tl.trans(latent), input_precision="ieee")  # [ROWS, TILE]
        scores = tl.dot(query_shared, tl.trans(shared), scores, input_precision="ieee") * scale_log2
        scores = tl.where(seen[None, :] & (key[None, :] <= position[:, None]), scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        shrink = tl.exp2(best - new_best)
        weights = tl.exp2(scores - new_best[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(query.dtype), latent, acc * shrink[:, None], input_precision="ieee")
        best = new_best

    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]  # zeros for an empty context
    where = (token_start * NUM_HEADS + row) * NUM_SPLITS + split
    to = out + where[:, None] * SIZE + number[None, :]
    tl.store(to, result.to(out.dtype.element_ty), mask=is_row[:, None] & (number < SIZE)[None, :])
    if NUM_SPLITS > 1:
        tl.store(out_lse + where, best + tl.log2(total), mask=is_row)


def row_tile(num_rows: int, memory: torch.dtype) -> int:
    """Rows of a program, of so many rows of a sequence, where KV is of this dtype.

    float32 has no tensor cores at full precision, and is for debugging; codes are widened in registers.
    """
    return _MOST_ROWS if num_rows > _MIN_ROWS and memory in (torch.bfloat16, torch.float16) else _MIN_ROWS


def _tile_keys(q: Tensor, rows: int, row_bytes: int) -> tuple[int, int]:
    """Keys of a tile, and the depth of its load pipeline.

    Two tiles of 64 keys fit Hopper's shared memory and registers: 1.4 times as fast as two of 32. On Ampere registers
    spill, and on Blackwell, which keeps the queries in shared memory as well, there is no room.
    """
    if rows == _MOST_ROWS and q.element_size() == 2 and generation(q.device) == 9:
        return 64, 2
    tile = 16 if q.dtype == torch.float32 else 32
    return tile, min(2, num_stages(q.device, tile * row_bytes, rows * row_bytes))  # a third would not fit


def latent_attention(
    q: Tensor,
    kv: PagedKV,
    block_table: Tensor,
    context_lens: Tensor,
    scale: float,
    latent_size: int,
    num_splits: int = 1,
    cu_seqlens: Tensor | None = None,
    max_new_tokens: int = 1,
) -> Tensor:
    """Attends from each sequence's new tokens, whose rows are already stored, to all before them and to themselves.

    q: [num_tokens, num_heads, 2 * half], absorbed; kv: of one head, the halves of rows; block_table: [num_seqs,
    max_blocks] int32; context_lens: [num_seqs] int32, this step's tokens included, 0 for a row that pads a CUDA graph
    (its output is zeros); cu_seqlens: [num_seqs + 1] int32, None where each has one new token, and only then keys are
    split. Returns a new [num_tokens, num_heads, latent_size]. Raises ValueError or TypeError.
    """
    half = check_latents(q, kv, latent_size)
    num_tokens, num_heads, _ = q.shape
    check_tensor("context_lens", context_lens, (None,), (torch.int32,))
    num_seqs = context_lens.shape[0]
    check_tensor("block_table", block_table, (num_seqs, None), (torch.int32,))
    check_same_device(q=q, kv=kv.k, block_table=block_table, context_lens=context_lens, cu_seqlens=cu_seqlens)
    check_num_splits(num_splits)
    if cu_seqlens is not None:
        check_tensor("cu_seqlens", cu_seqlens, (num_seqs + 1,), (torch.int32,))
    if (num_tokens != num_seqs or max_new_tokens != 1) if cu_seqlens is None else num_splits != 1:
        raise ValueError(f"keys of decodes only are split: {num_tokens} tokens of {num_seqs}, {num_splits} splits")
    out = torch.empty((num_tokens, num_heads, latent_size), dtype=q.dtype, device=q.device)
    if num_tokens == 0:
        return out
    if not 0 < max_new_tokens <= num_tokens:
        raise ValueError(f"max_new_tokens: {max_new_tokens} of {num_tokens} packed tokens")
    parts, parts_lse = split_parts(out, num_splits)
    shared = 2 * half - latent_size
    size_pad, shared_pad = (max(16, padded(size)) for size in (latent_size, shared))
    rows = row_tile(num_heads * max_new_tokens, kv.k.dtype)
    tile, stages = _tile_keys(q, rows, (size_pad + shared_pad) * q.element_size())
    _latent_attention_kernel[(num_tiles(num_heads * max_new_tokens, rows), num_splits, num_seqs)](
        q, kv.k, kv.scales[0], block_table, context_lens if cu_seqlens is None else cu_seqlens, context_lens,
        parts, parts_lse, scale * _LOG2_E, q.stride(0), q.stride(1),
        (kv.v.data_ptr() - kv.k.data_ptr()) // kv.k.element_size(), block_table.stride(0),
        NUM_HEADS=num_heads, ROWS=rows, SIZE=latent_size, SIZE_PAD=size_pad, SHARED=shared, SHARED_PAD=shared_pad,
        HALF=half, BLOCK_TOKENS=kv.block_tokens, TILE=tile, NUM_SPLITS=num_splits, MIN_SPLIT=MIN_SPLIT_TOKENS,
        SCALED=kv.k_scales is not None, IS_DECODE=cu_seqlens is None,
        num_warps=8 if rows == _MOST_ROWS else 4, enable_fp_fusion=True,
        num_stages=stages,
    )  # fmt: skip
    if num_splits > 1:
        merge_splits(parts, parts_lse, context_lens, out, tile)
    return out


def check_latents(q: Tensor, kv: PagedKV, latent_size: int) -> int:
    """Returns half the size of a row. Raises ValueError or TypeError."""
    num_kv_heads, _, half = kv.k.shape
    if num_kv_heads != 1 or not 0 < latent_size < 2 * half:
        raise ValueError(f"latents of {latent_size} numbers in {num_kv_heads} heads of twice {half}")
    check_tensor("q", q, (None, None, 2 * half), kv.new_dtypes)
    return half


def latent_attention_reference(
    q: Tensor,
    kv: PagedKV,
    block_table: Tensor,
    context_lens: Tensor,
    scale: float,
    latent_size: int,
    num_splits: int = 1,
    cu_seqlens: Tensor | None = None,
    max_new_tokens: int = 1,
) -> Tensor:
    """`latent_attention` in plain torch, float32 inside; splits have no effect."""
    del num_splits, max_new_tokens
    check_latents(q, kv, latent_size)
    out = torch.zeros((*q.shape[:2], latent_size), dtype=q.dtype, device=q.device)
    starts = list(range(len(q) + 1)) if cu_seqlens is None else cu_seqlens.tolist()
    for seq, context in enumerate(context_lens.tolist()):
        new = slice(starts[seq], starts[seq + 1])
        num_new = new.stop - new.start
        if context == 0:
            continue
        keys = torch.cat(kv.gathered(block_table[seq], context), dim=-1)[0]  # [context, 2 * half]
        scores = torch.einsum("nhd,td->hnt", q[new].float(), keys) * scale
        future = torch.ones(num_new, context, dtype=torch.bool, device=q.device).triu(context - num_new + 1)
        weights = scores.masked_fill(future, float("-inf")).softmax(dim=-1)
        out[new] = torch.einsum("hnt,tl->nhl", weights, keys[:, :latent_size]).to(q.dtype)
    return out
