"""Conversion between bits of bfloat16, float16 and float32 and numbers, since numpy has no bfloat16.

Arrays of bits are unsigned integers of the dtype's size. Work proceeds in tiles that stay in a core's cache, using the
casts, shifts and multiplications that numpy vectorizes: its own conversion to float16 takes several times as long.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halfmoon.kv.kv_layout import KVDtype

Bits = NDArray[np.unsignedinteger[Any]]
Floats = NDArray[np.float32]

_TILE_VALUES = 1 << 17  # two such tiles of float32 fill a megabyte of cache; in smaller ones Python dominates

UNSIGNED: dict[KVDtype, np.dtype[np.unsignedinteger[Any]]] = {
    "float32": np.dtype("<u4"),
    "float16": np.dtype("<u2"),
    "bfloat16": np.dtype("<u2"),
    "int8": np.dtype("u1"),  # rows of codes and a scale: see `scaled_rows.py`
    "fp8": np.dtype("u1"),
}
LARGEST: dict[KVDtype, np.float32] = {  # the difference of two such numbers is finite, too
    "float32": np.float32(2.0**126),
    "float16": np.float32(65504),
    "bfloat16": np.float32(2.0**126),
}
SMALLEST_SCALE = np.float32(2.0**-126)
LARGEST_BITS: dict[KVDtype, int] = {"float32": 0x7E80_0000, "float16": 0x7BFF, "bfloat16": 0x7E80}
_INFINITY: dict[KVDtype, int] = {"float32": 0x7F80_0000, "float16": 0x7C00, "bfloat16": 0x7F80}
_NAN: dict[KVDtype, int] = {"float32": 0x7FC0_0000, "float16": 0x7E00, "bfloat16": 0x7FC0}


def tiles(num_rows: int, row_values: int) -> Iterator[slice]:
    """Slices of whole rows, about one tile each."""
    step = _tile_rows(row_values)
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def _tile_rows(row_values: int) -> int:
    return max(1, _TILE_VALUES // row_values)


class Scratch:
    """Owns two float32 tiles, seen as numbers or as their bits. Each call makes its own: threads share nothing."""

    def __init__(self, num_rows: int, row_values: int) -> None:
        num_values = min(num_rows, _tile_rows(row_values)) * row_values
        self._tiles = [np.empty(num_values, np.float32) for _ in range(2)]

    def floats(self, shape: tuple[int, ...], which: int = 0) -> Floats:
        """One tile, cut to `shape`."""
        return self._tiles[which][: math.prod(shape)].reshape(shape)

    def words(self, shape: tuple[int, ...], which: int = 1) -> NDArray[np.uint32]:
        """The same memory as bits."""
        return self.floats(shape, which).view(np.uint32)


def magnitudes(bits: Bits) -> Bits:
    """The bits without their signs: integers in the order of the absolute values, then infinity, then NaN."""
    return np.bitwise_and(bits, bits.dtype.type((1 << (8 * bits.dtype.itemsize - 1)) - 1))


def widen(bits: Bits, dtype: KVDtype, out: Floats) -> None:
    """Writes the numbers that `bits` encode to `out`, exactly."""
    words = out.view(np.uint32)
    if dtype == "float32":
        np.copyto(words, bits)
    elif dtype == "bfloat16":
        np.copyto(words, bits)
        np.left_shift(words, 16, out=words)
    elif magnitudes(bits).max() >= _INFINITY[dtype]:
        np.copyto(out, bits.view(np.float16))
    else:
        np.copyto(words.view(np.int32), bits.view(np.int16))  # sign-extended
        np.left_shift(words, 13, out=words)
        np.bitwise_and(words, 0x8FFF_E000, out=words)
        np.multiply(out, np.float32(2.0**112), out=out)  # the difference of the exponent biases; holds for subnormals


def widen_finite(bits: Bits, dtype: KVDtype, out: Floats, largest: int) -> None:
    """Like `widen`, with NaN as 0 and infinities and larger values as +-LARGEST; largest: of `magnitudes(bits)`."""
    widen(bits, dtype, out)
    if largest > LARGEST_BITS[dtype]:
        limit = LARGEST[dtype]
        np.nan_to_num(out, copy=False, nan=0.0, posinf=float(limit), neginf=-float(limit))
        np.clip(out, -limit, limit, out=out)


def narrow(numbers: Floats, dtype: KVDtype, out: Bits, scratch: NDArray[np.uint32]) -> None:
    """Rounds `numbers`, none of them NaN, to nearest even; overwrites their memory and `scratch`.

    float16 saturates at +-65504: a finite number never becomes an infinity. Its subnormals may be rounded twice, at
    2**-37 and at 2**-24.
    """
    words = numbers.view(np.uint32)
    if dtype == "float32":
        np.copyto(out, words)
    elif dtype == "bfloat16":
        round_bits(words, 16, scratch)
        np.copyto(out, scratch, casting="unsafe")
    else:
        np.clip(numbers, -LARGEST[dtype], LARGEST[dtype], out=numbers)
        np.multiply(numbers, np.float32(2.0**-112), out=numbers)
        round_bits(words, 13, scratch)  # now the sign is bit 18, and bits 15..17 are 0
        np.right_shift(scratch, 3, out=words)
        np.bitwise_and(words, 0x8000, out=words)
        np.bitwise_or(scratch, words, out=scratch)
        np.copyto(out, scratch, casting="unsafe")


def round_bits(words: NDArray[np.uint32], num_bits: int, out: NDArray[np.uint32]) -> None:
    """Drops the last `num_bits` bits of float32 `words`, rounding to nearest even, and shifts the rest down."""
    np.right_shift(words, num_bits, out=out)
    np.bitwise_and(out, 1, out=out)
    np.add(out, (1 << (num_bits - 1)) - 1, out=out)
    np.add(out, words, out=out)
    np.right_shift(out, num_bits, out=out)


def convert(bits: Bits, dtype: KVDtype, to: KVDtype) -> Bits:
    """Converts `bits` from one dtype to another, by `widen` and `narrow`; NaN stays NaN."""
    source, target = bits.reshape(-1), np.empty(bits.size, UNSIGNED[to])
    scratch = Scratch(bits.size, 1)
    for tile in tiles(bits.size, 1):
        part = source[tile]
        numbers = scratch.floats(part.shape)
        widen(part, dtype, numbers)
        narrow(numbers, to, target[tile], scratch.words(part.shape))
        magnitude = magnitudes(part)
        if magnitude.max() > _INFINITY[dtype]:
            target[tile][magnitude > _INFINITY[dtype]] = _NAN[to]
    return target.reshape(bits.shape)


def widened(bits: Bits, dtype: KVDtype) -> Floats:
    """`widen` into new memory."""
    numbers = np.empty(bits.shape, np.float32)
    widen(bits, dtype, numbers)
    return numbers


def scales_above(numbers: Floats, precision: int = 7) -> Bits:
    """bfloat16 bits of scales that are at least `numbers`, which are not negative, and have a finite inverse.

    precision: bits of their mantissa, 7 at most; with 0 they are powers of two.
    """
    floored = np.maximum(numbers, SMALLEST_SCALE)
    below = np.uint32((1 << (23 - precision)) - 1)
    return (((floored.view(np.uint32) + below) & ~below) >> np.uint32(16)).astype(np.uint16)


def bfloat16_below(numbers: Floats) -> Bits:
    """bfloat16 bits of the largest numbers that do not exceed `numbers`, which are finite."""
    words = np.ascontiguousarray(numbers).view(np.uint32)
    up_if_negative = (words.view(np.int32) >> 31).view(np.uint32) & np.uint32(0xFFFF)
    return ((words + up_if_negative) >> np.uint32(16)).astype(np.uint16)
