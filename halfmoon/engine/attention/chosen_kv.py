"""Chooses which K and V of a prompt are kept, while its last tokens are computed (SnapKV, arXiv 2404.14469, section 4).

Each layer and each KV head keeps the tokens to which the prompt's last `OBSERVERS` tokens gave most attention, summed
over the query heads of the group and smoothed over neighbours. Their rows are copied to other blocks, in the order of
the text. Keys are kept after rotation, so attention over them needs no positions, and back ends know nothing of this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d

from halfmoon.engine.attention.attention_backend import AttentionRule, StepAttention
from halfmoon.engine.chunk import Chunk
from halfmoon.engine.kv_memory.kv_arena import KVArena, slot_runs
from halfmoon.engine.kv_memory.quantised_rows import numbers_of
from halfmoon.kv.kv_policy import OBSERVERS

_NEIGHBOURS = 7  # a token's attention is the mean over as many, itself in the middle


class ChosenSlots(NamedTuple):
    """One prompt that ends in a step."""

    rows: slice  # of the step: the tokens that choose
    slots: Tensor  # [num_tokens] int64, of the whole prompt
    num_candidates: int
    kept: Tensor  # [num_kept] int64, the slots that K and V of chosen tokens are copied to


class ChoosingAttention:
    """Attends like `inner`, then keeps what each prompt chooses of this layer."""

    def __init__(self, inner: StepAttention, prompts: Sequence[ChosenSlots]) -> None:
        self._inner = inner
        self._prompts = prompts

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer_kv: Tensor, rule: AttentionRule) -> Tensor:
        """See `StepAttention.attend`."""
        out = self._inner.attend(q, k, v, layer_kv, rule)
        for prompt in self._prompts:
            keep_chosen(q[prompt.rows], layer_kv, prompt, rule)
        return out


def choosing(attention: StepAttention, chunks: Sequence[Chunk], arena: KVArena) -> StepAttention:
    """`attention` of a step over `chunks`; where a prompt ends under a policy that chooses, it does."""
    prompts, end = [], 0
    for chunk in chunks:
        end += len(chunk.token_ids)
        if chunk.choice is not None:
            rows = slice(end - min(OBSERVERS, len(chunk.token_ids)), end)
            slots = _slots(chunk.blocks, chunk.end, arena)
            kept = _slots(chunk.choice.blocks, len(chunk.choice.blocks) * arena.block_tokens, arena)
            prompts.append(ChosenSlots(rows, slots, chunk.choice.num_candidates, kept))
    return ChoosingAttention(attention, prompts) if prompts else attention


def keep_chosen(q: Tensor, layer_kv: Tensor, prompt: ChosenSlots, rule: AttentionRule) -> None:
    """Copies one layer's chosen rows. q: [num_observers, num_heads, head_dim]; layer_kv: see `StepAttention.attend`."""
    rows = layer_kv[:, :, prompt.slots]  # [2, num_kv_heads, num_tokens, row_items]
    attention = observed_attention(q.float(), rule.keys(numbers_of(rows)), rule)[:, : prompt.num_candidates]
    smooth = avg_pool1d(attention[None], _NEIGHBOURS, 1, _NEIGHBOURS // 2)[0]
    chosen = smooth.topk(len(prompt.kept)).indices.sort().values  # [num_kv_heads, num_kept]
    where = chosen[None, :, :, None].expand(2, -1, -1, rows.shape[3])
    layer_kv[:, :, prompt.kept] = rows.gather(2, where)


def observed_attention(q: Tensor, keys: Tensor, rule: AttentionRule) -> Tensor:
    """The attention that the last tokens of a sequence give to all of it, [num_kv_heads, num_tokens].

    q: [num_observers, num_heads, head_dim]; keys: [num_kv_heads, num_tokens, head_dim]; both float32.
    """
    num_observers, (num_kv_heads, num_tokens, _) = len(q), keys.shape
    grouped = q.view(num_observers, num_kv_heads, -1, q.shape[2]).permute(1, 2, 0, 3)
    ahead = torch.ones(num_observers, num_tokens, dtype=torch.bool, device=q.device).triu(
        num_tokens - num_observers + 1
    )
    result = []
    for queries, own in zip(grouped, keys, strict=True):  # a head at a time: scores of long prompts are large
        scores = rule.scores(queries, own)  # [group, num_observers, num_tokens]
        result.append(scores.masked_fill(ahead, float("-inf")).softmax(-1).sum((0, 1)))
    return torch.stack(result)


def _slots(blocks: Sequence[int], num_tokens: int, arena: KVArena) -> Tensor:
    runs = slot_runs(blocks, arena.block_tokens, 0, num_tokens)
    return torch.cat([torch.arange(*run, device=arena.tensor.device) for run in runs])
