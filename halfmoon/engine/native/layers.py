"""All layers of a Llama in one call to the compiled kernels (layers.h): one call a step instead of nine a layer."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_char_p, c_float, c_int, c_int64, c_void_p
from itertools import accumulate
from typing import cast

import torch
from torch import Tensor

from halfmoon.architectures.model_config import ModelConfig
from halfmoon.engine.attention.attention_backend import StepAttention
from halfmoon.engine.attention.watched_attention import GatedAttention, WatchedAttention
from halfmoon.engine.models.layer_ops import LayerWeights
from halfmoon.engine.models.rotary import Rotary
from halfmoon.engine.native.attention import NativeBatch
from halfmoon.engine.native.block_kernels import PackedBlocks, x_room_bytes
from halfmoon.engine.native.library import NativeLibrary, PackedNumbers, row_codes

_LINE = 64  # bytes of a cache line, where rooms begin
_Between = ctypes.CFUNCTYPE(c_int, c_int64, c_int)
_NOBODY = _Between()


class _Matrix(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("packed", "bias")),
        *((name, c_int64) for name in ("num_inputs", "num_columns", "format")),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("input_norm", "mlp_norm", "q_norm", "k_norm")),
        *((name, _Matrix) for name in ("qkv", "output", "gate_up", "down")),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("residual", "normed", "heads", "attended", "gate_up", "gated")),
        *((name, c_void_p) for name in ("blocks", "cos", "sin", "positions", "slots")),
        *((name, c_void_p) for name in ("segments", "runs", "tasks", "partials", "done", "kv")),
        *((name, c_int64) for name in ("kv_layer_bytes", "kv_values_bytes", "kv_head_bytes")),
        *((name, c_int64) for name in ("num_layers", "num_tokens", "num_tasks", "num_heads", "num_kv_heads")),
        *((name, c_int64) for name in ("head_dim", "hidden_size", "table_stride")),
        *((name, c_float) for name in ("eps", "scale")),
        *((name, c_int) for name in ("codes", "num_threads")),
        ("between", _Between),
        ("calls", c_char_p),
        ("asked", ctypes.POINTER(c_int)),
    )


class _Listeners:
    """What a step calls before and after a layer's attention, from the middle of the kernels' one call."""

    def __init__(self, attention: StepAttention) -> None:
        self._gates: list[GatedAttention] = []
        self._watches: list[WatchedAttention] = []
        while isinstance(attention, GatedAttention | WatchedAttention):
            if isinstance(attention, GatedAttention):
                self._gates.append(attention)
            else:
                self._watches.append(attention)
            attention = attention.inner
        self.inner = attention
        self.error: BaseException | None = None

    @property
    def asked(self) -> c_int | None:
        """See `Gate.asked`."""
        return self._gates[0].gate.asked if len(self._gates) == 1 else None

    def calls(self, num_layers: int) -> bytes | None:
        """Which layers call `between`, as layers.h has it; None where nobody listens, as in nearly all decode steps."""
        if not self._gates and not self._watches:
            return None
        reported = [any(watch.reports(layer + 1) for watch in self._watches) for layer in range(num_layers)]
        is_gated = bool(self._gates) and self.asked is None
        return bytes(is_gated | is_reported << 1 for is_reported in reported)

    def between(self, layer: int, is_stored: int) -> int:
        """Returns 1 if the step cannot go on, for which `error` is the reason."""
        try:
            if is_stored:
                for watch in self._watches:
                    watch.stored(layer + 1)
            else:
                for gate in self._gates:
                    gate.gate.wait(layer)
        except BaseException as error:  # an exception cannot cross the kernels
            self.error = error
            return 1
        return 0


class NativeLayers:
    """Owns the table of a model's layers; the weights are the model's (`RunLayers`)."""

    def __init__(
        self, library: NativeLibrary, layers: Sequence[LayerWeights], config: ModelConfig, rotary: Rotary
    ) -> None:
        """Every matrix is a `PackedNumbers` or a `PackedBlocks` (`can_join`)."""
        self._library = library
        self._weights = layers  # so that what the table points to stays
        self._table = (_Layer * len(layers))(*map(_row, layers))
        self._config = config
        self._cos, self._sin = rotary.halves()
        inner, num_heads = config.intermediate_size, config.num_heads + 2 * config.num_kv_heads
        # normed, heads, attended, gate_up, gated
        widths = (config.hidden_size, num_heads * config.head_dim, config.q_size, 2 * inner, inner)
        self._row_bytes = [width * library.dtype.itemsize for width in widths]
        self._most_inputs = max(config.hidden_size, config.q_size, inner)  # of a matrix

    def takes(self, attention: StepAttention) -> bool:
        """See `RunLayers.takes`."""
        return isinstance(_Listeners(attention).inner, NativeBatch)

    def run(self, hidden: Tensor, positions: Tensor, attention: StepAttention, kv: Tensor) -> tuple[Tensor, Tensor]:
        """See `RunLayers.run`."""
        assert hidden.dtype == torch.float32, "the residual of the kernels is float32"
        listeners = _Listeners(attention)
        calls = listeners.calls(len(self._weights))
        batch, config, library = cast(NativeBatch, listeners.inner), self._config, self._library
        num_tokens = len(hidden)
        starts = [0, *accumulate(-(-num_tokens * size // _LINE) * _LINE for size in self._row_bytes)]
        rooms = torch.empty(starts.pop(), dtype=torch.uint8)
        x_blocks = library.block_kernels.room(x_room_bytes(num_tokens, self._most_inputs))
        hidden, item_bytes = hidden.contiguous(), kv.element_size()
        step = _Step(
            hidden.data_ptr(),
            *(rooms.data_ptr() + start for start in starts),
            x_blocks.data_ptr(),
            *(table.data_ptr() for table in (self._cos, self._sin, positions)),
            *(*batch.addresses, kv.data_ptr()),
            *(kv.stride(dimension) * item_bytes for dimension in range(3)),
            *(len(self._weights), num_tokens, len(batch.tasks), config.num_heads, config.num_kv_heads),
            *(config.head_dim, config.hidden_size, self._cos.stride(0)),
            *(config.norm_eps, config.score_scale, row_codes(kv.dtype), library.num_threads),
            *(_Between(listeners.between) if calls else _NOBODY, calls),
            None if listeners.asked is None else ctypes.pointer(listeners.asked),
        )
        library.run_layers(self._table, ctypes.byref(step))
        if listeners.error is not None:
            raise listeners.error
        return hidden, torch.zeros_like(hidden)  # nothing is left to add


def can_join(layers: Sequence[LayerWeights]) -> bool:
    """Whether the kernels multiply with all matrices, each of which is in one format."""
    return all(isinstance(matrix.packed, PackedNumbers | PackedBlocks) for one in layers for matrix in one.matrices)


def _row(layer: LayerWeights) -> _Layer:
    norms = (layer.input_norm, layer.mlp_norm, layer.q_norm, layer.k_norm)
    matrices = []
    for matrix in layer.matrices:
        packed = cast(PackedNumbers | PackedBlocks, matrix.packed)
        num_columns, num_inputs = packed.shape
        bias = 0 if matrix.bias is None else matrix.bias.data_ptr()
        matrices.append(_Matrix(packed.address, bias, num_inputs, num_columns, packed.format_number))
    return _Layer(*(0 if norm is None else norm.data_ptr() for norm in norms), *matrices)
