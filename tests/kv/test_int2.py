"""INT2 keeps to what its file states: errors within groups, the first token's keys, and nothing else concerned."""

from __future__ import annotations

import math
from functools import cache
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from halfmoon.kv.codec import Codec, decode, encode
from halfmoon.kv.codec.floats import LARGEST, UNSIGNED, narrow, widened
from halfmoon.kv.kv_layout import FloatDtype, KVDtype

DTYPES: tuple[KVDtype, ...] = get_args(FloatDtype)
SHAPES = st.tuples(st.integers(1, 3), st.just(2), st.integers(1, 3), st.integers(1, 70), st.integers(1, 160))


def bits_of(numbers: NDArray[Any], dtype: KVDtype) -> NDArray[Any]:
    floats = np.ascontiguousarray(numbers, np.float32).copy()
    out = np.empty(floats.shape, UNSIGNED[dtype])
    narrow(floats, dtype, out, np.empty(floats.shape, np.uint32))
    return out


def coded(bits: NDArray[Any], dtype: KVDtype) -> NDArray[Any]:
    """What is left, as float64."""
    return widened(decode(Codec.INT2, encode(Codec.INT2, bits, dtype), bits.shape, dtype, "float32"), "float32").astype(
        np.float64
    )


@st.composite
def kv_numbers(draw: st.DrawFn) -> tuple[KVDtype, NDArray[Any]]:
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(SHAPES)
    random = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    numbers = random.standard_normal(shape) * 10.0 ** draw(st.integers(-30, 30))
    numbers *= 10.0 ** random.uniform(-draw(st.integers(0, 6)), 0, shape)
    numbers += draw(st.integers(0, 30)) * np.abs(numbers).max() * random.standard_normal((*shape[:3], 1, shape[4]))
    numbers[random.random(shape) < draw(st.sampled_from([0.0, 0.5]))] = 0
    limit = min(float(LARGEST[dtype]), 2.0**119)
    return dtype, bits_of(np.clip(numbers, -limit, limit), dtype)


def group_bound(part: NDArray[Any], axis: int, size: int) -> NDArray[Any]:
    bound = np.empty_like(part)
    for start in range(0, part.shape[axis], size):
        group = (slice(None),) * axis + (slice(start, start + size),)
        low, high = part[group].min(axis=axis, keepdims=True), part[group].max(axis=axis, keepdims=True)
        bound[group] = 0.135 * (high - low) + 0.004 * np.abs(low) + 2.0**-126
    return bound


@given(kv_numbers())
def test_keys_are_within_the_bound_and_the_first_token_is_kept(kv: tuple[KVDtype, NDArray[Any]]) -> None:
    dtype, bits = kv
    want, got = widened(bits, dtype).astype(np.float64)[:, 0], coded(bits, dtype)[:, 0]
    assert (np.abs(got[:, :, 0] - want[:, :, 0]) <= 2.0**-8 * np.abs(want[:, :, 0]) + 2.0**-133).all()
    grouped = want.copy()
    grouped[:, :, 0] = want[:, :, min(1, want.shape[2] - 1)]
    bound = group_bound(grouped, 2, 32)
    assert (np.abs(got - want) <= bound + 1e-6 * np.abs(want))[:, :, 1:].all()


@cache
def hadamard(size: int) -> NDArray[Any]:
    """By its definition: the parity of the bits that row and column have in common."""
    signs = [[(-1) ** (row & column).bit_count() for column in range(size)] for row in range(size)]
    return np.array(signs) / math.sqrt(size)


@given(kv_numbers())
def test_rotated_values_are_within_the_bound(kv: tuple[KVDtype, NDArray[Any]]) -> None:
    dtype, bits = kv
    want, got = widened(bits, dtype).astype(np.float64)[:, 1], coded(bits, dtype)[:, 1]
    head_dim = want.shape[3]
    run = min(head_dim & -head_dim, 64)
    rotation = np.kron(np.eye(head_dim // run), hadamard(run))
    turned, left = want @ rotation, got @ rotation
    rounding = 1e-5 * np.abs(want).max(axis=3, keepdims=True) * run  # of the products, in float32
    assert (np.abs(left - turned) <= group_bound(turned, 3, 64) + rounding).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_stay_zeros(dtype: KVDtype) -> None:
    bits = np.zeros((2, 2, 3, 40, 48), UNSIGNED[dtype])
    assert not decode(Codec.INT2, encode(Codec.INT2, bits, dtype), bits.shape, dtype).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.parametrize(("half", "token", "channel"), [(0, 0, 3), (0, 3, 5), (0, 39, 39), (1, 32, 0), (1, 7, 90)])
def test_what_is_not_finite_stays_in_its_group(
    dtype: KVDtype, number: float, half: int, token: int, channel: int
) -> None:
    clean = bits_of(np.random.default_rng(0).standard_normal((2, 2, 2, 40, 96)), dtype)
    spoilt = clean.copy()
    not_finite = {"float32": 0x7F80_0000, "float16": 0x7C00, "bfloat16": 0x7F80}[dtype]
    bits = not_finite + 1 if math.isnan(number) else bits_of(np.array([number]), dtype)[0]
    if math.isinf(number):
        bits = not_finite | (1 << (8 * UNSIGNED[dtype].itemsize - 1) if number < 0 else 0)
    spoilt[1, half, 1, token, channel] = bits
    got, want = coded(spoilt, dtype), coded(clean, dtype)
    assert np.isfinite(got).all()
    if not math.isnan(number):
        assert np.sign(got[1, half, 1, token, channel]) == np.sign(number)
    outside = np.ones(got.shape, bool)
    if half:
        outside[1, 1, 1, token] = False
    else:
        outside[1, 0, 1, token // 32 * 32 : token // 32 * 32 + 32, channel] = False
    assert (got == want)[outside].all()


def test_a_group_is_coarser_than_int4() -> None:
    """The levels really are four."""
    bits = bits_of(np.random.default_rng(0).standard_normal((1, 2, 1, 33, 1)), "float32")
    keys = coded(bits, "float32")[0, 0, 0, 1:32, 0]
    assert np.unique(keys).size <= 4
