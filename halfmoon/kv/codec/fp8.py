"""FP8: e4m3 (OCP, no infinities) with one scale for each (layer, K or V, head) of the payload.

    bytes                 content
    num_values            e4m3 codes, in canonical order
    layers * 2 * heads    the scales' exponents plus 127


A value is `e4m3(code) * 2**exponent`. Power-of-two scales cost a floating-point format no precision: the error is at
most 1/16 of a value, or `2**(exponent - 10)` if that is more. The exponent is the smallest, from -126, that brings the
largest magnitude within e4m3's 448. NaN counts as 0 and an infinity as LARGEST of its dtype; a (layer, K or V, head)
that holds either is scaled for LARGEST, so in bfloat16 and float32 its other values become zeros. Other heads are not
affected.
"""

from __future__ import annotations

import math

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
    tiles,
    widen_finite,
    widened,
)
from halfmoon.kv.kv_layout import KVBytes, KVDtype

_BIAS = 127  # exponent bias of a scale's byte
_LARGEST_FRACTION = np.float32(448 / 512)
_SMALLEST_EXPONENT = -126  # 2**126 is finite
_BIAS_DIFFERENCE = 120  # between the exponent biases of float32 and e4m3
_MANTISSA_DIFFERENCE = 20


def encoded_bytes(shape: tuple[int, ...]) -> int:
    """Size in bytes of a payload for `[layers, 2, heads, tokens, head_dim]`."""
    return math.prod(shape) + math.prod(shape[:3])


def encode(bits: Bits, dtype: KVDtype, payload: NDArray[np.uint8]) -> None:
    """Fills `payload` from `bits`: [layers, 2, heads, tokens, head_dim]; payload: `encoded_bytes` of that shape."""
    rows = bits.reshape(-1, bits.shape[-1])
    codes = payload[: rows.size].reshape(rows.shape)
    largest = _largest(bits)
    exponents = _exponents(widened(np.minimum(largest, LARGEST_BITS[dtype]), dtype))  # [layers * 2 * heads]
    payload[rows.size :] = exponents + _BIAS
    factors = _per_row(-exponents, bits.shape)
    scratch = Scratch(*rows.shape)
    for tile in tiles(*rows.shape):
        numbers = scratch.floats(rows[tile].shape)
        widen_finite(rows[tile], dtype, numbers, largest.max())
        np.multiply(numbers, factors[tile, None], out=numbers)
        _to_e4m3(numbers, codes[tile], scratch.words(numbers.shape))


def decode(payload: KVBytes, shape: tuple[int, ...], dtype: KVDtype) -> Bits:
    """Bits of the values, of `shape`; `payload` has `encoded_bytes(shape)` bytes."""
    data = np.frombuffer(payload, np.uint8)
    out = np.empty(shape, UNSIGNED[dtype])
    rows = out.reshape(-1, shape[-1])
    codes = data[: rows.size].view(np.int8).reshape(rows.shape)
    factors = _per_row(data[rows.size :].astype(np.int32) - _BIAS, shape)
    scratch = Scratch(*rows.shape)
    for tile in tiles(*rows.shape):
        numbers = scratch.floats(rows[tile].shape)
        _from_e4m3(codes[tile], numbers)
        np.multiply(numbers, factors[tile, None], out=numbers)
        narrow(numbers, dtype, rows[tile], scratch.words(numbers.shape))
    return out


def _largest(bits: Bits) -> Bits:
    """Bits of the largest magnitude in each (layer, K or V, head): [layers * 2 * heads]."""
    groups = bits.reshape(math.prod(bits.shape[:3]), -1)
    largest = np.empty(len(groups), bits.dtype)
    for tile in tiles(*groups.shape):
        magnitudes(groups[tile]).max(axis=1, out=largest[tile])
    return largest


def _exponents(largest: Floats) -> NDArray[np.int32]:
    fractions, exponents = np.frexp(largest)  # fraction * 2**exponent, 1/2 <= fraction < 1
    needed: NDArray[np.int32] = exponents - np.where(fractions <= _LARGEST_FRACTION, 9, 8).astype(np.int32)
    return np.maximum(needed, _SMALLEST_EXPONENT)


def _per_row(exponents: NDArray[np.int32], shape: tuple[int, ...]) -> Floats:
    """2**exponent of each (layer, K or V, head), for each of its tokens: [layers * 2 * heads * tokens]."""
    return np.repeat(np.ldexp(np.float32(1), exponents), shape[3])


def _to_e4m3(numbers: Floats, out: NDArray[np.uint8], scratch: NDArray[np.uint32]) -> None:
    """Rounds `numbers` within +-448 to nearest even; overwrites their memory and `scratch`."""
    words = numbers.view(np.uint32)
    np.multiply(numbers, np.float32(2.0**-_BIAS_DIFFERENCE), out=numbers)
    round_bits(words, _MANTISSA_DIFFERENCE, scratch)  # now the sign is bit 11, and bits 7..10 are 0
    np.right_shift(scratch, 4, out=words)
    np.bitwise_and(words, 0x80, out=words)
    np.bitwise_or(scratch, words, out=scratch)
    np.copyto(out, scratch, casting="unsafe")


def _from_e4m3(codes: NDArray[np.int8], out: Floats) -> None:
    """Decodes exactly; the two codes for NaN read as +-480."""
    words = out.view(np.uint32)
    np.copyto(words.view(np.int32), codes)  # sign-extended
    np.left_shift(words, _MANTISSA_DIFFERENCE, out=words)
    np.bitwise_and(words, 0x87FF_FFFF, out=words)
    np.multiply(out, np.float32(2.0**_BIAS_DIFFERENCE), out=out)
