"""KV memory of codes for tests of what reads it."""

from __future__ import annotations

import torch
from torch import Tensor

from halfmoon.engine.kv_memory.quantised_rows import put_rows, round_rows


def coded_memory(numbers: Tensor, codes: torch.dtype | None) -> Tensor:
    """Memory whose slots hold numbers [..., num_slots, head_dim], rounded to `codes`; None: the numbers."""
    return numbers if codes is None else memory_of(round_rows(numbers, codes))


def memory_of(rows: Tensor) -> Tensor:
    """Memory whose slots hold these rows [..., num_slots, row_items]."""
    memory = torch.empty_like(rows, memory_format=torch.contiguous_format)
    put_rows(memory, slice(None), rows)
    return memory
