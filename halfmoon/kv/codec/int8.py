"""INT8: symmetric, one scale for each row of `head_dim` values, i.e. for each (layer, K or V, head, token).

A payload has all codes, then all scales. In memory, and as the dtype `int8` of a layout, a row's scale follows its
codes, so that a row is one piece: `[..., head_dim + 2]` bytes. The two forms hold the same values exactly.

    bytes                        content
    num_values                   two's complement codes, in canonical order
    2 * num_values / head_dim    bfloat16 scales, in the same order


A value is `code * scale`. The scale is the row's largest magnitude / 127, rounded up, so the error is at most 0.4 % of
that magnitude, or 2**-127 if that is more. NaN counts as 0 and an infinity as LARGEST of its dtype; a row that holds
either is scaled for LARGEST, so in bfloat16 and float32 its other values become zeros. Other rows are not affected.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from halfmoon.kv.codec.floats import (
    LARGEST_BITS,
    UNSIGNED,
    Bits,
    Scratch,
    magnitudes,
    narrow,
    scales_above,
    tiles,
    widen_finite,
    widened,
)
from halfmoon.kv.kv_layout import KVBytes, KVDtype

_LARGEST_CODE = np.float32(127)


def encoded_bytes(shape: tuple[int, ...]) -> int:
    """Size in bytes of a payload for `[..., head_dim]`."""
    return math.prod(shape) + 2 * math.prod(shape[:-1])


def encode(bits: Bits, dtype: KVDtype, payload: NDArray[np.uint8]) -> None:
    """Fills `payload` from `bits`: [..., head_dim]; payload: `encoded_bytes` of that shape."""
    rows = bits.reshape(-1, bits.shape[-1])
    codes = payload[: rows.size].view(np.int8).reshape(rows.shape)
    scales = payload[rows.size :].view("<u2")  # [num_rows]
    scratch = Scratch(*rows.shape)
    for tile in tiles(*rows.shape):
        part = rows[tile]
        numbers = scratch.floats(part.shape)
        largest = magnitudes(part).max(axis=1)  # [rows of the tile]
        widen_finite(part, dtype, numbers, largest.max())
        bounds = widened(np.minimum(largest, LARGEST_BITS[dtype]), dtype)
        scales[tile] = scales_above(bounds / _LARGEST_CODE)
        np.multiply(numbers, (1 / widened(scales[tile], "bfloat16"))[:, None], out=numbers)
        np.rint(numbers, out=numbers)
        np.copyto(codes[tile], numbers, casting="unsafe")


def decode(payload: KVBytes, shape: tuple[int, ...], dtype: KVDtype) -> Bits:
    """Bits of the values, of `shape`; `payload` has `encoded_bytes(shape)` bytes."""
    data = np.frombuffer(payload, np.uint8)
    out = np.empty(shape, UNSIGNED[dtype])
    rows = out.reshape(-1, shape[-1])
    codes = data[: rows.size].view(np.int8).reshape(rows.shape)
    scales = widened(data[rows.size :].view("<u2"), "bfloat16")  # [num_rows]
    scratch = Scratch(*rows.shape)
    for tile in tiles(*rows.shape):
        numbers = scratch.floats(rows[tile].shape)
        np.multiply(codes[tile], scales[tile, None], out=numbers)
        narrow(numbers, dtype, rows[tile], scratch.words(numbers.shape))
    return out


def to_rows(payload: KVBytes, shape: tuple[int, ...]) -> Bits:
    """A payload for `shape` as rows in memory: [..., head_dim + 2]."""
    data = np.frombuffer(payload, np.uint8)
    rows = np.empty((*shape[:-1], shape[-1] + 2), np.uint8)
    codes = math.prod(shape)
    rows[..., :-2] = data[:codes].reshape(shape)
    rows[..., -2:] = data[codes:].reshape(*shape[:-1], 2)
    return rows


def from_rows(rows: Bits, payload: NDArray[np.uint8]) -> None:
    """Fills `payload` from rows in memory, [..., head_dim + 2]."""
    codes = rows[..., :-2]
    payload[: codes.size].reshape(codes.shape)[...] = codes
    payload[codes.size :].reshape(*codes.shape[:-1], 2)[...] = rows[..., -2:]


def round_rows(bits: Bits, dtype: KVDtype) -> Bits:
    """Rows in memory, [..., head_dim + 2], of the values that `bits` encode: [..., head_dim]."""
    payload = np.empty(encoded_bytes(bits.shape), np.uint8)
    encode(bits, dtype, payload)
    return to_rows(payload.data, bits.shape)


def widen_rows(rows: Bits, dtype: KVDtype) -> Bits:
    """Bits of the values of rows in memory: [..., head_dim]."""
    shape = (*rows.shape[:-1], rows.shape[-1] - 2)
    payload = np.empty(encoded_bytes(shape), np.uint8)
    from_rows(rows, payload)
    with np.errstate(over="ignore", invalid="ignore"):  # the scales may come from a peer
        return decode(payload.data, shape, dtype)
