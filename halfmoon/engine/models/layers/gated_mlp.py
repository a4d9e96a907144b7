"""A gated multilayer perceptron, gate and up in one matrix: the dense half of a layer, or one expert of a mixture."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from halfmoon.engine.models.layer_ops import LayerOps
from halfmoon.engine.models.layers.normed_product import normed_product
from halfmoon.engine.models.linear import FusedMatrix
from halfmoon.engine.models.model_part import ModelPart

Names = tuple[str, str, str]  # of gate, up and down in a checkpoint, without the layer's


class GatedMlp:
    """Owns gate, up and down."""

    def __init__(
        self, part: ModelPart, inner: int, names: Names, dtype: torch.dtype, device: str, ops: LayerOps
    ) -> None:
        """inner: its inner units in this part. What it gives is not summed over the ranks of a stage."""
        config = part.config
        hidden = config.hidden_size
        self._ops = ops
        self._is_silu = config.activation == "silu"
        self.gate_up = part.linear(2 * inner, hidden, config.mlp_bias, dtype, device)
        self.down = part.linear(hidden, inner, config.mlp_bias, dtype, device)
        gate, up, down = names
        sizes = {"mlp.gate_up_proj": 2 * inner} if config.fused_in_checkpoint else {gate: inner, up: inner}
        self._names = sizes, {down: hidden}

    @property
    def matrices(self) -> tuple[FusedMatrix, ...]:
        """Both, with the rows that they fuse."""
        gate_up, down = self._names
        return (self.gate_up, gate_up), (self.down, down)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [num_tokens, hidden_size] -> what is added to the residual, of the same shape."""
        return self.finish(self.gate_up(x))

    def finish(self, gate_up: Tensor) -> Tensor:
        """gate_up: [num_tokens, 2 * inner], what that matrix gave -> [num_tokens, hidden_size]."""
        if not self._is_silu:
            return self._ops.added(self.down, _gelu_mul(gate_up))
        if self.down.fused is not None:
            return self.down.fused.gated(gate_up, self.down.bias)
        return self._ops.added(self.down, self._ops.silu_mul(gate_up))


class DenseMlp(GatedMlp):
    """The perceptron of a layer without experts."""

    def __init__(self, part: ModelPart, dtype: torch.dtype, device: str, ops: LayerOps) -> None:
        names = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
        super().__init__(part, part.config.intermediate_size, names, dtype, device, ops)
        self.down = part.summed(self.down)
        self.tensors: dict[str, Tensor] = {}
        self.exact: tuple[FusedMatrix, ...] = ()
        self._eps = part.config.norm_eps

    def after_norm(self, x: Tensor, residual: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        """What it makes of the norm of x + residual, and x + residual; all [num_tokens, hidden_size]."""
        gate_up, residual = normed_product(self._ops, self.gate_up, x, residual, norm, self._eps)
        return self.finish(gate_up), residual


def _gelu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh") * up
