"""INT2: four levels, in groups of 32 tokens of a channel for keys, of 64 rotated channels of a token for values.

The codec is coarse, and meant for blocks well before the end of their prompt (`EntryCodec.residual_tokens`). Three
measures, each evaluated in docs/log/kv.md, limit the error. The first token's keys stay bfloat16, because a prompt's
first token draws much of all attention and stretches its groups. The levels leave out a tenth of a group's extent at
each end. Values are rotated by a Hadamard matrix (QuaRot: Ashkboos et al., 2024), which removes outlier channels, so
that a group may be twice as large.

    bytes                                            content
    layers * ceil(heads * tokens * head_dim / 2)     codes, layer by layer, see `_pack`
    2 * layers * heads * head_dim                    K of the first token, bfloat16: [layers, heads, head_dim]
    4 * layers * heads * ceil(tokens/32) * head_dim  K's bfloat16 scales, zeros: [2, layers, heads, groups, head_dim]
    4 * layers * ceil(head_dim/64) * heads * tokens  V's bfloat16 scales, zeros: [2, layers, 1, groups, heads * tokens]

V's codes are channel-major, [layers, 1, head_dim, heads * tokens]. The rotation is orthogonal and its own inverse. It
runs over as many channels as the largest power of two, up to 64, that divides head_dim.

The error of K, apart from the first token's rounding, is at most 13.5 % of its group's extent, 0.4 % of its smallest
value and 2**-126. The same bound holds for a rotated value of V, so a value of V is off by at most that times the root
of the run's length, and over the values of a run the mean square equals that of the rotated ones. NaN counts as 0. An
infinity of K counts as LARGEST of its dtype; V is clipped at 2**120, or at LARGEST if that is less. Other groups, even
of the same token, are not affected.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from halfmoon.kv.codec.floats import (
    LARGEST,
    UNSIGNED,
    Bits,
    Floats,
    Scratch,
    magnitudes,
    narrow,
    tiles,
    widen_finite,
    widened,
)
from halfmoon.kv.codec.groups import Groups
from halfmoon.kv.kv_layout import KVBytes, KVDtype

_KEY_GROUPS = Groups(2, 32, 3, margin=0.1)  # of [layers, heads, tokens, head_dim]
_VALUE_GROUPS = Groups(2, 64, 3, margin=0.1)  # of [layers, 1, head_dim, heads * tokens]
_LONGEST_RUN = 64  # channels that are rotated together
_ABSURD_BITS = 0x7B00  # bfloat16's 2**119: sums over larger values, mostly a peer's fault, may be infinite
_LARGEST_VALUE = np.float32(2.0**120)  # keeps a run's sum finite

_KEYS, _VALUES = 0, 1  # indices on axis 1 of the canonical order


class _Parts(NamedTuple):
    """Views of the parts of one payload."""

    packed: NDArray[np.uint8]  # [layers, bytes]
    first_keys: Bits  # [layers, heads, head_dim]
    key_params: Bits  # [2, layers, heads, groups, head_dim]
    value_params: Bits  # [2, layers, 1, groups, heads * tokens]


def encoded_bytes(shape: tuple[int, ...]) -> int:
    """Returns the size in bytes of a payload for `[layers, 2, heads, tokens, head_dim]`."""
    return _packed_bytes(shape) + 2 * sum(math.prod(part) for part in _param_shapes(shape))


def encode(bits: Bits, dtype: KVDtype, payload: NDArray[np.uint8]) -> None:
    """Fills `payload` from `bits`: [layers, 2, heads, tokens, head_dim]; payload: `encoded_bytes` of that shape."""
    parts = _parts(payload, bits.shape)
    half = math.prod(bits.shape[2:])
    scratch = Scratch(len(bits), half)
    for layers in tiles(len(bits), half):
        keys, values = bits[layers, _KEYS], bits[layers, _VALUES]
        numbers = scratch.floats(keys.shape)
        widen_finite(keys, dtype, numbers, magnitudes(keys).max())
        first = numbers[:, :, 0]
        narrow(first.copy(), "bfloat16", parts.first_keys[layers], np.empty(first.shape, np.uint32))
        if keys.shape[2] > 1:
            np.copyto(first, numbers[:, :, 1])
        key_codes = np.empty(keys.shape, np.uint8)
        _KEY_GROUPS.quantise(numbers, key_codes, parts.key_params[:, layers], scratch)
        turned = _turned(values, dtype, scratch)
        value_codes = np.empty(turned.shape, np.uint8)
        _VALUE_GROUPS.quantise(turned, value_codes, parts.value_params[:, layers], scratch)
        _pack(key_codes, value_codes, parts.packed[layers])


def decode(payload: KVBytes, shape: tuple[int, ...], dtype: KVDtype) -> Bits:
    """Decodes a payload of `encoded_bytes(shape)` bytes to the bits of the values, of `shape`."""
    parts = _parts(np.frombuffer(payload, np.uint8), shape)
    out = np.empty(shape, UNSIGNED[dtype])
    _, _, heads, tokens, head_dim = shape
    half = heads * tokens * head_dim
    scratch = Scratch(shape[0], half)
    for layers in tiles(shape[0], half):
        key_codes, value_codes = _unpack(parts.packed[layers], half)
        numbers = scratch.floats((len(key_codes), heads, tokens, head_dim))
        params = widened(parts.key_params[:, layers], "bfloat16")
        _KEY_GROUPS.dequantise(key_codes.reshape(numbers.shape), params, numbers)
        numbers[:, :, 0] = widened(parts.first_keys[layers], "bfloat16")
        narrow(numbers, dtype, out[layers, _KEYS], scratch.words(numbers.shape))
        turned = scratch.floats((len(key_codes), 1, head_dim, heads * tokens))
        params = widened(parts.value_params[:, layers], "bfloat16")
        _VALUE_GROUPS.dequantise(value_codes.reshape(turned.shape), params, turned)
        _turn(turned[:, 0], scratch.floats(turned[:, 0].shape, 1))
        numbers = scratch.floats(numbers.shape, 1)
        rows = numbers.reshape(len(numbers), heads * tokens, head_dim)
        if magnitudes(parts.value_params).max() > _ABSURD_BITS:
            np.nan_to_num(turned, copy=False, nan=0.0)
        np.copyto(rows, turned[:, 0].swapaxes(1, 2))
        narrow(numbers, dtype, out[layers, _VALUES], scratch.words(numbers.shape, 0))
    return out


def _turned(values: Bits, dtype: KVDtype, scratch: Scratch) -> Floats:
    """Returns rotated values [layers, 1, head_dim, heads * tokens], in scratch's first tile."""
    layers, heads, tokens, head_dim = values.shape
    numbers = scratch.floats((layers, heads * tokens, head_dim), 1)
    widen_finite(values.reshape(numbers.shape), dtype, numbers, magnitudes(values).max())
    limit = min(_LARGEST_VALUE, LARGEST[dtype])
    np.clip(numbers, -limit, limit, out=numbers)
    turned = scratch.floats((layers, head_dim, heads * tokens))
    np.copyto(turned, numbers.swapaxes(1, 2))
    _turn(turned, scratch.floats(turned.shape, 1))
    return turned[:, None]


