"""KV into and out of an arena on a CUDA device: one kernel per call, one more copy for host memory, during steps.

Needs triton. On CPU tensors the kernels run in Triton's interpreter, without streams.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from halfmoon.engine.kernels.block_copy import gather_blocks, scatter_blocks
from halfmoon.errors import InvalidRequest

_PIECE_BYTES = 64 << 20  # a copy between host and arena takes as much of the device's memory, or what one layer needs


class KVTransfer:
    """Owns two streams, one per direction. A call returns when the device has finished it.

    No stream waits for the computing one, nor has to: `ModelRunner.run` returns when the device has finished, so a
    block handed over or taken back since then is not being written, and a written block is whole. Layers of a running
    step are reported (`DeviceWatch`) once the device has written them.
    """

    def __init__(self, arena: Tensor, block_tokens: int) -> None:
        """arena: [num_layers, 2, num_kv_heads, num_slots, head_dim]."""
        self._arena = arena
        self._block_tokens = block_tokens
        # numpy has no bfloat16
        self._integers = {1: torch.int8, 2: torch.int16, 4: torch.int32}[arena.element_size()]
        self._reading = _Lane(arena.device)
        self._writing = _Lane(arena.device)

    def read(
        self, blocks: Sequence[int], layer_start: int, layer_end: int, start: int, num_tokens: int
    ) -> NDArray[Any]:
        """[layer_end - layer_start, 2, num_kv_heads, num_tokens, head_dim] as integers, in pinned memory."""
        shape = (layer_end - layer_start, *self._layer_shape(num_tokens))
        host = torch.empty(shape, dtype=self._integers, pin_memory=self._arena.is_cuda)
        for piece in self._pieces(shape[0], num_tokens):
            first, last = layer_start + piece.start, layer_start + piece.stop
            with self._reading.turn():
                block_ids, offset = self._block_ids(blocks, start, num_tokens)
                gathered = gather_blocks(self._arena, block_ids, self._block_tokens, first, last, offset, num_tokens)
                host[piece].copy_(gathered.view(self._integers), non_blocking=True)
        return host.numpy()

    def write(self, values: NDArray[Any], blocks: Sequence[int], layer_start: int, start: int) -> None:
        """Scatters `values`: [layers, 2, num_kv_heads, num_tokens, head_dim], integers of the arena's item size."""
        for piece in self._pieces(values.shape[0], values.shape[3]):
            part = values[piece]
            host = torch.empty(part.shape, dtype=self._integers, pin_memory=self._arena.is_cuda)
            np.copyto(host.numpy(), part)
            with self._writing.turn():
                block_ids, offset = self._block_ids(blocks, start, part.shape[3])
                buffer = host.to(self._arena.device, non_blocking=True).view(self._arena.dtype)
                scatter_blocks(buffer, self._arena, block_ids, self._block_tokens, layer_start + piece.start, offset)

    def gather(
        self, blocks: Sequence[int], layer_start: int, layer_end: int, start: int, num_tokens: int, out: Tensor
    ) -> None:
        """`read` into device memory. out: [num_bytes] uint8. Raises InvalidRequest for a wrong size."""
        values = self._values(out, layer_end - layer_start, num_tokens)
        with self._reading.turn():
            block_ids, offset = self._block_ids(blocks, start, num_tokens)
            gather_blocks(
                self._arena, block_ids, self._block_tokens, layer_start, layer_end, offset, num_tokens, values
            )

    def scatter(
        self, source: Tensor, blocks: Sequence[int], layer_start: int, layer_end: int, start: int, num_tokens: int
    ) -> None:
        """`write` from device memory. source: [num_bytes] uint8. Raises InvalidRequest for a wrong size."""
        values = self._values(source, layer_end - layer_start, num_tokens)
        with self._writing.turn():
            block_ids, offset = self._block_ids(blocks, start, num_tokens)
            scatter_blocks(values, self._arena, block_ids, self._block_tokens, layer_start, offset)

    def _values(self, cells: Tensor, num_layers: int, num_tokens: int) -> Tensor:
        """[num_layers, 2, num_kv_heads, num_tokens, head_dim] in the arena's dtype, over the memory of `cells`."""
        shape = (num_layers, *self._layer_shape(num_tokens))
        num_bytes = math.prod(shape) * self._arena.element_size()
        if cells.numel() != num_bytes:
            raise InvalidRequest(f"device memory for KV has {cells.numel()} bytes; {shape} has {num_bytes}")
        return cells.view(self._arena.dtype).view(shape)

    def _layer_shape(self, num_tokens: int) -> tuple[int, int, int, int]:
        _, _, num_kv_heads, _, row_items = self._arena.shape
        return 2, num_kv_heads, num_tokens, row_items

    def _pieces(self, num_layers: int, num_tokens: int) -> Iterator[slice]:
        """Layers that are copied at once: a paused answer's KV may be larger than what the device has left."""
        layer_bytes = math.prod(self._layer_shape(num_tokens)) * self._arena.element_size()
        at_once = max(1, _PIECE_BYTES // layer_bytes)
        for first in range(0, num_layers, at_once):
            yield slice(first, min(first + at_once, num_layers))

    def _block_ids(self, blocks: Sequence[int], start: int, num_tokens: int) -> tuple[Tensor, int]:
        """The blocks that hold the tokens, [num_blocks] int32, and the tokens' offset in the first one."""
        first, end = start // self._block_tokens, -(-(start + num_tokens) // self._block_tokens)
        block_ids = torch.tensor(blocks[first:end], dtype=torch.int32, device=self._arena.device)
        return block_ids, start % self._block_tokens


class _Lane:
    """Owns one stream and the lock that serializes its use; on a CPU only the lock."""

    def __init__(self, device: torch.device) -> None:
        self._lock = threading.Lock()
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Runs the launches within on the stream; returns once they have finished."""
        with self._lock:
            if self._stream is None:
                yield
                return
            with torch.cuda.stream(self._stream):
                yield
            self._stream.synchronize()
