"""Attention over paged KV memory: the `sdpa` back end (CPU) and its plain reference.

Both have one signature, `(q, k, v, layer_kv, batch, rule) -> out` with the shapes of `StepAttention.attend`, and both
first store `k` and `v` in their slots. A slot is one token's place in the arena: `block_id * block_tokens + offset`.
Knows nothing of requests or weights.

Attention over several pieces of the keys is exact: partial outputs are merged by their log-sum-exp (Rabe and Staats,
"Self-attention does not need O(n^2) memory", section 2; FlashDecoding).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from halfmoon.engine.attention.attention_backend import AttentionRule, TokenSpan
from halfmoon.engine.kv_memory.kv_arena import slot_runs
from halfmoon.engine.kv_memory.quantised_rows import is_quantised, numbers_of, put_rows, round_rows, rows_at


@dataclass(frozen=True, slots=True)
class Segment:
    """One sequence's rows in a batch. `runs` are half-open slot ranges, in order, that hold its keys.

    With one row (decode), `runs` includes the row itself; with more (prefill), only the tokens before them.
    """

    row_start: int
    row_end: int
    runs: tuple[tuple[int, int], ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequence up to the last row."""
        num_rows = self.row_end - self.row_start
        return sum(end - start for start, end in self.runs) + (num_rows if num_rows > 1 else 0)


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Where a batch of `num_tokens` rows stores K and V, and which slots its sequences attend to."""

    slots: Tensor  # [num_tokens] int64, the slot of each row's K and V
    segments: tuple[Segment, ...]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer_kv: Tensor, rule: AttentionRule) -> Tensor:
        """See `StepAttention.attend`."""
        compute = attend_sdpa if layer_kv.device.type == "cpu" else attend_reference
        return compute(q, k, v, layer_kv, self, rule)


class SdpaBackend:
    """Attention on the CPU; on other devices the gathering reference (not run on a GPU yet)."""

    def __init__(self, block_tokens: int, device: str) -> None:
        self._block_tokens = block_tokens
        self._device = device

    def step(self, spans: Sequence[TokenSpan]) -> AttentionBatch:
        """The slots of all rows, and the runs of slots that each sequence attends to."""
        slots: list[range] = []
        segments: list[Segment] = []
        row = 0
        for blocks, start, end in spans:
            slots += (range(*run) for run in slot_runs(blocks, self._block_tokens, start, end))
            seen = end if end - start == 1 else start
            segments.append(Segment(row, row + end - start, tuple(slot_runs(blocks, self._block_tokens, 0, seen))))
            row += end - start
        return AttentionBatch(
            torch.tensor(list(chain.from_iterable(slots)), dtype=torch.int64, device=self._device), tuple(segments)
        )


def attend_sdpa(
    q: Tensor, k: Tensor, v: Tensor, layer_kv: Tensor, batch: AttentionBatch, rule: AttentionRule
) -> Tensor:
    """Attention on the CPU: no copy of cached keys, one flash-attention call per sequence and contiguous run.

    The reference computes what flash attention does not: quantised keys, which it widens (kernels read them as they
    are), capped scores, latents, and chunks of which some rows see less than all keys before them.
    """
    if is_quantised(layer_kv.dtype) or rule.softcap is not None or rule.latent_size is not None:
        return attend_reference(q, k, v, layer_kv, batch, rule)
    store(k, v, layer_kv, batch.slots)
    outs = []
    for segment in batch.segments:
        rows = slice(segment.row_start, segment.row_end)
        if segment.row_end - segment.row_start == 1:
            outs.append(_decode(q[rows], layer_kv, _latest(segment.runs, rule.window), rule.scale))
        elif rule.window is not None and segment.num_tokens > rule.window:
            outs.append(_reference_segment(q, layer_kv, batch.slots, segment, rule))
        else:
            outs.append(_prefill(q[rows], k[rows], v[rows], layer_kv, segment.runs, rule.scale))
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def _latest(runs: tuple[tuple[int, int], ...], num_slots: int | None) -> tuple[tuple[int, int], ...]:
    """The last `num_slots` slots of `runs`; all for None."""
    if num_slots is None:
        return runs
    latest: list[tuple[int, int]] = []
    for start, end in reversed(runs):
        if num_slots <= 0:
            break
        latest.insert(0, (max(start, end - num_slots), end))
        num_slots -= end - start
    return tuple(latest)


def store(k: Tensor, v: Tensor, layer_kv: Tensor, slots: Tensor) -> None:
    """Writes k, v [num_tokens, num_kv_heads, head_dim] to their slots of one layer, rounded if that is of codes."""
    for rows, memory in ((k, layer_kv[0]), (v, layer_kv[1])):
        if is_quantised(memory.dtype):
            put_rows(memory, slots, round_rows(rows, memory.dtype).transpose(0, 1))
        else:
            memory.index_copy_(1, slots, rows.transpose(0, 1))


def flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Returns the output and its log-sum-exp [batch, heads, tokens]; q, k, v: [batch, heads, tokens, head_dim]."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=None, scale=scale
    )
    return out, lse


def _decode(q: Tensor, layer_kv: Tensor, runs: tuple[tuple[int, int], ...], scale: float) -> Tensor:
    """Attends for one row: a KV head's query heads are "tokens" of a non-causal call, so its keys are read once."""
    num_kv_heads, head_dim = layer_kv.shape[1], layer_kv.shape[3]
    grouped = q.view(1, num_kv_heads, -1, head_dim)  # [1, num_kv_heads, group, head_dim]
    parts = [
        flash(grouped, layer_kv[0:1, :, start:end], layer_kv[1:2, :, start:end], False, scale) for start, end in runs
    ]
    return _merge(parts).reshape(1, -1)


