"""Chooses which K and V of a prompt are kept, while the tokens that choose are computed.

Each layer and each KV head keeps the tokens to which the prompt's last ones (SnapKV, arXiv 2404.14469, section 4), or
all of them (H2O, arXiv 2306.14048, section 4), gave most attention, summed over the query heads of the group and
smoothed over neighbours (`Chooser`). Their rows are copied to other blocks, in the order of the text. Keys are kept
after rotation, so attention over them needs no positions, and back ends know nothing of this.
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
from halfmoon.engine.kv_memory.quantised_rows import numbers_of, put_rows, rows_at

_QUERIES_AT_ONCE = 256  # whose scores are in memory for one head, with those of all keys


class ChosenSlots(NamedTuple):
    """One prompt that ends in a step."""

    rows: slice  # of the step: the tokens that choose
    slots: Tensor  # [num_tokens] int64, of the whole prompt
    num_candidates: int
    kept: Tensor  # [num_kept] int64, the slots that K and V of chosen tokens are copied to
    num_neighbours: int


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
            chooser = chunk.choice.chooser
            rows = slice(end - min(chooser.num_observers, len(chunk.token_ids)), end)
            slots = _slots(chunk.blocks, chunk.end, arena)
            kept = _slots(chunk.choice.blocks, len(chunk.choice.blocks) * arena.block_tokens, arena)
            prompts.append(ChosenSlots(rows, slots, chunk.choice.num_candidates, kept, chooser.num_neighbours))
    return ChoosingAttention(attention, prompts) if prompts else attention


def keep_chosen(q: Tensor, layer_kv: Tensor, prompt: ChosenSlots, rule: AttentionRule) -> None:
    """Copies one layer's chosen rows. q: [num_observers, num_heads, head_dim]; layer_kv: see `StepAttention.attend`."""
    rows = rows_at(layer_kv, prompt.slots)  # [2, num_kv_heads, num_tokens, row_items]
    attention = observed_attention(q.float(), rule.keys(numbers_of(rows)), rule)[:, : prompt.num_candidates]
    smooth = avg_pool1d(attention[None], prompt.num_neighbours, 1, prompt.num_neighbours // 2)[0]
    chosen = smooth.topk(len(prompt.kept)).indices.sort().values  # [num_kv_heads, num_kept]
    where = chosen[None, :, :, None].expand(2, -1, -1, rows.shape[3])
    put_rows(layer_kv, prompt.kept, rows.gather(2, where))


def observed_attention(q: Tensor, keys: Tensor, rule: AttentionRule) -> Tensor:
    """The attention that the last tokens of a sequence, or all of them, give to all of it, [num_kv_heads, num_tokens].

    q: [num_observers, num_heads, head_dim]; keys: [num_kv_heads, num_tokens, head_dim]; both float32.
    """
    (num_kv_heads, num_tokens, _), first = keys.shape, keys.shape[1] - len(q)  # position of the first query
    grouped = q.view(len(q), num_kv_heads, -1, q.shape[2]).permute(1, 2, 0, 3)
    positions = torch.arange(num_tokens, device=q.device)
    result = torch.zeros(num_kv_heads, num_tokens, device=q.device)
    for begin in range(0, len(q), _QUERIES_AT_ONCE):
        part = grouped[:, :, begin : begin + _QUERIES_AT_ONCE]
        end = first + begin + part.shape[2]  # no query of the part sees further
        ahead = positions[:end] > positions[first + begin : end, None]
        for queries, own, sums in zip(part, keys, result, strict=True):
            scores = rule.scores(queries, own[:end])  # [group, num_queries, num_keys]
            sums[:end] += scores.masked_fill(ahead, float("-inf")).softmax(-1).sum((0, 1))
    return result


def _slots(blocks: Sequence[int], num_tokens: int, arena: KVArena) -> Tensor:
    runs = slot_runs(blocks, arena.block_tokens, 0, num_tokens)
    return torch.cat([torch.arange(*run, device=arena.tensor.device) for run in runs])
