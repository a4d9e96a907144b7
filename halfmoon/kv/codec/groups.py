"""Quantisation in groups along one axis: `zero + code * scale`, with a scale and a zero for each group.

The levels reach from the group's smallest number to its largest, less a margin at each end: with few levels, clipping
the ends costs less than coarse steps everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halfmoon.kv.codec.floats import Bits, Floats, Scratch, bfloat16_below, scales_above, widened


@dataclass(frozen=True, slots=True)
class Groups:
    """How four-axis arrays are divided into groups along one axis, and how many levels a group has."""

    axis: int  # 2 or 3
    size: int  # the last group of a row is smaller where `size` does not divide it
    largest_code: int
    margin: float = 0.0  # the share of a group's extent below its first level, and above its last

    def params_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the bfloat16 scales and zeros for an array of `shape`: [2, ...]."""
        params = [2, *shape]
        params[1 + self.axis] = -(-shape[self.axis] // self.size)
        return tuple(params)

    def quantise(self, numbers: Floats, codes: NDArray[np.uint8], params: Bits, scratch: Scratch) -> None:
        """Fills `codes` (of the numbers' shape) and `params`; overwrites `numbers`, which is scratch's first tile."""
        for members, groups in self._segments(numbers.shape[self.axis]):
            part = self._split(numbers, members)
            scales, zeros = (_cut(param, self.axis, groups) for param in params)
            self._bound(part, scales, zeros, scratch)
            np.subtract(part, np.expand_dims(widened(zeros, "bfloat16"), self.axis + 1), out=part)
            np.multiply(part, np.expand_dims(1 / widened(scales, "bfloat16"), self.axis + 1), out=part)
            np.rint(part, out=part)
            if self.margin:
                np.clip(part, 0, self.largest_code, out=part)
            np.copyto(self._split(codes, members), part, casting="unsafe")

    def dequantise(self, codes: NDArray[Any], params: Floats, out: Floats) -> None:
        """Fills `out`, of the same shape as `codes`; `params` are already widened to numbers."""
        for members, groups in self._segments(codes.shape[self.axis]):
            scales, zeros = (np.expand_dims(_cut(param, self.axis, groups), self.axis + 1) for param in params)
            numbers = self._split(out, members)
            np.multiply(self._split(codes, members), scales, out=numbers)
            np.add(numbers, zeros, out=numbers)

    def _bound(self, part: Floats, scales: Bits, zeros: Bits, scratch: Scratch) -> None:
        in_front = np.moveaxis(part, self.axis + 1, 0)  # numpy is fast along the other axes
        numbers = scratch.floats(in_front.shape, 1)
        np.copyto(numbers, in_front)
        low, high = _reduce(np.minimum, numbers), _reduce(np.maximum, numbers)
        if self.margin:
            spare = (high - low) * np.float32(self.margin)
            low, high = low + spare, high - spare
        zeros[...] = bfloat16_below(low)
        scales[...] = scales_above((high - widened(zeros, "bfloat16")) / np.float32(self.largest_code))

    def _segments(self, length: int) -> Iterator[tuple[slice, slice]]:
        """Runs of equal groups, as (their members, their numbers): the full groups, then the smaller last one."""
        full = length // self.size
        if full:
            yield slice(0, full * self.size), slice(0, full)
        if length % self.size:
            yield slice(full * self.size, length), slice(full, full + 1)

    def _split(self, array: NDArray[Any], members: slice) -> NDArray[Any]:
        """View of a segment with its axis split into groups and members."""
        part = _cut(array, self.axis, members)
        length = part.shape[self.axis]
        return part.reshape(*part.shape[: self.axis], -1, min(length, self.size), *part.shape[self.axis + 1 :])


def _cut(array: NDArray[Any], axis: int, part: slice) -> NDArray[Any]:
    return array[(slice(None),) * axis + (part,)]


def _reduce(choose: Callable[[Floats, Floats], Floats], numbers: Floats) -> Floats:
    """Reduces the first axis by halves, which overlap when it is odd: several times faster than numpy's reduction."""
    while (length := len(numbers)) > 1:
        keep = (length + 1) // 2
        numbers = choose(numbers[:keep], numbers[length - keep :])
    reduced: Floats = numbers[0]
    return reduced