def _prefill(
    q: Tensor, k: Tensor, v: Tensor, layer_kv: Tensor, runs: tuple[tuple[int, int], ...], scale: float
) -> Tensor:
    """Attends for a chunk: to its own keys causally, straight from the projection, and to every earlier key."""
    num_tokens, (num_kv_heads, head_dim) = q.shape[0], k.shape[1:]
    grouped = q.view(num_tokens, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)  # [kv_heads, group, tokens, head_dim]
    shape = (num_kv_heads, grouped.shape[1], -1, head_dim)

    def shared(keys: Tensor) -> Tensor:  # [num_kv_heads, tokens, head_dim] as seen by each query head of the group
        return keys.unsqueeze(1).expand(shape)

    parts = [flash(grouped, shared(k.transpose(0, 1)), shared(v.transpose(0, 1)), True, scale)]
    for start, end in runs:
        parts.append(flash(grouped, shared(layer_kv[0, :, start:end]), shared(layer_kv[1, :, start:end]), False, scale))
    return _merge(parts).permute(2, 0, 1, 3).reshape(num_tokens, -1)


def _merge(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Merges outputs [..., tokens, head_dim] over disjoint keys, weighted by their log-sum-exp [..., tokens]."""
    if len(parts) == 1:
        return parts[0][0]
    lse = torch.stack([part[1] for part in parts])  # [num_parts, ..., tokens]
    weights = torch.softmax(lse, dim=0).unsqueeze(-1)
    merged = parts[0][0] * weights[0]
    for (out, _), weight in zip(parts[1:], weights[1:], strict=True):
        merged = torch.addcmul(merged, out.to(merged.dtype), weight)
    return merged.to(parts[0][0].dtype)


def attend_reference(
    q: Tensor, k: Tensor, v: Tensor, layer_kv: Tensor, batch: AttentionBatch, rule: AttentionRule
) -> Tensor:
    """Plain reference: gather the keys, mask, softmax in float32."""
    store(k, v, layer_kv, batch.slots)
    outs = [_reference_segment(q, layer_kv, batch.slots, segment, rule) for segment in batch.segments]
    return torch.cat(outs)


def _reference_segment(q: Tensor, layer_kv: Tensor, slots: Tensor, segment: Segment, rule: AttentionRule) -> Tensor:
    rows = slice(segment.row_start, segment.row_end)
    num_tokens = segment.row_end - segment.row_start
    first_sees = None if rule.window is None else rule.window - (num_tokens > 1)  # without the rows of a chunk
    pieces = [torch.arange(start, end, device=slots.device) for start, end in _latest(segment.runs, first_sees)]
    where = torch.cat(pieces if num_tokens == 1 else [*pieces, slots[rows]])  # [num_keys]
    numbers = numbers_of(rows_at(layer_kv, where))  # [2, num_kv_heads, num_keys, head_dim]
    keys, values = rule.keys_and_values(numbers, q.shape[1])
    scores = rule.scores(q[rows].float().transpose(0, 1), keys)  # [num_heads, num_tokens, num_keys]
    probabilities = scores.masked_fill(_unseen(num_tokens, where, rule.window), float("-inf")).softmax(dim=-1)
    out: Tensor = probabilities @ values
    return out.transpose(0, 1).reshape(num_tokens, -1).to(q.dtype)


def _unseen(num_tokens: int, keys: Tensor, window: int | None) -> Tensor:
    """Which keys are after a row or before its window, [num_tokens, num_keys]; the last keys are the rows' own."""
    num_keys = keys.numel()
    everything = torch.ones(num_tokens, num_keys, dtype=torch.bool, device=keys.device)
    own = num_keys - num_tokens  # the first row's key
    unseen = everything.triu(own + 1)
    return unseen if window is None else unseen | everything.tril(own - window)
