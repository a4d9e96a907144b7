"""The compiled kernels as Python functions over torch tensors. Knows nothing of layers or batches.

Tensors are float32 or bfloat16 on the CPU; the functions trust their shapes, which callers construct.
"""

from __future__ import annotations

import ctypes
from array import array
from ctypes import POINTER, c_char_p, c_double, c_float, c_int, c_int64, c_uint64, c_void_p
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from halfmoon.engine.models.blocks import Blocks
from halfmoon.engine.models.linear import Multiply, pack_onednn
from halfmoon.engine.native.block_kernels import BlockKernels, PackedBlocks, c_function
from halfmoon.engine.native.weight_file import Memory
from halfmoon.errors import Incompatible

_SUFFIXES = {torch.float32: "f32", torch.bfloat16: "bf16"}
_TASK_FIELDS = 10  # int64 fields of attention_plan.h's task_t

_NORM = (*[c_void_p] * 3, *[c_int64] * 3, c_float, c_int)
_ADD_NORM = (*[c_void_p] * 4, *[c_int64] * 2, c_float, c_int)
_SILU = (*[c_void_p] * 2, *[c_int64] * 2, c_int)
_ROTATE = (*[c_void_p] * 4, *[c_int64] * 5, c_int)
_LINEAR = (*[c_void_p] * 4, *[c_int64] * 3, *[c_int] * 3)
_PACK_LINEAR = (*[c_void_p] * 2, *[c_int64] * 2)
_ATTEND = (*[c_void_p] * 12, *[c_int64] * 9, c_float, c_int, c_int)
_SAMPLE = (*[c_void_p] * 3, *[c_int64] * 2, c_int)
_LOGPROBS = (*[c_void_p] * 2, *[c_int64] * 2, c_int)
_PLAN = (c_void_p, c_int64, c_void_p, *[c_int64] * 3, c_void_p, POINTER(c_int64))