def _turn(numbers: Floats, spare: Floats) -> None:
    """Rotates [layers, head_dim, rows] by a Hadamard matrix along head_dim, in place; applied twice it is the identity.

    Works by sums and differences of halves, so that no library threads wait for each other over such small matrices.
    """
    layers, head_dim, rows = numbers.shape
    run = min(head_dim & -head_dim, _LONGEST_RUN)
    source, span = numbers, 1
    while span < run:
        pairs, sums = (array.reshape(layers, -1, 2, span, rows) for array in (source, spare))
        np.add(pairs[:, :, 0], pairs[:, :, 1], out=sums[:, :, 0])
        np.subtract(pairs[:, :, 0], pairs[:, :, 1], out=sums[:, :, 1])
        source, spare, span = spare, source, 2 * span
    np.multiply(source, np.float32(1 / math.sqrt(run)), out=numbers)


def _pack(key_codes: NDArray[np.uint8], value_codes: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
    """Packs four codes a byte, lowest bits first: K's and V's of one position, then of one half a layer on."""
    layers, size = out.shape
    places = key_codes.reshape(layers, -1) | value_codes.reshape(layers, -1) << 2
    np.copyto(out, places[:, :size])
    later = places[:, size:]
    np.bitwise_or(out[:, : later.shape[1]], later << 4, out=out[:, : later.shape[1]])


def _unpack(packed: NDArray[np.uint8], half: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Unpacks K's and V's codes, [layers, half] each."""
    places = np.concatenate((packed & 15, packed >> 4), axis=1)[:, :half]
    return places & 3, places >> 2


def _packed_bytes(shape: tuple[int, ...]) -> int:
    return shape[0] * ((math.prod(shape[2:]) + 1) // 2)


def _param_shapes(shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    layers, _, heads, tokens, head_dim = shape
    return (
        (layers, heads, head_dim),
        _KEY_GROUPS.params_shape((layers, heads, tokens, head_dim)),
        _VALUE_GROUPS.params_shape((layers, 1, head_dim, heads * tokens)),
    )


def _parts(payload: NDArray[np.uint8], shape: tuple[int, ...]) -> _Parts:
    end = _packed_bytes(shape)
    parts = []
    for part in _param_shapes(shape):
        size = 2 * math.prod(part)
        parts.append(payload[end : end + size].view("<u2").reshape(part))
        end += size
    return _Parts(payload[: _packed_bytes(shape)].reshape(shape[0], -1), *parts)
