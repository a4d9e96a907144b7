"""The `native` attention back end: paged attention on the CPU by our own kernels."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from halfmoon.engine.attention.attention_backend import AttentionRule, TokenSpan
from halfmoon.engine.kv_memory.kv_arena import slot_runs
from halfmoon.engine.native.library import NativeLibrary
from halfmoon.errors import Incompatible

_LANES = 16  # numbers per vector at most, vector.h
_MAX_ROWS = 192  # the smaller of attention_plan.h
_MAX_HEAD_DIM = 256


@dataclass(frozen=True, slots=True)
class NativeBatch:
    """One step's rows, already cut into tasks."""

    library: NativeLibrary
    plan: tuple[array[int], array[int], array[int]]  # slot of each row's K and V; segments [n, 4]; runs [n, 2]: int64
    tasks: Tensor  # [n, 10] int64
    partials: tuple[Tensor, Tensor]  # sums of rows whose keys several tasks share, and counters; float32, int64

    @property
    def addresses(self) -> tuple[int, ...]:
        """Of slots, segments, runs, tasks, shared sums and counters."""
        numbers = (part.buffer_info()[0] for part in self.plan)
        return (*numbers, self.tasks.data_ptr(), *(part.data_ptr() for part in self.partials))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer_kv: Tensor, rule: AttentionRule) -> Tensor:
        """See `StepAttention.attend`; of a rule only its scale is known here (`device_path`)."""
        return self.library.attend(q, k, v, layer_kv, self.addresses, len(self.tasks), rule.scale)


class NativeBackend:
    """Plans a step once for all its layers."""

    def __init__(
        self, library: NativeLibrary, block_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int
    ) -> None:
        if head_dim % _LANES or head_dim > _MAX_HEAD_DIM or num_heads // num_kv_heads > _MAX_ROWS:
            raise Incompatible(
                f"the CPU kernels need a head size that is a multiple of {_LANES} up to {_MAX_HEAD_DIM} and at most "
                f"{_MAX_ROWS} query heads for each KV head, not {head_dim} and {num_heads // num_kv_heads}"
            )
        self._library = library
        self._block_tokens = block_tokens
        self._num_kv_heads = num_kv_heads
        self._group = num_heads // num_kv_heads
        self._head_dim = head_dim

    def step(self, spans: Sequence[TokenSpan]) -> NativeBatch:
        """The slots of all rows, the runs of slots that each sequence attends to, and the tasks."""
        slots, segments, runs = plan = array("q"), array("q"), array("q")
        for blocks, start, end in spans:
            first_row, first_run = len(slots), len(runs) // 2
            for run in slot_runs(blocks, self._block_tokens, 0, end):
                runs.extend(run)
            last = runs[-1]
            if end - start <= last - runs[-2]:  # its own tokens are in the last run, as those of decodes
                slots.extend(range(last - (end - start), last))
            else:
                for run in slot_runs(blocks, self._block_tokens, start, end):
                    slots.extend(range(*run))
            segments.extend((first_row, len(slots), first_run, len(runs) // 2))
        tasks, num_parts = self._library.plan(segments, runs, self._num_kv_heads, self._group)
        room = torch.empty(num_parts, self._group, self._head_dim + 2)
        counters = torch.zeros(num_parts, dtype=torch.int64)
        return NativeBatch(self._library, plan, tasks, (room, counters))
