"""Products with weights that stay in blocks, by the compiled kernels; x is rounded to eight bits for each 32 inputs.

A row's result does not depend on the other rows, on how many there are, or on the number of threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_float, c_int, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from halfmoon.engine.models.blocks import BLOCK_SIZES, Blocks
from halfmoon.engine.native.weight_file import Memory

_FORMATS = tuple(BLOCK_SIZES)  # in the order of quantised.h
_X_BLOCK_BYTES = 44  # quantised.h: x_block_t

_PACK = (*[c_void_p] * 2, c_int, *[c_int64] * 2, c_int)
_LINEAR = (*[c_void_p] * 5, c_int, *[c_int64] * 3, c_int, *[c_void_p] * 2, c_float, *[c_int] * 2)
_LOOKUP = (*[c_void_p] * 3, c_int, *[c_int64] * 2)


class BlockKernels:
    """The functions of a loaded library, for one dtype of x."""

    def __init__(self, library: ctypes.CDLL, suffix: str, dtype: torch.dtype, num_threads: Callable[[], int]) -> None:
        self.dtype = dtype
        self.num_threads = num_threads
        self.packed_bytes = c_function(library, "packed_bytes", (c_int, *[c_int64] * 2), c_int64)
        self.pack = c_function(library, "pack_blocks", _PACK)
        self.linear = c_function(library, f"quantised_linear_{suffix}", _LINEAR)
        self._room = torch.empty(0, dtype=torch.uint8)
        self.lookup = c_function(library, f"quantised_lookup_{suffix}", _LOOKUP)

    def room(self, num_bytes: int) -> Tensor:
        """Memory for one call of a kernel, whose content is lost with the next. Engines compute in one thread.

        Who calls others meanwhile holds it: they may need more, and get another one.
        """
        if self._room.nbytes < num_bytes:
            self._room = torch.empty(num_bytes, dtype=torch.uint8)
        return self._room


class PackedBlocks:
    """Owns a weight [out_features, in_features] in the kernels' order, as large as its blocks."""

    def __init__(self, kernels: BlockKernels, format_number: int, shape: tuple[int, int], memory: Memory) -> None:
        """A weight that is packed already."""
        self._kernels, self.format_number, self.shape, self.memory = kernels, format_number, shape, memory
        self.address: int = memory.ctypes.data

    @classmethod
    def pack(cls, kernels: BlockKernels, blocks: Blocks) -> PackedBlocks:
        """Packs a copy."""
        format_number, shape = _FORMATS.index(blocks.format), blocks.shape
        memory = torch.empty(kernels.packed_bytes(format_number, *shape), dtype=torch.uint8).numpy()
        data = blocks.data.contiguous()
        kernels.pack(data.data_ptr(), memory.ctypes.data, format_number, *shape, kernels.num_threads())
        return cls(kernels, format_number, shape, memory)

    @property
    def num_bytes(self) -> int:
        """Size in memory."""
        return self.memory.nbytes

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x: [num_tokens, in_features] -> [num_tokens, out_features] (`Multiply`)."""
        return self._run(x.contiguous(), bias)

    def sums(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """See `KeepsSums`."""
        return self._run(x.contiguous(), bias, dtype=torch.float32)

    def normed(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, bias: Tensor | None) -> Tensor:
        """See `FusedRows.normed`."""
        assert x.dtype == residual.dtype == torch.float32, "the residual of the kernels is float32"
        return self._run(x, bias, weight.data_ptr(), residual.data_ptr(), eps)

    def gated(self, gate_up: Tensor, bias: Tensor | None) -> Tensor:
        """See `FusedRows.gated`."""
        return self._run(gate_up, bias, is_gated=True, dtype=torch.float32)

    def _run(
        self,
        x: Tensor,
        bias: Tensor | None,
        norm: int = 0,
        residual: int = 0,
        eps: float = 0.0,
        is_gated: bool = False,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        num_rows, (num_columns, num_inputs) = x.shape[0], self.shape
        out = torch.empty(num_rows, num_columns, dtype=dtype or self._kernels.dtype)
        self._kernels.linear(
            x.data_ptr(),
            self.address,
            0 if bias is None else bias.data_ptr(),
            out.data_ptr(),
            self._kernels.room(x_room_bytes(num_rows, num_inputs)).data_ptr(),
            self.format_number,
            num_rows,
            num_inputs,
            num_columns,
            out.dtype == torch.float32,
            norm,
            residual,
            eps,
            is_gated,
            self._kernels.num_threads(),
        )
        return out

    def rows(self, indices: Tensor) -> Tensor:
        """The weights [num_indices, in_features] of some outputs [num_indices], as an embedding looks them up."""
        num_rows, num_inputs = indices.shape[0], self.shape[1]
        out = torch.empty(num_rows, num_inputs, dtype=self._kernels.dtype)
        indices = indices.contiguous()
        self._kernels.lookup(self.address, indices.data_ptr(), out.data_ptr(), self.format_number, num_rows, num_inputs)
        return out


def x_room_bytes(num_rows: int, num_inputs: int) -> int:
    """The size of x in eight bits; tiles take it 16 rows at a time."""
    return -(-num_rows // 16) * 16 * num_inputs // 32 * _X_BLOCK_BYTES


def c_function(library: ctypes.CDLL, name: str, arguments: tuple[Any, ...], result: Any = None) -> Any:
    """A function of the library that takes and returns these types."""
    function = getattr(library, name)
    function.argtypes, function.restype = arguments, result
    return function
