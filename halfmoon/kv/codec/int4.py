"""INT4: asymmetric, in groups of 32: keys along the tokens of one channel, values along the channels of one token.

That is KIVI's division (Liu et al., 2024, section 3): keys have channels of outliers, values do not. Groups begin with
the payload's first token, and the last one of a channel or token is smaller where 32 does not divide.

    bytes                                            content
    num_values / 2                                   codes, [layers, heads, tokens, head_dim]; K's in the lower bits
    4 * layers * heads * ceil(tokens/32) * head_dim  K's bfloat16 scales, zeros: [2, layers, heads, groups, head_dim]
    4 * layers * heads * tokens * ceil(head_dim/32)  V's bfloat16 scales, zeros: [2, layers, heads, tokens, groups]

A value is `zero + code * scale`. The zero is the group's smallest value, rounded down, and the scale a fifteenth of
what is between it and the largest, rounded up, so the error is at most half a scale: 3.4 % of the group's extent,
0.03 % of its smallest value (nothing in bfloat16) and 2**-127. NaN counts as 0 and an infinity as LARGEST of its dtype,
for which its group is then scaled; other groups are not concerned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from halfmoon.kv.codec.floats import (
    UNSIGNED,
    Bits,
    Floats,
    Scratch,
    bfloat16_below,
    magnitudes,
    narrow,
    scales_above,
    tiles,
    widen_finite,
    widened,
)
from halfmoon.kv.layout import KVBytes, KVDtype

GROUP_VALUES = 32
_LARGEST_CODE = np.float32(15)

_KEYS, _VALUES = 0, 1  # places in axis 1 of the canonical order
_GROUPED_AXIS = {_KEYS: 2, _VALUES: 3}  # of [layers, heads, tokens, head_dim]


class _Parts(NamedTuple):
    """Views of one payload."""

    codes: NDArray[np.uint8]  # [layers, heads, tokens, head_dim]
    params: tuple[Bits, Bits]  # of K [2, layers, heads, groups, head_dim], of V [2, layers, heads, tokens, groups]


def encoded_bytes(shape: tuple[int, ...]) -> int:
    """Size of a payload for `[layers, 2, heads, tokens, head_dim]`."""
    return math.prod(shape) // 2 + sum(2 * math.prod(_params_shape(shape, which)) for which in _GROUPED_AXIS)


def encode(bits: Bits, dtype: KVDtype, payload: NDArray[np.uint8]) -> None:
    """bits: [layers, 2, heads, tokens, head_dim]; payload: `encoded_bytes` of their shape, to be filled."""
    parts = _parts(payload, bits.shape)
    half = math.prod(bits.shape[2:])
    scratch = Scratch(len(bits), half)
    for layers in tiles(len(bits), half):
        codes = parts.codes[layers]
        high = np.empty_like(codes)
        _quantise(bits[layers, _KEYS], dtype, _KEYS, codes, parts.params[_KEYS][:, layers], scratch)
        _quantise(bits[layers, _VALUES], dtype, _VALUES, high, parts.params[_VALUES][:, layers], scratch)
        np.left_shift(high, 4, out=high)
        np.bitwise_or(codes, high, out=codes)


def decode(payload: KVBytes, shape: tuple[int, ...], dtype: KVDtype) -> Bits:
    """The values' bits, of `shape`; `payload` has `encoded_bytes(shape)` bytes."""
    parts = _parts(np.frombuffer(payload, np.uint8), shape)
    out = np.empty(shape, UNSIGNED[dtype])
    half = math.prod(shape[2:])
    scratch = Scratch(shape[0], half)
    for layers in tiles(shape[0], half):
        codes = parts.codes[layers]
        for which, half_codes in ((_KEYS, codes & 15), (_VALUES, codes >> 4)):
            numbers = scratch.floats(codes.shape)
            _dequantise(half_codes, which, widened(parts.params[which][:, layers], "bfloat16"), numbers)
            narrow(numbers, dtype, out[layers, which], scratch.words(codes.shape))
    return out


