"""INT8 and FP8: codes of eight bits, and one scale for each row of `head_dim` values.

A row is K or V of one token, layer and head. A payload has all codes, then all scales. As the dtypes `int8` and `fp8`
of a layout, in canonical bytes, a row's scale follows its codes: `[..., head_dim + 2]` bytes. The two forms hold the
same values exactly. (An arena has a third: `engine/kv_memory/quantised_rows.py`.)

    bytes                        content
    num_values                   codes, in canonical order: of INT8 two's complement, of FP8 e4m3 (OCP, no infinities)
    2 * num_values / head_dim    bfloat16 scales, in the same order


A value is `code * scale`. The scale is the row's largest magnitude / the largest code (127, 448), rounded up; for FP8,
which that costs no precision, to a power of two. Codes are rounded to nearest even. So the error of INT8 is at most
0.4 % of that magnitude, or 2**-127 if that is more. The error of FP8 is at most 1/16 of the value, or 2**-10 scales
(1 part in 229,000 of the magnitude) if that is more; its values are exact in bfloat16, and rounded again they stay.

NaN counts as 0 and an infinity as LARGEST of its dtype; a row that holds either is scaled for LARGEST, so in bfloat16
and float32 its other values become zeros. Other rows are not affected. No row has e4m3's two codes for NaN; here they
read as +-480.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from halfmoon.kv.codec.floats import (
    LARGEST_BITS,
    UNSIGNED,
    Bits,
    Floats,
    Scratch,
    magnitudes,
    narrow,
    round_bits,
    scales_above,
    tiles,
    widen_finite,
    widened,
)
from halfmoon.kv.kv_layout import KVBytes, KVDtype

_Words = NDArray[np.uint32]
_Codes = NDArray[np.uint8]
_BIAS_DIFFERENCE = 120  # between the exponent biases of float32 and e4m3
_MANTISSA_DIFFERENCE = 20


@dataclass(frozen=True, slots=True)
class ScaledRows:
    """One format of codes, and all that a row with them is."""

    largest_code: np.float32
    scale_precision: int  # bits of a scale's mantissa
    narrow_codes: Callable[[Floats, _Codes, _Words], None]  # may overwrite the numbers and the scratch
    widen_codes: Callable[[_Codes, Floats], None]

    def encoded_bytes(self, shape: tuple[int, ...]) -> int:
        """Size in bytes of a payload for `[..., head_dim]`."""
        return math.prod(shape) + 2 * math.prod(shape[:-1])

    def encode(self, bits: Bits, dtype: KVDtype, payload: _Codes) -> None:
        """Fills `payload` from `bits`: [..., head_dim]; payload: `encoded_bytes` of that shape."""
        rows = bits.reshape(-1, bits.shape[-1])
        codes = payload[: rows.size].reshape(rows.shape)
        scales = payload[rows.size :].view("<u2")  # [num_rows]
        scratch = Scratch(*rows.shape)
        for tile in tiles(*rows.shape):
            part = rows[tile]
            numbers = scratch.floats(part.shape)
            largest = magnitudes(part).max(axis=1)  # [rows of the tile]
            widen_finite(part, dtype, numbers, largest.max())
            bounds = widened(np.minimum(largest, LARGEST_BITS[dtype]), dtype)
            scales[tile] = scales_above(bounds / self.largest_code, self.scale_precision)
            np.multiply(numbers, (1 / widened(scales[tile], "bfloat16"))[:, None], out=numbers)
            self.narrow_codes(numbers, codes[tile], scratch.words(part.shape))

    def decode(self, payload: KVBytes, shape: tuple[int, ...], dtype: KVDtype) -> Bits:
        """Bits of the values, of `shape`; `payload` has `encoded_bytes(shape)` bytes."""
        data = np.frombuffer(payload, np.uint8)
        out = np.empty(shape, UNSIGNED[dtype])
        rows = out.reshape(-1, shape[-1])
        codes = data[: rows.size].reshape(rows.shape)
        scales = widened(data[rows.size :].view("<u2"), "bfloat16")  # [num_rows]
        scratch = Scratch(*rows.shape)
        for tile in tiles(*rows.shape):
            numbers = scratch.floats(rows[tile].shape)
            self.widen_codes(codes[tile], numbers)
            np.multiply(numbers, scales[tile, None], out=numbers)
            narrow(numbers, dtype, rows[tile], scratch.words(numbers.shape))
        return out

    def round_rows(self, bits: Bits, dtype: KVDtype) -> Bits:
        """Rows in memory, [..., head_dim + 2], of the values that `bits` encode: [..., head_dim]."""
        payload = np.empty(self.encoded_bytes(bits.shape), np.uint8)
        self.encode(bits, dtype, payload)
        return to_rows(payload.data, bits.shape)

    def widen_rows(self, rows: Bits, dtype: KVDtype) -> Bits:
        """Bits of the values of rows in memory: [..., head_dim]."""
        shape = (*rows.shape[:-1], rows.shape[-1] - 2)
        payload = np.empty(self.encoded_bytes(shape), np.uint8)
        from_rows(rows, payload)
        with np.errstate(over="ignore", invalid="ignore"):  # the scales may come from a peer
            return self.decode(payload.data, shape, dtype)


def to_rows(payload: KVBytes, shape: tuple[int, ...]) -> Bits:
    """A payload for `shape` as rows in memory: [..., head_dim + 2]."""
    data = np.frombuffer(payload, np.uint8)
    rows = np.empty((*shape[:-1], shape[-1] + 2), np.uint8)
    codes = math.prod(shape)
    rows[..., :-2] = data[:codes].reshape(shape)
    rows[..., -2:] = data[codes:].reshape(*shape[:-1], 2)
    return rows


def from_rows(rows: Bits, payload: _Codes) -> None:
    """Fills `payload` from rows in memory, [..., head_dim + 2]."""
    codes = rows[..., :-2]
    payload[: codes.size].reshape(codes.shape)[...] = codes
    payload[codes.size :].reshape(*codes.shape[:-1], 2)[...] = rows[..., -2:]


def _to_int8(numbers: Floats, out: _Codes, scratch: _Words) -> None:
    del scratch
    np.rint(numbers, out=numbers)
    np.copyto(out.view(np.int8), numbers, casting="unsafe")


def _from_int8(codes: _Codes, out: Floats) -> None:
    np.copyto(out, codes.view(np.int8))


def _to_e4m3(numbers: Floats, out: _Codes, scratch: _Words) -> None:
    """Rounds `numbers`, which are below 464."""
    words = numbers.view(np.uint32)
    np.multiply(numbers, np.float32(2.0**-_BIAS_DIFFERENCE), out=numbers)
    round_bits(words, _MANTISSA_DIFFERENCE, scratch)  # now the sign is bit 11, and bits 7..10 are 0
    np.right_shift(scratch, 4, out=words)
    np.bitwise_and(words, 0x80, out=words)
    np.bitwise_or(scratch, words, out=scratch)
    np.copyto(out, scratch, casting="unsafe")


def _from_e4m3(codes: _Codes, out: Floats) -> None:
    words = out.view(np.uint32)
    np.copyto(words.view(np.int32), codes.view(np.int8))  # sign-extended
    np.left_shift(words, _MANTISSA_DIFFERENCE, out=words)
    np.bitwise_and(words, 0x87FF_FFFF, out=words)
    np.multiply(out, np.float32(2.0**_BIAS_DIFFERENCE), out=out)


INT8 = ScaledRows(np.float32(127), 7, _to_int8, _from_int8)
FP8 = ScaledRows(np.float32(448), 0, _to_e4m3, _from_e4m3)
