"""Splits of a sequence's keys, so that few sequences fill a device: how many, and what they give together.

Each split gives an output and the log-sum-exp of its scores, by which a second kernel merges them (FlashDecoding, Dao,
2023).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfmoon.engine.kernels.tile_counts import num_tiles, padded

MIN_SPLIT_TOKENS = 256  # below this a program costs more to start and merge than it saves
_MERGED_NUMBERS = 8192  # that a program of the merge holds


def choose_num_splits(
    num_seqs: int, num_programs: int, max_context_tokens: int, num_sms: int, programs_per_sm: int
) -> int:
    """Programs along the keys: about `programs_per_sm` on each multiprocessor, each with at least MIN_SPLIT_TOKENS.

    A power of two (the nearest to programs_per_sm * num_sms / (num_seqs * num_programs)), so that few variants are
    compiled; `num_programs` compute a sequence whose keys are not split.
    """
    wanted = programs_per_sm * num_sms / max(1, num_seqs * num_programs)
    lower = 1 << max(0, math.floor(math.log2(wanted)))
    nearest = 2 * lower if wanted > 1.5 * lower else lower
    most = max(1, max_context_tokens // MIN_SPLIT_TOKENS)
    return min(nearest, 1 << (most.bit_length() - 1))


def check_num_splits(num_splits: int) -> None:
    """Raises ValueError."""
    if num_splits < 1 or num_splits & (num_splits - 1):
        raise ValueError(f"num_splits: {num_splits} is not a power of two")


@triton.jit
def split_tokens(
    context: tl.tensor, NUM_SPLITS: tl.constexpr, MIN_SPLIT: tl.constexpr, TILE: tl.constexpr
) -> tl.tensor:
    """Tokens per split of a sequence, in whole tiles; trailing splits may be empty."""
    share = tl.maximum(tl.cdiv(context, NUM_SPLITS), MIN_SPLIT)
    return tl.cdiv(share, TILE) * TILE


def split_parts(out: Tensor, num_splits: int) -> tuple[Tensor, Tensor]:
    """Where splits of `out`, [num_seqs, num_q_heads, head_dim], are stored, and their log-sum-exps: see `merge_splits`.

    Without splits these are `out`, and the second is not written.
    """
    if num_splits == 1:
        return out, out
    shape = (*out.shape[:2], num_splits)
    parts = torch.empty((*shape, out.shape[2]), dtype=torch.float32, device=out.device)
    return parts, torch.empty(shape, dtype=torch.float32, device=out.device)


@triton.jit
def _merge_splits_kernel(
    parts: tl.tensor,  # [num_seqs, num_q_heads, NUM_SPLITS, head_dim]
    parts_lse: tl.tensor,  # [num_seqs, num_q_heads, NUM_SPLITS], base 2
    context_lens: tl.tensor,  # [num_seqs]
    out: tl.tensor,  # [num_seqs, num_q_heads, head_dim]
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,  # of a program
    TILE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
) -> None:
    seq = tl.program_id(0).to(tl.int64)
    at = seq * tl.num_programs(1) + tl.program_id(1)
    context = tl.load(context_lens + seq)
    num_used = tl.cdiv(context, split_tokens(context, NUM_SPLITS, MIN_SPLIT, TILE))
    split = tl.arange(0, NUM_SPLITS)
    dim = tl.program_id(2) * DIMS + tl.arange(0, DIMS)
    used = split < num_used
    lse = tl.load(parts_lse + at * NUM_SPLITS + split, mask=used, other=float("-inf"))
    best = tl.where(num_used > 0, tl.max(lse, axis=0), 0.0)
    weights = tl.where(used, tl.exp2(lse - best), 0.0)
    total = tl.sum(weights, axis=0)
    part = tl.load(
        parts + (at * NUM_SPLITS + split)[:, None] * HEAD_DIM + dim[None, :],
        mask=used[:, None] & (dim < HEAD_DIM)[None, :],
        other=0.0,
    )  # [NUM_SPLITS, DIMS]
    merged = tl.sum(part * weights[:, None], axis=0) / tl.where(total > 0.0, total, 1.0)
    tl.store(out + at * HEAD_DIM + dim, merged.to(out.dtype.element_ty), mask=dim < HEAD_DIM)


def merge_splits(parts: Tensor, parts_lse: Tensor, context_lens: Tensor, out: Tensor, tile: int) -> None:
    """Writes to `out` what splits in whole tiles of `tile` keys give together.

    parts: [num_seqs, num_q_heads, num_splits, head_dim] float32, parts_lse: without head_dim; out: without splits.
    """
    num_seqs, num_q_heads, num_splits, head_dim = parts.shape
    dims = max(16, min(padded(head_dim), _MERGED_NUMBERS // num_splits))
    _merge_splits_kernel[(num_seqs, num_q_heads, num_tiles(head_dim, dims))](
        parts, parts_lse, context_lens, out,
        HEAD_DIM=head_dim, DIMS=dims, TILE=tile, NUM_SPLITS=num_splits, MIN_SPLIT=MIN_SPLIT_TOKENS,
        num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