class NativeLibrary:
    """Owns the loaded library, for one dtype. Runs on a team of threads of its own (team.h)."""

    def __init__(self, file: Path, dtype: torch.dtype, num_threads: int) -> None:
        """Raises Incompatible for another dtype, or for a file that cannot be loaded."""
        if dtype not in _SUFFIXES:
            raise Incompatible(f"the CPU kernels compute in float32 or bfloat16, not {dtype}")
        library = _loaded(file)
        suffix = _SUFFIXES[dtype]  # of the function names
        self.packing = f"{file.name} {suffix}"  # equal where packed weights have equal bytes
        self.num_threads = num_threads  # of each call, the caller included
        self._rms_norm = c_function(library, f"rms_norm_{suffix}", _NORM)
        self._add_rms_norm = c_function(library, f"add_rms_norm_{suffix}", _ADD_NORM)
        self._silu_mul = c_function(library, f"silu_mul_{suffix}", _SILU)
        self._rotate = c_function(library, f"rotate_{suffix}", _ROTATE)
        self._attend = c_function(library, f"attend_{suffix}", _ATTEND)
        self.dtype, self.item_size = dtype, 4 // dtype.itemsize  # product.h: numbers per item
        self.bf16_instructions: str = c_function(library, "bf16_instructions", (), c_char_p)().decode()
        self.linear = c_function(library, f"linear_{suffix}", _LINEAR)
        self.panel_columns = int(c_function(library, f"panel_columns_{suffix}", (), c_int64)())
        self.pack_linear = c_function(library, f"pack_linear_{suffix}", _PACK_LINEAR)
        self.block_kernels = BlockKernels(library, suffix, dtype, lambda: self.num_threads)
        self.run_layers = c_function(library, f"run_layers_{suffix}", (c_void_p, c_void_p))
        self._plan = c_function(library, "plan_attention", _PLAN, c_int64)
        self._sample = c_function(library, "sample_tokens", _SAMPLE)
        self._log_probabilities = c_function(library, "log_probabilities", _LOGPROBS)
        self._sampling_room = c_function(library, "sampling_room", (c_int64, c_int64, c_int), c_int64)
        self._uniform_number = c_function(library, "uniform_number", (c_uint64, c_uint64), c_double)
        self._num_team_threads = c_function(library, "num_team_threads", (), c_int)

    @property
    def num_team_threads(self) -> int:
        """The threads that this process has for kernels, besides those that call them."""
        return int(self._num_team_threads())

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """The norm of x [..., size] over its last dimension; x may be a strided view of rows."""
        assert x.dtype == self.dtype, f"these kernels compute in {self.dtype}"
        out = torch.empty(x.shape, dtype=x.dtype)
        rows = x.reshape(-1, x.shape[-1]) if x.dim() != 2 else x
        self._rms_norm(
            rows.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            *rows.shape,
            rows.stride(0),
            eps,
            self.num_threads,
        )
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """The norm of x + residual, which overwrites `residual`; both [num_tokens, size] float32, contiguous."""
        assert x.dtype == residual.dtype == torch.float32, "the residual of the kernels is float32"
        out = torch.empty(x.shape, dtype=self.dtype)
        pointers = (tensor.data_ptr() for tensor in (x, residual, weight, out))
        self._add_rms_norm(*pointers, *x.shape, eps, self.num_threads)
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up, [num_tokens, size]; gate_up: [num_tokens, 2 * size], contiguous."""
        num_rows, width = gate_up.shape
        out = torch.empty(num_rows, width // 2, dtype=gate_up.dtype)
        self._silu_mul(gate_up.data_ptr(), out.data_ptr(), num_rows, width // 2, self.num_threads)
        return out

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> None:
        """Rotates x [num_tokens, num_heads, head_dim] in place; cos, sin: [context_tokens, head_dim / 2], strided."""
        self._rotate(
            x.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            positions.data_ptr(),
            *x.shape,
            x.stride(0),
            cos.stride(0),
            self.num_threads,
        )

    def pack_weight(self, weight: Tensor | Blocks) -> Multiply | None:
        """Packs into our own layout (`PackWeight`), unless rows are not whole items.

        1.6x faster than oneDNN up to 8 rows, where oneDNN spends 20 us per call, and equal at 512, both at peak (with
        AVX-512; not timed with AMX). Here a row's result does not depend on the others, as oneDNN's does.
        """
        if isinstance(weight, Blocks):
            return PackedBlocks.pack(self.block_kernels, weight)
        num_inputs = weight.shape[1]
        if num_inputs % self.item_size or weight.device.type != "cpu":
            return pack_onednn(weight)
        return PackedNumbers.pack(self, weight)

    def packed_bytes(self, shape: tuple[int, int]) -> int:
        """The size of packed numbers, [out_features, in_features]."""
        num_columns, num_inputs = shape
        return -(-num_columns // self.panel_columns) * (num_inputs // self.item_size) * self.panel_columns * 4

    def packed_weight(self, format_number: int, shape: tuple[int, int], memory: Memory) -> Multiply | None:
        """A weight [out_features, in_features] that was packed earlier; None if `memory` has another size."""
        if format_number == PackedNumbers.format_number:
            return PackedNumbers(self, shape, memory) if memory.nbytes == self.packed_bytes(shape) else None
        num_bytes = self.block_kernels.packed_bytes(format_number, *shape)
        return PackedBlocks(self.block_kernels, format_number, shape, memory) if memory.nbytes == num_bytes else None

    def sample(self, draws: bytes, num_rows: int, vocab_size: int) -> list[int]:
        """The token of each row, or -1. draws: [num_rows] of sampling.h's draw_t."""
        tokens = (c_int64 * num_rows)()
        self._sample(draws, self._sampling_memory(num_rows, vocab_size), tokens, num_rows, vocab_size, self.num_threads)
        return list(tokens)

    def log_probabilities(self, wanted: NDArray[np.void], vocab_size: int) -> None:
        """Writes to where it is wanted. wanted: [num_rows] of sampling.h's logprobs_t."""
        room = self._sampling_memory(len(wanted), vocab_size)
        self._log_probabilities(wanted.ctypes.data, room, len(wanted), vocab_size, self.num_threads)

    def _sampling_memory(self, num_rows: int, vocab_size: int) -> int:
        num_numbers = self._sampling_room(num_rows, vocab_size, self.num_threads)
        return self.block_kernels.room(num_numbers * torch.float32.itemsize).data_ptr()

    def uniform_number(self, seed: int, position: int) -> float:
        """See `sampler.uniform`."""
        return float(self._uniform_number(seed % (1 << 64), position))

    def plan(self, segments: array[int], runs: array[int], num_kv_heads: int, group: int) -> tuple[Tensor, int]:
        """Tasks [num_tasks, …] for `attend`, and the number of partial results that they share.

        segments: [num_segments, 4], runs: [num_runs, 2], as attention_plan.h defines them.
        """
        num_parts, runs_at = c_int64(), runs.buffer_info()[0]
        segments_at, num_numbers = segments.buffer_info()
        shape = (segments_at, num_numbers // 4, runs_at, num_kv_heads, group, self.num_threads)
        num_tasks = self._plan(*shape, 0, num_parts)
        tasks = torch.empty(num_tasks, _TASK_FIELDS, dtype=torch.int64)
        self._plan(*shape, tasks.data_ptr(), num_parts)
        return tasks, num_parts.value

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer_kv: Tensor,
        addresses: tuple[int, ...],
        num_tasks: int,
        scale: float,
    ) -> Tensor:
        """See `StepAttention.attend`. addresses: `NativeBatch`'s, of which the counters are zeroed."""
        num_tokens, num_heads, head_dim = q.shape
        num_kv_heads = k.shape[1]
        out = torch.empty(num_tokens, num_heads * head_dim, dtype=q.dtype)
        keys, item_bytes = layer_kv.data_ptr(), layer_kv.element_size()
        self._attend(
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            keys,
            keys + layer_kv.stride(0) * item_bytes,
            out.data_ptr(),
            *addresses,
            num_tokens,
            num_tasks,
            q.stride(0),
            k.stride(0),
            v.stride(0),
            layer_kv.stride(1) * item_bytes,
            num_kv_heads,
            num_heads // num_kv_heads,
            head_dim,
            scale,
            row_codes(layer_kv.dtype),
            self.num_threads,
        )
        return out


