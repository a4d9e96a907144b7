"""The KV memory of one worker: where block ids become tensors, and canonical bytes come in and go out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from halfmoon.engine.config import Kernels
from halfmoon.engine.kv_memory.canonical_kv import CanonicalKV
from halfmoon.engine.kv_memory.host_pages import HostPages
from halfmoon.engine.kv_memory.quantised_rows import is_quantised, put_rows, rows_at, split_memory
from halfmoon.errors import Incompatible
from halfmoon.kv.device_bytes import DeviceBytes, KVPlace, KVSource
from halfmoon.kv.kv_layout import QUANTISED, KVDtype, KVLayout, KVSlice

if TYPE_CHECKING:
    from halfmoon.engine.kv_memory.kv_transfer import KVTransfer

TORCH_DTYPES: dict[KVDtype, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "fp8": torch.uint8,  # see `quantised_rows.py`
}
_ALIGNED_SLOTS = 8  # of an even number of bytes each
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}  # by size in bytes


def slot_runs(blocks: Sequence[int], block_tokens: int, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Half-open slot ranges that hold tokens `start`..`end` of a sequence, neighbouring blocks joined."""
    while start < end:
        index = start // block_tokens
        run_start = blocks[index] * block_tokens + start % block_tokens
        last = index
        while (last + 1) * block_tokens < end and blocks[last + 1] == blocks[last] + 1:
            last += 1
        stop = min(end, (last + 1) * block_tokens)
        yield run_start, run_start + stop - start
        start = stop


