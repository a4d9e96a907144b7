"""One affine map, in the memory layout that its device multiplies fastest."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional

# oneDNN packs a weight for a certain number of rows; 8 was as good as any other for 1 to 512 rows.
_PACK_FOR_ROWS = 8

# (x [num_tokens, in_features], bias [out_features] or None) -> [num_tokens, out_features], over its own weight
Multiply = Callable[[Tensor, Tensor | None], Tensor]
# (weight [out_features, in_features]) -> how to multiply with it, without the plain weight; None: not packed
PackWeight = Callable[[Tensor], Multiply | None]


class Linear:
    """Owns a weight [out_features, in_features] and optionally a bias [out_features].

    `pack` reorders the weight for its device and drops the plain copy; a weight that also serves as an embedding is
    packed as a copy.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self._multiply: Multiply | None = None

    @classmethod
    def empty(cls, out_features: int, in_features: int, bias: bool, dtype: torch.dtype, device: str) -> Linear:
        """Uninitialised; filled through views of `weight` and `bias`."""
        weight = torch.empty(out_features, in_features, dtype=dtype, device=device)
        return cls(weight, torch.empty(out_features, dtype=dtype, device=device) if bias else None)

    def pack(self, pack_weight: PackWeight) -> None:
        """Reorders the weight if that helps. Afterwards `weight` is empty."""
        self._multiply = pack_weight(self.weight)
        if self._multiply is not None:
            self.weight = self.weight.new_empty(0)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [num_tokens, in_features] -> [num_tokens, out_features]."""
        if self._multiply is None:
            return functional.linear(x, self.weight, self.bias)
        return self._multiply(x, self.bias)


def pack_onednn(weight: Tensor) -> Multiply | None:
    """oneDNN's layout on a CPU (2x faster at 1 to 8 rows than the plain one, equal results in bfloat16)."""
    packable = weight.dtype in (torch.float32, torch.bfloat16) and torch._C._has_mkldnn
    if weight.device.type != "cpu" or not packable:
        return None
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_FOR_ROWS)

    def multiply(x: Tensor, bias: Tensor | None) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
        return out

    return multiply


def split_rows(linear: Linear, sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """Consecutive row ranges of a fused matrix under their checkpoint names."""
    named: dict[str, Tensor] = {}
    start = 0
    for name, size in sizes.items():
        named[f"{name}.weight"] = linear.weight[start : start + size]
        if linear.bias is not None:
            named[f"{name}.bias"] = linear.bias[start : start + size]
        start += size
    return named