def _quantise(bits: Bits, dtype: KVDtype, which: int, codes: NDArray[np.uint8], params: Bits, scratch: Scratch) -> None:
    """bits, codes: [layers, heads, tokens, head_dim]."""
    axis = _GROUPED_AXIS[which]
    largest = magnitudes(bits).max()
    for members, groups in _segments(bits.shape[axis]):
        part = _split(bits, axis, members)
        scales, zeros = (_cut(param, axis, groups) for param in params)
        _bound(part, dtype, axis, largest, scales, zeros, scratch)
        numbers = scratch.floats(part.shape)
        widen_finite(part, dtype, numbers, largest)
        np.subtract(numbers, np.expand_dims(widened(zeros, "bfloat16"), axis + 1), out=numbers)
        np.multiply(numbers, np.expand_dims(1 / widened(scales, "bfloat16"), axis + 1), out=numbers)
        np.rint(numbers, out=numbers)
        np.copyto(_split(codes, axis, members), numbers, casting="unsafe")


def _bound(part: Bits, dtype: KVDtype, axis: int, largest: int, scales: Bits, zeros: Bits, scratch: Scratch) -> None:
    """Fills in scales and zeros of groups whose members are along `axis + 1` of `part`."""
    in_front = np.moveaxis(part, axis + 1, 0)  # numpy is fast along the other axes
    numbers = scratch.floats(in_front.shape)
    widen_finite(in_front, dtype, numbers, largest)
    zeros[...] = bfloat16_below(_reduce(np.minimum, numbers))
    scales[...] = scales_above((_reduce(np.maximum, numbers) - widened(zeros, "bfloat16")) / _LARGEST_CODE)


def _dequantise(codes: NDArray[Any], which: int, params: Floats, out: Floats) -> None:
    """codes, out: [layers, heads, tokens, head_dim]."""
    axis = _GROUPED_AXIS[which]
    for members, groups in _segments(codes.shape[axis]):
        scales, zeros = (np.expand_dims(_cut(param, axis, groups), axis + 1) for param in params)
        numbers = _split(out, axis, members)
        np.multiply(_split(codes, axis, members), scales, out=numbers)
        np.add(numbers, zeros, out=numbers)


def _segments(length: int) -> Iterator[tuple[slice, slice]]:
    """Equal groups along an axis, as (their members, their numbers): the full ones, then the smaller last one."""
    full = length // GROUP_VALUES
    if full:
        yield slice(0, full * GROUP_VALUES), slice(0, full)
    if length % GROUP_VALUES:
        yield slice(full * GROUP_VALUES, length), slice(full, full + 1)


def _cut(array: NDArray[Any], axis: int, part: slice) -> NDArray[Any]:
    return array[(slice(None),) * axis + (part,)]


def _split(array: NDArray[Any], axis: int, members: slice) -> NDArray[Any]:
    """A segment with its axis split into groups and members; a view."""
    part = _cut(array, axis, members)
    length = part.shape[axis]
    return part.reshape(*part.shape[:axis], -1, min(length, GROUP_VALUES), *part.shape[axis + 1 :])


def _reduce(choose: Callable[[Floats, Floats], Floats], numbers: Floats) -> Floats:
    """Along the first axis, by halves that overlap where it is odd: several times as fast as numpy's reduction."""
    while (length := len(numbers)) > 1:
        keep = (length + 1) // 2
        numbers = choose(numbers[:keep], numbers[length - keep :])
    reduced: Floats = numbers[0]
    return reduced


def _params_shape(shape: tuple[int, ...], which: int) -> tuple[int, ...]:
    layers, _, *rest = shape
    params = [2, layers, *rest]
    params[1 + _GROUPED_AXIS[which]] = -(-params[1 + _GROUPED_AXIS[which]] // GROUP_VALUES)
    return tuple(params)


def _parts(payload: NDArray[np.uint8], shape: tuple[int, ...]) -> _Parts:
    end = math.prod(shape) // 2
    codes = payload[:end].reshape(shape[0], *shape[2:])
    params = []
    for which in _GROUPED_AXIS:
        size = 2 * math.prod(_params_shape(shape, which))
        params.append(payload[end : end + size].view("<u2").reshape(_params_shape(shape, which)))
        end += size
    return _Parts(codes, (params[_KEYS], params[_VALUES]))
