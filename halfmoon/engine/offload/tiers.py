"""The KV of one worker in two memories: blocks below a boundary on the device, the others on the host.

A block on the host is K and V, or the layers' inputs, half as large, from which a model computes both (KVPR).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from halfmoon.engine.kv_memory.canonical_kv import CanonicalKV
from halfmoon.engine.kv_memory.kv_arena import KVArena
from halfmoon.engine.scheduling.block_pool import BlockPool
from halfmoon.errors import Incompatible
from halfmoon.kv.device_bytes import DeviceBytes, KVPlace, KVSource
from halfmoon.kv.kv_layout import KVLayout, KVSlice

# (layer, its inputs [num_tokens, hidden_size]) -> K and V, each [num_tokens, num_kv_heads, head_dim]
KeysValues = Callable[[int, Tensor], tuple[Tensor, Tensor]]

Content = Literal["device", "kv", "inputs"]
_CONTENTS: tuple[Content, ...] = ("device", "kv", "inputs")


class Run(NamedTuple):
    """Consecutive tokens in consecutive slots, of the device's arena or of the host's halves."""

    content: Content
    start: int  # counted from the first requested token
    num_tokens: int
    first: int  # slot of K, or of the inputs
    second: int  # slot of V; on the device the same as `first`


class TieredKV:
    """Owns the device's arena and the host's halves; the pool says which halves belong to a block.

    Half `n` of the host has the slots from `n * block_tokens` on. Like those of `KVArena`, `read` and `write` may run
    during a step that touches other blocks; the kind of a block's content changes under a lock.
    """

    def __init__(
        self, device: KVArena, num_host_blocks: int, layout: KVLayout, keys_values: KeysValues | None = None
    ) -> None:
        """keys_values: None if the model does not compute K and V from stored inputs. Raises Incompatible."""
        self.device = device
        self.num_blocks = device.num_blocks + num_host_blocks
        self.pool = BlockPool(self.num_blocks, num_divisible=num_host_blocks)
        self.keys_values = keys_values
        self.block_tokens = layout.block_tokens
        self._canonical = CanonicalKV(layout)
        shape = (layout.num_layers, layout.num_kv_heads, 2 * num_host_blocks * layout.block_tokens, layout.head_dim)
        self.host = _host_memory(shape, device.tensor)  # [layers, kv_heads, slots of all halves, head_dim]
        integers = torch.int16 if layout.item_bytes == 2 else torch.int32  # numpy has no bfloat16
        self._host_cells: NDArray[np.signedinteger] = self.host.view(integers).numpy()
        self._integers = integers
        self._lock = threading.Lock()

    def is_cold(self, blocks: Sequence[int]) -> bool:
        """Whether any of these blocks is on the host."""
        return any(block >= self.device.num_blocks for block in blocks)

    def holds_inputs(self, block: int) -> bool:
        """Whether the block is on the host and holds inputs instead of K and V."""
        return self.pool.is_half(block)

    def runs(self, blocks: Sequence[int], start: int, num_tokens: int) -> Iterator[Run]:
        """The runs, in order, that hold tokens `start`.. of a sequence with these blocks."""
        size, boundary, end = self.block_tokens, self.device.num_blocks, start + num_tokens
        begin = start // size
        ids = np.asarray(blocks[begin : -(-end // size)], dtype=np.int64)
        seconds = self.pool.seconds(ids)  # type: ignore[arg-type]
        on_device = ids < boundary
        contents = np.where(on_device, 0, np.where(seconds < 0, 2, 1))
        firsts = np.where(on_device, ids, ids - boundary)
        seconds = np.where(contents == 1, seconds - boundary, firsts)
        joined = (np.diff(contents) == 0) & (np.diff(firsts) == 1) & (np.diff(seconds) == 1)
        cuts = (np.flatnonzero(~joined) + 1).tolist() if len(ids) else []
        for first, last in pairwise([0, *cuts, len(ids)]) if len(ids) else ():
            run_start, run_end = max(start, (begin + first) * size), min(end, (begin + last) * size)
            offset = run_start - (begin + first) * size
            yield Run(
                _CONTENTS[contents[first]],
                run_start - start,
                run_end - run_start,
                int(firsts[first]) * size + offset,
                int(seconds[first]) * size + offset,
            )

    def begin_inputs(self, block: int) -> None:
        """Makes an empty block on the host hold inputs."""
        self.pool.halve(block)

    def replace_by_inputs(self, block: int, inputs: Tensor) -> None:
        """Replaces K and V by inputs: [layers, block_tokens, hidden_size], on the host. No other writer is allowed."""
        num_layers, size, _ = inputs.shape
        with self._lock:
            cells = inputs.view(num_layers, size, -1, self.host.shape[-1]).transpose(1, 2)
            self.host[:, :, self._slots(block)] = cells
            self.pool.halve(block)

    def replace_by_kv(self, block: int, kv: Tensor) -> None:
        """Replaces inputs by kv: [layers, 2, kv_heads, block_tokens, head_dim], on the host; no effect without room."""
        with self._lock:
            if not self.pool.make_whole(block):
                return
            for plane, half in enumerate((block, int(self.pool.seconds([block])[0]))):
                self.host[:, :, self._slots(half)] = kv[:, plane]

    def write(self, blocks: Sequence[int], part: KVSlice, payload: KVSource) -> None:
        """See `KVArena.write`; the blocks are new, so none of them holds inputs."""
        self._canonical.check(part, len(blocks))
        if isinstance(payload, DeviceBytes):
            raise Incompatible("KV in device memory cannot be put into host memory")
        values = self._canonical.view(payload, part.num_layers, part.num_tokens)
        with self._lock:
            for run in self.runs(blocks, part.token_start, part.num_tokens):
                piece = values[:, :, :, run.start : run.start + run.num_tokens]
                if run.content == "device":
                    cells = np.ascontiguousarray(piece).data.cast("B")
                    self.device.write(*self._on_device(run, part), cells)
                    continue
                assert run.content == "kv", "K and V come for a block that holds inputs"
                for plane, slot in enumerate((run.first, run.second)):
                    self._host_cells[part.layers, :, slot : slot + run.num_tokens] = piece[:, plane]

    def read(self, blocks: Sequence[int], part: KVSlice, out: KVPlace | None = None) -> memoryview:
        """See `KVArena.read`; K and V of blocks kept as inputs are computed."""
        self._canonical.check(part, len(blocks))
        if isinstance(out, DeviceBytes):
            raise Incompatible("KV in host memory cannot be gathered into the device's")
        values = self._canonical.room(part.num_layers, part.num_tokens, out)
        with self._lock:
            for run in self.runs(blocks, part.token_start, part.num_tokens):
                piece = values[:, :, :, run.start : run.start + run.num_tokens]
                if run.content == "device":
                    cells = self.device.read(*self._on_device(run, part))
                    piece[...] = self._canonical.view(cells, part.num_layers, run.num_tokens)
                elif run.content == "inputs":
                    self._compute(run, part, piece)
                else:
                    for plane, slot in enumerate((run.first, run.second)):
                        piece[:, plane] = self._host_cells[part.layers, :, slot : slot + run.num_tokens]
        return values.reshape(-1).data.cast("B")

    @torch.inference_mode()
    def _compute(self, run: Run, part: KVSlice, out: NDArray[np.signedinteger]) -> None:
        assert self.keys_values is not None
        for n, layer in enumerate(range(part.layer_start, part.layer_end)):
            x = as_rows(self.host[layer, :, run.first : run.first + run.num_tokens].to(self.device.tensor.device))
            k, v = self.keys_values(layer, x)  # each [num_tokens, kv_heads, head_dim]
            out[n] = torch.stack((k, v)).transpose(1, 2).contiguous().cpu().view(self._integers).numpy()

    def _slots(self, half: int) -> slice:
        start = (half - self.device.num_blocks) * self.block_tokens
        return slice(start, start + self.block_tokens)

    def _on_device(self, run: Run, part: KVSlice) -> tuple[range, KVSlice]:
        """The run as arguments of the arena's `read` and `write`."""
        size = self.block_tokens
        blocks = range(run.first // size, -(-(run.first + run.num_tokens) // size))
        return blocks, KVSlice(part.layer_start, part.layer_end, run.first % size, run.num_tokens)


def as_rows(halves: Tensor) -> Tensor:
    """Inputs stored as [kv_heads, num_tokens, head_dim], reordered to [num_tokens, hidden_size]."""
    return halves.transpose(0, 1).reshape(halves.shape[1], -1)


def _host_memory(shape: tuple[int, ...], like: Tensor) -> Tensor:
    try:
        return torch.empty(shape, dtype=like.dtype, pin_memory=like.is_cuda)
    except RuntimeError as error:
        raise Incompatible(
            f"the host has no memory for the KV that is to lie there: {error}", param="offload"
        ) from error