def _num_slots(layout: KVLayout, num_blocks: int) -> int:
    """Slots of so many blocks: of codes up to seven blocks more, so that each head begins where GPUs load 16 bytes."""
    at_once = _ALIGNED_SLOTS // math.gcd(_ALIGNED_SLOTS, layout.block_tokens) if layout.dtype in QUANTISED else 1
    return -(-num_blocks // at_once) * at_once * layout.block_tokens


class KVArena:
    """Owns the KV tensor. Head-major: a run of neighbouring blocks is one view, `[heads, tokens, head_dim]`.

    `read` and `write` may run during a step if they touch only blocks that the step does not.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        device: str,
        kernels: Kernels = "torch",
        memory: torch.Tensor | None = None,
    ) -> None:
        """memory: used instead of new memory, of the shape of `tensor`. Raises Incompatible for a head size."""
        self.num_blocks = num_blocks
        self._layout = layout
        if layout.dtype in QUANTISED and layout.head_dim % 2:
            raise Incompatible(
                f"KV in {layout.dtype} needs an even head size, not {layout.head_dim}: leave --kv-dtype out",
                param="kv_dtype",
            )
        self._pages: HostPages | None = None
        if memory is None:
            dtype = TORCH_DTYPES[layout.dtype]
            shape = layout.memory_shape(layout.num_layers, _num_slots(layout, num_blocks))
            if device == "cpu" and num_blocks > 0:
                self._pages = HostPages(math.prod(shape[:3]), math.prod(shape[3:]) * dtype.itemsize)
                memory = self._pages.memory.view(dtype).view(shape)
            else:
                memory = torch.empty(shape, dtype=dtype, device=device)
        self.tensor = memory  # [layers, 2, kv_heads, slots, row_items]; of codes: see `split_memory`
        self._canonical = CanonicalKV(layout)
        # The same memory as integers: numpy has no bfloat16, and copies without torch's threads.
        self._numbers, self._scales = self.tensor.view(INTEGERS[layout.item_bytes]), None
        if is_quantised(memory.dtype):
            codes, scales = split_memory(memory)
            self._numbers, self._scales = codes.view(torch.int8), scales.view(torch.int16)
        self._transfer = _transfer(self.tensor, layout.block_tokens) if kernels == "triton" else None

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""
        return self._layout.block_tokens

    def prefault(self, num_blocks: int) -> bool:
        """Has some memory of a CPU ready behind the first `num_blocks` blocks, as `HostPages.prefault` does.

        Not the scales of codes, which lie behind all of a head's rows.
        """
        used_bytes = num_blocks * self.block_tokens * self.tensor.shape[-1] * self.tensor.itemsize
        return self._pages is not None and self._pages.prefault(used_bytes)

    def write(self, blocks: Sequence[int], part: KVSlice, payload: KVSource) -> None:
        """Scatters canonical bytes. Raises InvalidRequest when the payload's size does not match the ranges."""
        self._canonical.check(part, len(blocks))
        if isinstance(payload, DeviceBytes):
            transfer, cells = self._on_device(payload)
            transfer.scatter(cells, blocks, *part)
            return
        values = self._canonical.view(payload, part.num_layers, part.num_tokens)
        if self._transfer is not None:
            self._transfer.write(values, blocks, part.layer_start, part.token_start)
            return
        done = 0
        for first, last in slot_runs(blocks, self._layout.block_tokens, part.token_start, part.token_end):
            piece = values[:, :, :, done : done + last - first]
            for memory, same in self._same(part.layers, slice(first, last), piece):
                if memory.device.type == "cpu":
                    np.copyto(memory.numpy(), same)
                else:
                    memory.copy_(torch.from_numpy(same.copy()))
            done += last - first

    def read(self, blocks: Sequence[int], part: KVSlice, out: KVPlace | None = None) -> memoryview:
        """Canonical bytes `[layers, 2, kv_heads, num_tokens, head_dim]`, copied into `out`, if given.

        On a CPU that is one copy. From a CUDA device it goes through pinned memory, which torch reuses; with `out` on
        the device nothing is copied to the host, and the returned view is empty.
        """
        self._canonical.check(part, len(blocks))
        if isinstance(out, DeviceBytes):
            transfer, cells = self._on_device(out)
            transfer.gather(blocks, *part, cells)
            return memoryview(b"")
        if self._transfer is not None:
            gathered = self._transfer.read(blocks, *part)
            if out is not None:
                self._canonical.room(part.num_layers, part.num_tokens, out)[...] = gathered
            return gathered.reshape(-1).data.cast("B")
        values = self._canonical.room(part.num_layers, part.num_tokens, out)
        done = 0
        for first, last in slot_runs(blocks, self._layout.block_tokens, part.token_start, part.token_end):
            piece = values[:, :, :, done : done + last - first]
            for memory, same in self._same(part.layers, slice(first, last), piece):
                same[...] = memory.cpu().numpy()
            done += last - first
        return values.reshape(-1).data.cast("B")

    def copy_tokens(self, source: int, target: int, num_tokens: int) -> None:
        """Copies K and V of a block's first tokens to another block. They are there when it returns."""
        first, to = source * self.block_tokens, target * self.block_tokens
        put_rows(self.tensor, slice(to, to + num_tokens), rows_at(self.tensor, slice(first, first + num_tokens)))
        if self.tensor.is_cuda:  # other streams may read them next
            torch.cuda.current_stream().synchronize()

    def _same(self, layers: slice, slots: slice, rows: NDArray[Any]) -> Iterator[tuple[torch.Tensor, NDArray[Any]]]:
        """Yields memory in `slots` as integers, and the same part of canonical rows [layers, 2, heads, slots, item]."""
        numbers = self._numbers[layers, :, :, slots]
        if self._scales is None:
            yield numbers, rows
        else:
            yield numbers, rows[..., :-2]
            yield self._scales[layers, :, :, slots], rows[..., -2:].view(np.int16)[..., 0]

    def _on_device(self, place: DeviceBytes) -> tuple[KVTransfer, torch.Tensor]:
        """The transfer kernels and `place` as a tensor. Raises Incompatible if no kernels copy."""
        if self._transfer is None:
            raise Incompatible("KV in device memory needs the triton kernels")
        assert isinstance(place.cells, torch.Tensor)
        return self._transfer, place.cells


def _transfer(arena: torch.Tensor, block_tokens: int) -> KVTransfer:
    from halfmoon.engine.kv_memory.kv_transfer import KVTransfer  # needs triton

    return KVTransfer(arena, block_tokens)
