"""The native kernels as a table of layer functions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from halfmoon.architectures.model_config import ModelConfig
from halfmoon.engine.models.layer_ops import LayerOps, LayerWeights, Rotation, RunLayers
from halfmoon.engine.models.rotary import Rotary
from halfmoon.engine.native.layers import NativeLayers, can_join
from halfmoon.engine.native.library import NativeLibrary


def native_ops(library: NativeLibrary) -> LayerOps:
    """Layer functions that rotate rows in place and overwrite the residual, which is float32, as is what is added."""

    def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return library.add_rms_norm(x, residual, weight, eps), residual

    def rotation(rotary: Rotary, positions: Tensor) -> Rotation:
        cos, sin = rotary.halves()
        return partial(rotate, cos, sin, positions)

    def rotate(cos: Tensor, sin: Tensor, positions: Tensor, qk: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
        library.rotate(qk, cos, sin, positions)
        return qk[:, :num_heads], qk[:, num_heads:]

    def join(layers: Sequence[LayerWeights], config: ModelConfig, rotary: Rotary) -> RunLayers | None:
        return NativeLayers(library, layers, config, rotary) if can_join(layers) else None

    return LayerOps(
        rms_norm=library.rms_norm,
        add_rms_norm=add_rms_norm,
        silu_mul=library.silu_mul,
        rotation=rotation,
        join=join,
        wide_residual=True,
    )