class PackedNumbers:
    """Owns a weight [out_features, in_features] in the kernels' order (linear.h), as numbers."""

    format_number = -1  # of none of quantised.h

    def __init__(self, library: NativeLibrary, shape: tuple[int, int], memory: Memory) -> None:
        """A weight that is packed already."""
        self._library, self.shape, self.memory = library, shape, memory
        self._depth = shape[1] // library.item_size
        self.address: int = memory.ctypes.data

    @classmethod
    def pack(cls, library: NativeLibrary, weight: Tensor) -> PackedNumbers:
        """Packs a copy."""
        shape = num_columns, num_inputs = weight.shape[0], weight.shape[1]
        memory = torch.empty(library.packed_bytes(shape), dtype=torch.uint8).numpy()
        weight = weight.contiguous()
        library.pack_linear(weight.data_ptr(), memory.ctypes.data, num_columns, num_inputs // library.item_size)
        return cls(library, shape, memory)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x: [num_tokens, in_features] -> [num_tokens, out_features] (`Multiply`)."""
        return self._run(x, bias, self._library.dtype)

    def sums(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """See `KeepsSums`."""
        return self._run(x, bias, torch.float32)

    def _run(self, x: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        library, num_rows, num_columns = self._library, x.shape[0], self.shape[0]
        x, out = x.contiguous(), torch.empty(num_rows, num_columns, dtype=dtype)
        library.linear(
            x.data_ptr(),
            self.address,
            0 if bias is None else bias.data_ptr(),
            out.data_ptr(),
            num_rows,
            self._depth,
            num_columns,
            dtype == torch.float32,
            False,
            library.num_threads,
        )
        return out


def row_codes(memory: torch.dtype) -> int:
    """The number by which kv_rows.h knows what rows of KV in this dtype are."""
    return {torch.int8: 1, torch.uint8: 2}.get(memory, 0)


def _loaded(file: Path) -> ctypes.CDLL:
    """Raises Incompatible for a file that is damaged, needs another libc, or lies where nothing may be executed."""
    try:
        return ctypes.CDLL(str(file))
    except OSError as error:
        raise Incompatible(
            f"the CPU kernels could not be loaded: {error}; delete {file} to have it compiled again, or let "
            "HALFMOON_CACHE_DIR be a directory whose files may be executed"
        ) from error
