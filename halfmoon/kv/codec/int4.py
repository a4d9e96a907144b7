"""INT4: asymmetric, in groups of 32: keys along the tokens of one channel, values along the channels of one token.

KIVI divides them like this (Liu et al., 2024, section 3): keys have outlier channels, values do not. Groups begin with
the payload's first token, and the last one of a channel or token is smaller where 32 does not divide it.

    bytes                                            content
    num_values / 2                                   codes, [layers, heads, tokens, head_dim]; K's in the lower bits
    4 * layers * heads * ceil(tokens/32) * head_dim  K's bfloat16 scales, zeros: [2, layers, heads, groups, head_dim]
    4 * layers * heads * tokens * ceil(head_dim/32)  V's bfloat16 scales, zeros: [2, layers, heads, tokens, groups]


A value is `zero + code * scale`. The zero is the group's smallest value, rounded down, and the scale a fifteenth of the
distance from it to the largest, rounded up, so the error is at most half a scale: 3.4 % of the group's extent, 0.03 %
of its smallest value (nothing in bfloat16) and 2**-127. NaN counts as 0 and an infinity as LARGEST of its dtype, for
which its group is then scaled; other groups are not affected.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from halfmoon.kv.codec.floats import (
    UNSIGNED,
    Bits,
    Scratch,
    magnitudes,
    narrow,
    tiles,
    widen_finite,
    widened,
)
from halfmoon.kv.codec.groups import Groups
from halfmoon.kv.kv_layout import KVBytes, KVDtype

_KEYS, _VALUES = 0, 1  # indices on axis 1 of the canonical order
_GROUPS = {_KEYS: Groups(2, 32, 15), _VALUES: Groups(3, 32, 15)}  # of [layers, heads, tokens, head_dim]


class _Parts(NamedTuple):
    """Views into one payload."""

    codes: NDArray[np.uint8]  # [layers, heads, tokens, head_dim]
    params: tuple[Bits, Bits]  # K [2, layers, heads, groups, head_dim], V [2, layers, heads, tokens, groups]


def encoded_bytes(shape: tuple[int, ...]) -> int:
    """Size in bytes of a payload for `[layers, 2, heads, tokens, head_dim]`."""
    return math.prod(shape) // 2 + sum(2 * math.prod(_params_shape(shape, which)) for which in _GROUPS)


def encode(bits: Bits, dtype: KVDtype, payload: NDArray[np.uint8]) -> None:
    """Fills `payload` from `bits`: [layers, 2, heads, tokens, head_dim]; payload: `encoded_bytes` of that shape."""
    parts = _parts(payload, bits.shape)
    half = math.prod(bits.shape[2:])
    scratch = Scratch(len(bits), half)
    for layers in tiles(len(bits), half):
        codes = parts.codes[layers]
        high = np.empty_like(codes)
        for which, half_codes in ((_KEYS, codes), (_VALUES, high)):
            part = bits[layers, which]
            numbers = scratch.floats(part.shape)
            widen_finite(part, dtype, numbers, magnitudes(part).max())
            _GROUPS[which].quantise(numbers, half_codes, parts.params[which][:, layers], scratch)
        np.left_shift(high, 4, out=high)
        np.bitwise_or(codes, high, out=codes)


def decode(payload: KVBytes, shape: tuple[int, ...], dtype: KVDtype) -> Bits:
    """Bits of the values, of `shape`; `payload` has `encoded_bytes(shape)` bytes."""
    parts = _parts(np.frombuffer(payload, np.uint8), shape)
    out = np.empty(shape, UNSIGNED[dtype])
    half = math.prod(shape[2:])
    scratch = Scratch(shape[0], half)
    for layers in tiles(shape[0], half):
        codes = parts.codes[layers]
        for which, half_codes in ((_KEYS, codes & 15), (_VALUES, codes >> 4)):
            numbers = scratch.floats(codes.shape)
            _GROUPS[which].dequantise(half_codes, widened(parts.params[which][:, layers], "bfloat16"), numbers)
            narrow(numbers, dtype, out[layers, which], scratch.words(codes.shape))
    return out


def _params_shape(shape: tuple[int, ...], which: int) -> tuple[int, ...]:
    return _GROUPS[which].params_shape((shape[0], *shape[2:]))


def _parts(payload: NDArray[np.uint8], shape: tuple[int, ...]) -> _Parts:
    end = math.prod(shape) // 2
    codes = payload[:end].reshape(shape[0], *shape[2:])
    params = []
    for which in _GROUPS:
        size = 2 * math.prod(_params_shape(shape, which))
        params.append(payload[end : end + size].view("<u2").reshape(_params_shape(shape, which)))
        end += size
    return _Parts(codes, (params[_KEYS], params[_VALUES]))
