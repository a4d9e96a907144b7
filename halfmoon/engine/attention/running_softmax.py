"""Attention of some rows over keys that come in pieces, in any order: a running softmax (Milakov and Gimelshein, 2018).

What a piece adds is merged by its log-sum-exp, in float32, as ring attention does (Liu et al., "Ring Attention with
Blockwise Transformers", 2023, section 3).
"""

from __future__ import annotations

import torch
from torch import Tensor

from halfmoon.engine.attention.attention import flash
from halfmoon.engine.attention.attention_backend import AttentionRule
from halfmoon.engine.kv_memory.quantised_rows import is_quantised, numbers_of


class RunningSoftmax:
    """Owns the sums so far of `num_rows` rows; rows that saw no key yet have a log-sum-exp of minus infinity."""

    def __init__(self, sums: Tensor) -> None:
        """sums: [num_rows, num_heads, out_size + 1] float32, outputs and their log-sum-exp; changed in place."""
        self.sums = sums

    @classmethod
    def empty(cls, num_rows: int, num_heads: int, out_size: int, device: torch.device) -> RunningSoftmax:
        """Of rows that have seen nothing."""
        sums = torch.zeros(num_rows, num_heads, out_size + 1, device=device)
        sums[..., -1] = float("-inf")
        return cls(sums)

    @property
    def out(self) -> Tensor:
        """The rows' attention over all keys added, [num_rows, num_heads, out_size] float32."""
        return self.sums[..., :-1]

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Adds attention over further keys: out [rows, num_heads, out_size], lse [rows, num_heads]."""
        values, before = self.sums[rows, :, :-1], self.sums[rows, :, -1]
        total = torch.logaddexp(before, lse)
        base = torch.where(total.isneginf(), 0.0, total)  # of rows that still see nothing
        values.mul_(torch.exp(before - base).unsqueeze(-1)).add_(out.float() * torch.exp(lse - base).unsqueeze(-1))
        before.copy_(total)


def attend_part(
    q: Tensor, memory: Tensor, first_row: int, key_positions: Tensor, rule: AttentionRule
) -> tuple[Tensor, Tensor]:
    """Attention of consecutive rows over some of the keys before and among them, and its log-sum-exp.

    q: [num_rows, num_heads, head_dim], of positions from `first_row` on; memory: [2, num_kv_heads, num_keys,
    row_items]; key_positions: [num_keys], ascending. Returns float32 or q's dtype [num_rows, num_heads, out_size], and
    float32 [num_rows, num_heads].
    """
    before = int(torch.searchsorted(key_positions, first_row))
    num_rows = q.shape[0]
    seen = int(torch.searchsorted(key_positions, first_row + num_rows))
    is_plain = rule.window is None and rule.softcap is None and rule.latent_size is None
    is_plain = is_plain and q.device.type == "cpu" and not is_quantised(memory.dtype)
    if not is_plain or seen - before not in (0, num_rows):
        return attend_part_reference(q, memory[:, :, :seen], first_row, key_positions[:seen], rule)
    parts = RunningSoftmax.empty(num_rows, q.shape[1], memory.shape[3], q.device)
    for start, end, is_causal in ((0, before, False), (before, seen, True)):
        if start < end:
            parts.add(slice(None), *_flash_rows(q, memory[:, :, start:end], is_causal, rule.scale))
    return parts.out, parts.sums[..., -1]


def _flash_rows(q: Tensor, memory: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    num_rows, num_kv_heads = q.shape[0], memory.shape[1]
    grouped = q.reshape(num_rows, num_kv_heads, -1, q.shape[2]).permute(
        1, 2, 0, 3
    )  # [num_kv_heads, group, num_rows, head_dim]
    keys, values = (half.unsqueeze(1).expand(-1, grouped.shape[1], -1, -1) for half in memory)
    out, lse = flash(grouped, keys, values, is_causal, scale)
    return out.permute(2, 0, 1, 3).reshape(num_rows, q.shape[1], -1), lse.permute(2, 0, 1).reshape(num_rows, -1)


def attend_part_reference(
    q: Tensor, memory: Tensor, first_row: int, key_positions: Tensor, rule: AttentionRule
) -> tuple[Tensor, Tensor]:
    """Plain reference of `attend_part`, for every rule: scores in float32, masked by positions."""
    keys, values = rule.keys_and_values(numbers_of(memory), q.shape[1])
    scores = rule.scores(q.float().transpose(0, 1), keys)  # [num_heads, num_rows, num_keys]
    distance = torch.arange(first_row, first_row + q.shape[0], device=q.device)[:, None] - key_positions
    unseen = distance < 0 if rule.window is None else (distance < 0) | (distance >= rule.window)
    scores = scores.masked_fill(unseen, float("-inf"))
    lse = scores.logsumexp(dim=-1)  # [num_heads, num_rows]
    weights = torch.exp(scores - torch.where(lse.isneginf(), 0.0, lse).unsqueeze(-1))
    return (weights @ values).transpose(0, 1), lse.transpose(0, 1)
