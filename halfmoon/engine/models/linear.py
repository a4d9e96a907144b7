"""One affine map, in the memory layout that its device multiplies fastest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional

from halfmoon.engine.models.blocks import Blocks, joined

# oneDNN packs a weight for a certain number of rows; 8 was as good as any other for 1 to 512 rows.
_PACK_FOR_ROWS = 8

# (x [num_tokens, in_features], bias [out_features] or None) -> [num_tokens, out_features], over its own weight
Multiply = Callable[[Tensor, Tensor | None], Tensor]
# (weight [out_features, in_features]) -> how to multiply with it, without the plain weight; None: not packed. Blocks
# are given only to those that take them
PackWeight = Callable[[Tensor | Blocks], Multiply | None]
PackLayer = Callable[[PackWeight, int], PackWeight]  # how the matrices of a layer are packed, counted in its part


def alike(pack_weight: PackWeight, layer: int) -> PackWeight:
    """The `PackLayer` of a model whose layers are all packed in one way."""
    return pack_weight


@runtime_checkable
class RowSource(Protocol):
    """A `Multiply` that also serves as an embedding."""

    def rows(self, indices: Tensor) -> Tensor:
        """The weights [num_indices, in_features] of some outputs [num_indices]."""


@runtime_checkable
class FusedRows(Protocol):
    """A `Multiply` that also computes what comes before it in a layer, with the same results."""

    def normed(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, bias: Tensor | None) -> Tensor:
        """Multiplies with the RMS norm of x + residual, which overwrites it; both [num_tokens, in_features] float32."""

    def gated(self, gate_up: Tensor, bias: Tensor | None) -> Tensor:
        """Multiplies with silu(gate) * up, in float32; gate_up: [num_tokens, 2 * in_features]."""


@runtime_checkable
class KeepsSums(Protocol):
    """A `Multiply` that can leave its sums as they are, in float32."""

    def sums(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """As `Multiply`, not rounded to the dtype of x."""


def sums(multiply: Multiply, x: Tensor, bias: Tensor | None) -> Tensor:
    """What `multiply` gives, in float32; not rounded before, if it can."""
    return multiply.sums(x, bias) if isinstance(multiply, KeepsSums) else multiply(x, bias).float()


class Linear:
    """Owns a weight [out_features, in_features] and optionally a bias [out_features].

    `pack` reorders the weight for its device and drops the plain copy; a weight that also serves as an embedding is
    packed as a copy. Some rows, or all, may be given in blocks instead (`put_blocks`).
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self.fused: FusedRows | None = None  # once packed
        self._multiply: Multiply | None = None
        self._keeps_sums: KeepsSums | None = None  # the same, if it does
        self._blocks: dict[int, Blocks] = {}  # by their first row

    @classmethod
    def empty(cls, out_features: int, in_features: int, bias: bool, dtype: torch.dtype, device: str) -> Linear:
        """Uninitialised; filled through views of `weight` and `bias`."""
        weight = torch.empty(out_features, in_features, dtype=dtype, device=device)
        return cls(weight, torch.empty(out_features, dtype=dtype, device=device) if bias else None)

    def put_blocks(self, first_row: int, blocks: Blocks) -> None:
        """Takes these rows in blocks: what `weight` has there is ignored. They are multiplied only once packed."""
        self._blocks[first_row] = blocks

    def pack(self, pack_weight: PackWeight) -> None:
        """Reorders the weight if that helps. Afterwards `weight` is empty."""
        pieces = self._pieces()
        packed = [pack_weight(piece) for piece in pieces]
        self._blocks = {}
        if len(pieces) > 1:
            self._multiply = _side_by_side(pieces, packed)
        else:
            (self._multiply,) = packed
        self.fused = self._multiply if isinstance(self._multiply, FusedRows) else None
        self._keeps_sums = self._multiply if isinstance(self._multiply, KeepsSums) else None
        if self._multiply is not None:
            self.weight = self.weight.new_empty(0)

    @property
    def packed(self) -> Multiply | None:
        """The packed weight, if it is one."""
        return self._multiply

    @property
    def row_source(self) -> RowSource | None:
        """What looks up rows of the packed weight, if it can."""
        return self._multiply if isinstance(self._multiply, RowSource) else None

    def _pieces(self) -> list[Tensor | Blocks]:
        """All rows in order; neighbours of one format are one piece."""
        pieces: list[Tensor | Blocks] = []
        row = 0
        for first_row, blocks in sorted(self._blocks.items(), key=lambda item: item[0]):
            if first_row > row:
                pieces.append(self.weight[row:first_row])
            before = pieces.pop() if pieces else None
            if isinstance(before, Blocks) and before.format == blocks.format:
                pieces.append(joined(before, blocks))
            else:
                pieces += [blocks] if before is None else [before, blocks]
            row = first_row + blocks.shape[0]
        if row < self.weight.shape[0]:
            pieces.append(self.weight[row:])
        return pieces

    def __call__(self, x: Tensor) -> Tensor:
        """x: [num_tokens, in_features] -> [num_tokens, out_features]."""
        if self._multiply is None:
            return functional.linear(x, self.weight, self.bias)
        return self._multiply(x, self.bias)

    def sums(self, x: Tensor) -> Tensor:
        """The same in float32; where the kernels of CPUs multiply, sums are not rounded before."""
        if self._keeps_sums is not None:
            return self._keeps_sums.sums(x, self.bias)
        return Linear.__call__(self, x).float()  # of this class: others may add up what ranks have


FusedMatrix = tuple[Linear, dict[str, int]]  # with the rows of the checkpoint's matrices that it fuses


def _side_by_side(pieces: list[Tensor | Blocks], packed: list[Multiply | None]) -> Multiply:
    """Multiplies with pieces of different kinds, and puts their outputs side by side."""
    multiplies = [multiply or _plain(piece) for piece, multiply in zip(pieces, packed, strict=True)]
    sizes = [piece.shape[0] for piece in pieces]

    def multiply(x: Tensor, bias: Tensor | None) -> Tensor:
        biases = [None] * len(sizes) if bias is None else torch.split(bias, sizes)
        return torch.cat([one(x, own) for one, own in zip(multiplies, biases, strict=True)], dim=1)

    return multiply


def _plain(weight: Tensor | Blocks) -> Multiply:
    assert isinstance(weight, Tensor), "blocks are always packed"
    return lambda x, bias: functional.linear(x, weight, bias)


def pack_onednn(weight: Tensor | Blocks) -> Multiply | None:
    """oneDNN's layout on a CPU (2x faster at 1 to 8 rows than the plain one, equal results in bfloat16).

    None where it has none: in bfloat16 it needs AVX-512 or newer.
    """
    assert isinstance(weight, Tensor), "weights are loaded in blocks for the native kernels only"
    has_bfloat16 = torch._C._has_mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    packable = has_bfloat16 if weight.dtype == torch.bfloat16 else weight.dtype == torch.float32
    packable = packable and torch._C._has_mkldnn
    if weight.device.type != "cpu" or not packable:
        return None
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_FOR_ROWS)

    def multiply(x: Tensor, bias: Tensor | None) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
        return out

    return multiply


def put_rows(linear: Linear, sizes: Mapping[str, int], name: str, blocks: Blocks) -> bool:
    """Gives the weight `name` in blocks to a fused matrix; returns whether it is one of its row ranges."""
    start = 0
    for own, size in sizes.items():
        if name == f"{own}.weight":
            linear.put_blocks(start, blocks)
            return True
        start += size
    return False


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
