"""Attention of a step whose tokens and keys are spread over ranks: what one rank lacks comes round the ring.

Either keys and values go round (Liu et al., "Ring Attention with Blockwise Transformers", 2023), or the queries with
the sums of their running softmax, which a rank's own keys are added to (Yang et al., "Context Parallelism for Scalable
Million-Token Inference", 2024, pass-KV and pass-Q). The smaller of both goes: keys for the first chunks of a prompt,
queries for chunks behind many keys and for decodes. A plain implementation in torch, on any device (run on CPUs only).
"""

from __future__ import annotations

import torch
from torch import Tensor

from halfmoon.engine.attention.attention import store
from halfmoon.engine.attention.attention_backend import AttentionRule
from halfmoon.engine.attention.running_softmax import RunningSoftmax, attend_part
from halfmoon.engine.kv_memory.quantised_rows import rows_at
from halfmoon.engine.parallel.links import Links
from halfmoon.engine.parallel.token_shares import Run, TokenShares

Runs = list[list[Run]]  # by chunk


class RingAttention:
    """One step on `rank`; a `StepAttention` of that rank's rows. All ranks of the ring call `attend` for each layer."""

    def __init__(self, shares: TokenShares, rank: int, num_ranks: int, links: Links) -> None:
        self._shares, self._rank, self._num_ranks, self._links = shares, rank, num_ranks, links
        self._num_rows = [shares.num_rows(each) for each in range(num_ranks)]
        self._keys: dict[int | None, list[Runs]] = {}  # by window, then by rank

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer_kv: Tensor, rule: AttentionRule) -> Tensor:
        """See `StepAttention.attend`. A rank without tokens gives it one row all the same, which is not stored."""
        num_rows = self._num_rows[self._rank]
        if num_rows:
            store(k, v, layer_kv, _slots(self._shares.rows(self._rank), layer_kv.device))
        own = self._step_keys(rule.window)[self._rank]
        memory = rows_at(layer_kv, _slots(own, layer_kv.device))  # [2, num_kv_heads, num_keys, row_items]
        sums = RunningSoftmax.empty(num_rows, q.shape[1], rule.out_size(q.shape[2]), q.device)
        if self._passes_queries(q, memory, sums, rule):
            sums = self._pass_queries(q[:num_rows].contiguous(), sums, memory, rule)
        else:
            self._pass_keys(q[:num_rows], sums, memory, rule)
        out = sums.out.flatten(1).to(q.dtype)
        return out if num_rows else out.new_zeros(len(q), out.shape[1])

    def _passes_queries(self, q: Tensor, memory: Tensor, sums: RunningSoftmax, rule: AttentionRule) -> bool:
        """Whether the most that a rank sends is less with queries; the same on every rank."""
        num_keys = max(_num_tokens(runs) for runs in self._step_keys(rule.window))
        key_bytes = num_keys * memory.shape[0] * memory.shape[1] * memory.shape[3] * memory.element_size()
        row_bytes = q.shape[1] * (q.shape[2] * q.element_size() + sums.sums.shape[2] * sums.sums.element_size())
        return max(self._num_rows) * row_bytes < key_bytes

    def _pass_keys(self, q: Tensor, sums: RunningSoftmax, memory: Tensor, rule: AttentionRule) -> None:
        """Attends to each rank's keys in turn, while the next ones are on their way."""
        keys = self._step_keys(rule.window)
        here, memory = self._rank, memory.contiguous()
        rows = self._shares.rows(self._rank)
        for hop in range(self._num_ranks):
            before = (here - 1) % self._num_ranks
            shift = None
            if hop < self._num_ranks - 1:
                shape = (*memory.shape[:2], _num_tokens(keys[before]), memory.shape[3])
                shift = self._links.shift(memory, memory.new_empty(shape))
            _attend(q, sums, rows, memory, keys[here], rule)
            if shift is not None:
                memory, here = shift.wait(), before

    def _pass_queries(self, q: Tensor, sums: RunningSoftmax, memory: Tensor, rule: AttentionRule) -> RunningSoftmax:
        """Adds this rank's keys to each rank's rows in turn; the last shift brings the own rows home."""
        keys = self._step_keys(rule.window)[self._rank]
        here = self._rank
        for hop in range(self._num_ranks):
            before = (here - 1) % self._num_ranks
            shift = None
            if hop < self._num_ranks - 1:
                shift = self._links.shift(q, q.new_empty(self._num_rows[before], *q.shape[1:]))
            _attend(q, sums, self._shares.rows(here), memory, keys, rule)
            if shift is not None:
                q = shift.wait()
            room = sums.sums.new_empty(self._num_rows[before], *sums.sums.shape[1:])
            sums, here = RunningSoftmax(self._links.shift(sums.sums, room).wait()), before
        return sums

    def _step_keys(self, window: int | None) -> list[Runs]:
        if window not in self._keys:
            self._keys[window] = [self._shares.keys(rank, window) for rank in range(self._num_ranks)]
        return self._keys[window]


def _attend(q: Tensor, sums: RunningSoftmax, rows: Runs, memory: Tensor, keys: Runs, rule: AttentionRule) -> None:
    """Adds one rank's keys to another's rows, each chunk's to its own."""
    row = key = 0
    for row_runs, key_runs in zip(rows, keys, strict=True):
        positions = _positions(key_runs, q.device)
        part = memory[:, :, key : key + len(positions)]
        key += len(positions)
        for run in row_runs:
            where = slice(row, row + run.length)
            row += run.length
            if len(positions):
                sums.add(where, *attend_part(q[where], part, run.start, positions, rule))


def _num_tokens(runs: Runs) -> int:
    return sum(run.length for of_chunk in runs for run in of_chunk)


def _positions(runs: list[Run], device: torch.device) -> Tensor:
    return _ranges([(run.start, run.end) for run in runs], device)


def _slots(runs: Runs, device: torch.device) -> Tensor:
    return _ranges([(run.slot, run.slot + run.length) for of_chunk in runs for run in of_chunk], device)


def _ranges(ranges: list[tuple[int, int]], device: torch.device) -> Tensor:
    pieces = [torch.arange(start, end, device=device) for start, end in ranges]
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64, device=device)
