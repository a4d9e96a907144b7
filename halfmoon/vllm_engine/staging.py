"""Host memory for KV on its way into or out of vLLM, shared by a memfd. Canonical order, in blocks."""

from __future__ import annotations

import mmap
import os

import torch
from torch import Tensor

from halfmoon.engine.kv_memory.kv_arena import slot_runs
from halfmoon.kv.kv_layout import KVLayout

_STAMP_BYTES = 8
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class StagingMemory:
    """Owns the mapping of one arena: `kv`, [layers, 2, heads, slots, head_dim], and a stamp for each block.

    A block's stamp is the number of its present use. Linux only.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, path: str | None = None) -> None:
        """Creates the memory, or maps what another process created under `path`. Raises OSError."""
        self.layout = layout
        self.num_blocks = num_blocks
        kv_bytes = num_blocks * layout.block_bytes
        self._file = os.memfd_create("halfmoon-kv") if path is None else os.open(path, os.O_RDWR | os.O_CLOEXEC)
        if path is None:
            os.ftruncate(self._file, kv_bytes + num_blocks * _STAMP_BYTES)
        memory = mmap.mmap(self._file, kv_bytes + num_blocks * _STAMP_BYTES)
        shape = (layout.num_layers, 2, layout.num_kv_heads, num_blocks * layout.block_tokens, layout.head_dim)
        self.kv = torch.frombuffer(memory, dtype=_DTYPES[layout.dtype], count=kv_bytes // layout.item_bytes).view(shape)
        self.stamps = torch.frombuffer(memory, dtype=torch.int64, offset=kv_bytes)  # [num_blocks]

    @property
    def path(self) -> str:
        """Where other processes of this user find the memory, as long as this one lives."""
        return f"/proc/{os.getpid()}/fd/{self._file}"

    def has_stamps(self, blocks: tuple[int, ...], use: int) -> bool:
        """Whether all of these blocks are still in this use."""
        return bool((self.stamps[list(blocks)] == use).all())

    def read(self, layer: int, heads: slice, blocks: tuple[int, ...], start: int, end: int) -> Tensor:
        """[2, heads, end - start, head_dim]: a copy of tokens `start`..`end` of a sequence in `blocks`."""
        runs = slot_runs(blocks, self.layout.block_tokens, start, end)
        return torch.cat([self.kv[layer, :, heads, first:last] for first, last in runs], dim=2)

    def write(self, layer: int, heads: slice, blocks: tuple[int, ...], start: int, values: Tensor) -> None:
        """Writes `values`, [2, heads, tokens, head_dim], as tokens `start`.. of a sequence in `blocks`."""
        done = 0
        for first, last in slot_runs(blocks, self.layout.block_tokens, start, start + values.shape[2]):
            self.kv[layer, :, heads, first:last] = values[:, :, done : done + last - first]
            done += last - first
