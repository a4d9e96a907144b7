"""The KV of one worker in two memories: blocks below a boundary on the device, the others on the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from halfmoon.engine.canonical_kv import CanonicalKV
from halfmoon.engine.kv_arena import KVArena
from halfmoon.errors import Incompatible
from halfmoon.kv.device_bytes import DeviceBytes, KVPlace, KVSource
from halfmoon.kv.layout import KVLayout


class Piece(NamedTuple):
    """Consecutive tokens of a sequence whose blocks lie in one memory."""

    is_on_device: bool
    blocks: list[int]  # of that memory
    start: int  # counted from the first of `blocks`
    num_tokens: int


class TieredKV:
    """Owns both arenas and, if a model computes K and V from them, the inputs of the layers beside the host's.

    As `KVArena`, `read` and `write` are safe beside a step that touches other blocks.
    """

    def __init__(self, device: KVArena, host: KVArena, layout: KVLayout, inputs_size: int | None = None) -> None:
        """inputs_size: numbers of a layer's input; None: they are not kept."""
        self.device = device
        self.host = host
        self.num_blocks = device.num_blocks + host.num_blocks
        self._layout = layout
        self._canonical = CanonicalKV(layout)
        num_slots = host.num_blocks * layout.block_tokens
        self.inputs: Tensor | None = None  # [layers, host slots, inputs_size]
        if inputs_size is not None:
            self.inputs = torch.empty(
                layout.num_layers, num_slots, inputs_size, dtype=host.tensor.dtype, pin_memory=host.tensor.is_pinned()
            )
        self._has_inputs: NDArray[np.bool_] = np.zeros(num_slots, np.bool_)

    def is_cold(self, blocks: Sequence[int]) -> bool:
        """Whether some of these blocks are on the host."""
        return any(block >= self.device.num_blocks for block in blocks)

    def pieces(self, blocks: Sequence[int], start: int, num_tokens: int) -> Iterator[Piece]:
        """Where tokens `start`.. of a sequence with these blocks lie, in order."""
        size, boundary = self._layout.block_tokens, self.device.num_blocks
        end = start + num_tokens
        while start < end:
            first = last = start // size
            is_on_device = blocks[first] < boundary
            while (last + 1) * size < end and (blocks[last + 1] < boundary) == is_on_device:
                last += 1
            stop = min(end, (last + 1) * size)
            local = [block if is_on_device else block - boundary for block in blocks[first : last + 1]]
            yield Piece(is_on_device, local, start - first * size, stop - start)
            start = stop

    def note_inputs(self, slots: Sequence[int], known: bool) -> None:
        """Whether `inputs` has those of the tokens in these host slots."""
        self._has_inputs[slots] = known

    def has_inputs(self, start_slot: int, num_slots: int) -> int:
        """How many of these host slots, from the first, have inputs."""
        known = self._has_inputs[start_slot : start_slot + num_slots]
        return num_slots if known.all() else int(known.argmin())

    def write(
        self, blocks: Sequence[int], layer_start: int, layer_end: int, start: int, num_tokens: int, payload: KVSource
    ) -> None:
        """As `KVArena.write`; where the values came from, no layer's inputs are known."""
        self._canonical.check(layer_start, layer_end, start, num_tokens, len(blocks))
        if isinstance(payload, DeviceBytes):
            raise Incompatible("KV in device memory cannot be put into memory of the host")
        values = self._canonical.view(payload, layer_end - layer_start, num_tokens)
        done = 0
        for piece in self.pieces(blocks, start, num_tokens):
            part = np.ascontiguousarray(values[:, :, :, done : done + piece.num_tokens])
            arena = self._arena(piece)
            arena.write(piece.blocks, layer_start, layer_end, piece.start, piece.num_tokens, part.data.cast("B"))
            if not piece.is_on_device:
                for block in piece.blocks:
                    size = self._layout.block_tokens
                    self._has_inputs[block * size : (block + 1) * size] = False
            done += piece.num_tokens

    def read(
        self,
        blocks: Sequence[int],
        layer_start: int,
        layer_end: int,
        start: int,
        num_tokens: int,
        out: KVPlace | None = None,
    ) -> memoryview:
        """As `KVArena.read`."""
        self._canonical.check(layer_start, layer_end, start, num_tokens, len(blocks))
        if isinstance(out, DeviceBytes):
            raise Incompatible("KV in memory of the host cannot be gathered into the device's")
        num_layers = layer_end - layer_start
        values = self._canonical.room(num_layers, num_tokens, out)
        done = 0
        for piece in self.pieces(blocks, start, num_tokens):
            part = self._arena(piece).read(piece.blocks, layer_start, layer_end, piece.start, piece.num_tokens)
            values[:, :, :, done : done + piece.num_tokens] = self._canonical.view(part, num_layers, piece.num_tokens)
            done += piece.num_tokens
        return values.reshape(-1).data.cast("B")

    def _arena(self, piece: Piece) -> KVArena:
        return self.device if piece.is_on_device else self.host
