"""Each codec keeps to the error that its file states, for every dtype, shape and number; nothing leaves its group."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from halfmoon.errors import DataLoss, InvalidRequest
from halfmoon.kv.codec import LOSSLESS, Codec, Shape, decode, encode, encoded_bytes, gainful
from halfmoon.kv.codec.floats import LARGEST, UNSIGNED, widened
from halfmoon.kv.kv_layout import FloatDtype, KVDtype

DTYPES: tuple[KVDtype, ...] = get_args(FloatDtype)
SIZED = [codec for codec in Codec if codec not in LOSSLESS]
QUANTISED = (Codec.INT8, Codec.INT4, Codec.FP8)  # INT2, whose bounds are of rotated values, has a file of its own
TORCH = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
SIGNED = {"float32": torch.int32, "float16": torch.int16, "bfloat16": torch.int16}
HALF_LAST_PLACE = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}  # of a value
SMALLEST_STEP = {"float32": 2.0**-149, "float16": 2.0**-24, "bfloat16": 2.0**-133}

shapes = st.tuples(st.integers(1, 3), st.just(2), st.integers(1, 3), st.integers(1, 70), st.integers(1, 70))


def bits_of(numbers: NDArray[Any], dtype: KVDtype) -> NDArray[Any]:
    """By torch, which rounds to nearest even; infinite beyond the dtype's range."""
    tensor = torch.from_numpy(np.ascontiguousarray(numbers, np.float32)).to(TORCH[dtype])
    return tensor.view(SIGNED[dtype]).numpy().view(UNSIGNED[dtype])


def numbers_of(bits: NDArray[Any], dtype: KVDtype) -> NDArray[Any]:
    """As float64, in which bounds can be computed."""
    signed = bits.view(f"i{bits.dtype.itemsize}").copy()
    numbers: NDArray[Any] = torch.from_numpy(signed).view(TORCH[dtype]).double().numpy()
    return numbers


@st.composite
def kv_numbers(draw: st.DrawFn) -> tuple[KVDtype, NDArray[Any]]:
    """Bits in canonical order: of any size together, with offsets by channel as real keys have, and many zeros."""
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(shapes)
    random = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    numbers = random.standard_normal(shape) * 10.0 ** draw(st.integers(-44, 36))
    numbers *= 10.0 ** random.uniform(-draw(st.integers(0, 8)), 0, shape)
    numbers += draw(st.integers(0, 100)) * np.abs(numbers).max() * random.standard_normal((*shape[:3], 1, shape[4]))
    numbers[random.random(shape) < draw(st.sampled_from([0.0, 0.1, 0.9, 1.0]))] = 0
    limit = float(LARGEST[dtype])
    return dtype, bits_of(np.clip(numbers, -limit, limit), dtype)


def int8_bound(numbers: NDArray[Any]) -> NDArray[Any]:
    largest: NDArray[Any] = np.abs(numbers).max(axis=-1, keepdims=True)
    bound: NDArray[Any] = np.maximum(0.00398 * largest, 2.0**-127)
    return bound


def int4_bound(numbers: NDArray[Any]) -> NDArray[Any]:
    bound = np.empty_like(numbers)
    for half, axis in ((0, 2), (1, 3)):
        part, out = numbers[:, half], bound[:, half]  # [layers, heads, tokens, head_dim]
        for start in range(0, part.shape[axis], 32):
            group = (slice(None),) * axis + (slice(start, start + 32),)
            low, high = part[group].min(axis=axis, keepdims=True), part[group].max(axis=axis, keepdims=True)
            out[group] = 0.034 * (high - low) + 0.0003 * np.abs(low) + 2.0**-127
    return bound


def fp8_bound(numbers: NDArray[Any]) -> NDArray[Any]:
    largest = np.abs(numbers).max(axis=-1, keepdims=True)
    exponent = np.ceil(np.log2(np.maximum(largest, 1e-60) / 448) - 1e-9)
    bound: NDArray[Any] = np.maximum(np.abs(numbers) / 16, 2.0 ** (np.maximum(exponent, -126) - 10))
    return bound


ROWS: list[tuple[KVDtype, Codec]] = [("int8", Codec.INT8), ("fp8", Codec.FP8)]  # a dtype, and the codec of its rows
BOUNDS = {Codec.INT8: int8_bound, Codec.INT4: int4_bound, Codec.FP8: fp8_bound}


@pytest.mark.parametrize("codec", QUANTISED)
@given(kv_numbers(), st.sampled_from(DTYPES))
def test_the_error_is_within_the_bound(codec: Codec, kv: tuple[KVDtype, NDArray[Any]], to: KVDtype) -> None:
    dtype, bits = kv
    payload = encode(codec, bits, dtype)
    assert payload.nbytes == encoded_bytes(codec, bits.shape, dtype)
    got, want = numbers_of(decode(codec, payload, bits.shape, dtype, to), to), numbers_of(bits, dtype)
    limit = 65504 if to == "float16" else np.inf
    bound = BOUNDS[codec](want)
    rounding = HALF_LAST_PLACE[to] * (np.abs(want) + bound) + SMALLEST_STEP[to]
    assert (np.abs(got - np.clip(want, -limit, limit)) <= bound + rounding).all()


@pytest.mark.parametrize("codec", QUANTISED)
@given(shapes, st.sampled_from(DTYPES), st.sampled_from([0.0, 1.0, -1.0, 0.1, -3e-5, 60000.0, 1e-40]))
def test_constants_are_kept_and_zeros_exactly(codec: Codec, shape: Shape, dtype: KVDtype, number: float) -> None:
    bits = bits_of(np.full(shape, number), dtype)
    got = numbers_of(decode(codec, encode(codec, bits, dtype), shape, dtype), dtype)
    assert np.unique(got).size == 1
    constant = numbers_of(bits, dtype)
    assert np.abs(got - constant).max() <= abs(number) / 16 + 2.0**-127
    if number == 0:
        assert not got.any()


@given(kv_numbers())
def test_raw_is_the_bits(kv: tuple[KVDtype, NDArray[Any]]) -> None:
    dtype, bits = kv
    payload = encode(Codec.RAW, bits, dtype)
    assert bytes(payload) == bits.tobytes()
    assert (decode(Codec.RAW, payload, bits.shape, dtype) == bits).all()


@pytest.mark.parametrize(("name", "own"), ROWS)
@given(kv_numbers(), st.sampled_from(DTYPES))
def test_rows_hold_what_their_codec_does(
    name: KVDtype, own: Codec, kv: tuple[KVDtype, NDArray[Any]], to: KVDtype
) -> None:
    dtype, bits = kv
    shape = bits.shape
    payload = encode(own, bits, dtype)
    rows = decode(Codec.RAW, encode(Codec.RAW, bits, dtype), shape, dtype, name)
    assert rows.shape == (*shape[:-1], shape[-1] + 2)
    assert (decode(own, payload, shape, dtype, name) == rows).all()
    raw = encode(Codec.RAW, rows, name)
    assert raw.nbytes == encoded_bytes(Codec.RAW, shape, name) == rows.size
    assert (decode(Codec.RAW, raw, shape, name) == rows).all()
    assert bytes(encode(own, rows, name)) == bytes(payload)
    numbers = decode(Codec.RAW, raw, shape, name, to)
    assert (numbers == decode(own, payload, shape, dtype, to)).all()
    for codec in {Codec.INT8, Codec.INT4, Codec.FP8, Codec.INT2} - {own}:
        coded = encode(codec, rows, name)
        assert bytes(coded) == bytes(encode(codec, decode(Codec.RAW, raw, shape, name, "float32"), "float32"))
        again = decode(
            Codec.RAW, encode(Codec.RAW, decode(codec, coded, shape, "float32"), "float32"), shape, "float32", name
        )
        assert (decode(codec, coded, shape, name) == again).all()


SPECIAL = np.array(
    [
        *(0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 65504, 65519, 65520, -1e6, 3.4e38, -3.39e38),
        *(1e-40, 6e-8, -3e-8, 1e-7, -(2.0**-14), 2.0**-24),
        *(1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-8 + 2.0**-20, 1 + 2.0**-11, 1 + 3 * 2.0**-11),
    ]
)


@pytest.mark.parametrize(("dtype", "to"), list(itertools.product(DTYPES, DTYPES)))
def test_raw_changes_the_dtype_as_torch_does_but_saturates(dtype: KVDtype, to: KVDtype) -> None:
    random = np.random.default_rng(0)
    numbers = np.concatenate([SPECIAL, random.standard_normal(70_001) * 10.0 ** random.uniform(-9, 9, 70_001)])
    bits = bits_of(numbers[None, None, :, None, None].repeat(2, axis=1), dtype)
    got = decode(Codec.RAW, encode(Codec.RAW, bits, dtype), bits.shape, dtype, to)
    source = torch.from_numpy(bits.view(f"i{bits.dtype.itemsize}")).view(TORCH[dtype])
    if dtype != to == "float16":
        source = source.float().clamp(-65504, 65504)
    want = source.to(TORCH[to]).double().numpy()
    tolerance = np.where(np.abs(want) < 2.0**-14, 2.0**-24, 0) if to == "float16" else 0  # rounded twice there
    same = np.isclose(numbers_of(got, to), want, rtol=0, atol=tolerance, equal_nan=True)
    assert same.all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fp8_is_the_e4m3_of_torch(dtype: KVDtype) -> None:
    random = np.random.default_rng(0)
    numbers = random.standard_normal((2, 2, 3, 50, 20)) * 10.0 ** random.uniform(-9, 0, (2, 2, 3, 50, 20))
    bits = bits_of(numbers, dtype)
    payload = encode(Codec.FP8, bits, dtype)
    got = torch.frombuffer(bytearray(payload[: bits.size]), dtype=torch.float8_e4m3fn).view(bits.shape)
    scales = torch.frombuffer(bytearray(payload[bits.size :]), dtype=torch.bfloat16)
    scale = scales.float().view(*bits.shape[:-1], 1)
    want = (torch.from_numpy(widened(bits, dtype)) / scale).to(torch.float8_e4m3fn)
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    decoded = numbers_of(decode(Codec.FP8, payload, bits.shape, dtype, "float32"), "float32")
    assert (decoded == (want.float() * scale).double().numpy()).all()


def test_every_code_of_fp8_reads_as_torch_reads_it() -> None:
    rows = np.zeros((1, 2, 1, 1, 130), np.uint8)
    rows[..., :-2] = np.arange(256, dtype=np.uint8).reshape(1, 2, 1, 1, 128)
    rows[..., -2:] = np.array([0x80, 0x3F])  # the scale 1
    got = numbers_of(decode(Codec.RAW, rows.tobytes(), (1, 2, 1, 1, 128), "fp8", "float32"), "float32").reshape(256)
    want = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()
    want[[0x7F, 0xFF]] = 480, -480  # NaN, which no row has
    assert (got == want).all()


# Where a number that is not finite may be felt, for each codec: the places that share its scale.
GROUP_OF: dict[Codec, Callable[[int, int, int], tuple[Any, ...]]] = {
    Codec.INT8: lambda half, token, channel: (1, half, 1, token, slice(None)),
    Codec.INT4: lambda half, token, channel: (
        (1, 0, 1, slice(token // 32 * 32, token // 32 * 32 + 32), channel)
        if half == 0
        else (1, 1, 1, token, slice(channel // 32 * 32, channel // 32 * 32 + 32))
    ),
    Codec.FP8: lambda half, token, channel: (1, half, 1, token, slice(None)),
}


@pytest.mark.parametrize("codec", QUANTISED)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.parametrize(("half", "token", "channel"), [(0, 3, 5), (0, 39, 39), (1, 32, 0), (1, 7, 35)])
def test_what_is_not_finite_stays_in_its_group(
    codec: Codec, dtype: KVDtype, number: float, half: int, token: int, channel: int
) -> None:
    clean = bits_of(np.random.default_rng(0).standard_normal((2, 2, 2, 40, 40)), dtype)
    spoilt = clean.copy()
    where = (1, half, 1, token, channel)
    spoilt[where] = bits_of(np.array([number]), dtype)[0]
    got, want = (numbers_of(decode(codec, encode(codec, kv, dtype), kv.shape, dtype), dtype) for kv in (spoilt, clean))
    assert np.isfinite(got).all()
    if math.isnan(number):
        assert abs(got[where]) <= (0 if codec is not Codec.INT4 else 4)
    else:
        assert got[where] == pytest.approx(np.sign(number) * float(LARGEST[dtype]), rel=1 / 16)
    outside = np.ones(got.shape, bool)
    outside[GROUP_OF[codec](half, token, channel)] = False
    assert (got == want)[outside].all()


@pytest.mark.parametrize("codec", SIZED)
@given(st.sampled_from(get_args(KVDtype)), shapes, st.integers(-70, 70).filter(bool))
def test_a_wrong_size_is_refused(codec: Codec, dtype: KVDtype, shape: Shape, difference: int) -> None:
    size = encoded_bytes(codec, shape, dtype)
    with pytest.raises(InvalidRequest, match=f"has {size} bytes"):
        decode(codec, bytes(max(0, size + difference)), shape, dtype)


@pytest.mark.parametrize("codec", [*QUANTISED, Codec.INT2])
@given(st.data())
def test_any_bytes_of_the_right_size_are_decoded(codec: Codec, data: st.DataObject) -> None:
    """What a peer sends may be nonsense, but no error and no warning of ours."""
    shape, dtype = data.draw(shapes), data.draw(st.sampled_from(get_args(KVDtype)))
    size = encoded_bytes(codec, shape, dtype)
    payload = np.random.default_rng(data.draw(st.integers(0, 999))).bytes(size)
    values = decode(codec, payload, shape, dtype)
    assert values.shape[:-1] == shape[:-1]
    with suppress(InvalidRequest):  # of the wrong size for rows
        decode(Codec.RAW, payload, shape, data.draw(st.sampled_from(["int8", "fp8"])), "bfloat16")


@pytest.mark.parametrize("codec", Codec)
def test_values_may_be_signed_and_need_not_be_contiguous(codec: Codec) -> None:
    bits = bits_of(np.random.default_rng(0).standard_normal((4, 2, 3, 20, 16)), "bfloat16")
    part = bits.view(np.int16)[::2, :, 1:, ::3]
    assert bytes(encode(codec, part, "bfloat16")) == bytes(encode(codec, part.view(np.uint16).copy(), "bfloat16"))


@pytest.mark.parametrize("codec", SIZED)
@pytest.mark.parametrize("offset", [0, 1])  # an odd address
def test_a_payload_is_put_where_it_is_wanted(codec: Codec, offset: int) -> None:
    bits = bits_of(np.random.default_rng(0).standard_normal((2, 2, 3, 20, 16)), "bfloat16")
    expected = bytes(encode(codec, bits, "bfloat16"))
    memory = bytearray(len(expected) + 2)
    room = memoryview(memory)[offset : offset + len(expected)]
    assert bytes(encode(codec, bits, "bfloat16", room)) == expected
    assert memory == bytes(offset) + expected + bytes(2 - offset)
    assert (decode(codec, room, bits.shape, "bfloat16") == decode(codec, expected, bits.shape, "bfloat16")).all()


@pytest.mark.parametrize("codec", LOSSLESS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("to", DTYPES)
def test_a_lossless_codec_gives_back_every_bit(codec: Codec, dtype: KVDtype, to: KVDtype) -> None:
    bits = bits_of(np.random.default_rng(0).uniform(1, 1.5, (2, 2, 3, 64, 16)), dtype)
    payload = encode(codec, bits, dtype)
    assert payload.nbytes < bits.nbytes
    expected = decode(Codec.RAW, encode(Codec.RAW, bits, dtype), bits.shape, dtype, to)
    assert (decode(codec, payload, bits.shape, dtype, to) == expected).all()
    with pytest.raises(InvalidRequest, match="smaller than raw"):
        decode(codec, bytes(bits.nbytes), bits.shape, dtype)


@pytest.mark.parametrize("codec", LOSSLESS)
@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_rows_are_compressed_where_they_repeat(codec: Codec, name: KVDtype) -> None:
    bits = bits_of(np.random.default_rng(0).integers(1, 3, (2, 2, 3, 64, 16)).astype(np.float32), "bfloat16")
    rows = decode(Codec.RAW, encode(Codec.RAW, bits, "bfloat16"), bits.shape, "bfloat16", name)
    payload = encode(codec, rows, name)
    assert payload.nbytes < rows.nbytes
    assert (decode(codec, payload, bits.shape, name) == rows).all()
    assert (decode(codec, payload, bits.shape, name, "bfloat16") == bits).all()


@pytest.mark.parametrize("codec", LOSSLESS)
@given(st.binary(max_size=3000), st.sampled_from(DTYPES))
def test_any_bytes_are_decompressed_or_refused(codec: Codec, payload: bytes, dtype: KVDtype) -> None:
    shape = (1, 2, 1, 64, 16)
    with suppress(DataLoss, InvalidRequest):
        assert decode(codec, payload, shape, dtype).shape == shape


def test_ratios_of_a_known_model() -> None:
    shape = (30, 2, 3, 128, 64)  # SmolLM2-135M
    ratios = {
        codec.name: encoded_bytes(Codec.RAW, shape, "bfloat16") / encoded_bytes(codec, shape, "bfloat16")
        for codec in SIZED
    }
    assert {name: round(ratio, 2) for name, ratio in ratios.items()} == {
        "RAW": 1.0,
        "INT8": 1.94,
        "INT4": 3.2,
        "FP8": 1.94,
        "INT2": 5.69,
    }


def test_a_codec_that_gains_nothing_is_not_used() -> None:
    assert gainful(Codec.INT8, (30, 2, 3, 128, 64), "bfloat16") is Codec.INT8
    assert gainful(Codec.INT4, (30, 2, 3, 128, 64), "bfloat16") is Codec.INT4
    assert gainful(Codec.INT4, (30, 2, 3, 1, 64), "bfloat16") is Codec.RAW  # one token: two parameters for each value
    assert gainful(Codec.INT4, (30, 2, 3, 1, 64), "float32") is Codec.INT4
    assert gainful(Codec.INT8, (30, 2, 3, 128, 2), "bfloat16") is Codec.RAW
    assert gainful(Codec.INT8, (30, 2, 3, 128, 64), "int8") is Codec.RAW
    assert gainful(Codec.INT8, (30, 2, 3, 128, 64), "fp8") is Codec.RAW
    assert gainful(Codec.RAW, (1, 2, 1, 1, 1), "float16") is Codec.RAW


@pytest.mark.parametrize(("sent", "kept"), [("int8", "fp8"), ("fp8", "int8")])
def test_rows_of_one_code_become_rows_of_the_other(sent: KVDtype, kept: KVDtype) -> None:
    """As if their numbers had been written out in float32 and rounded."""
    bits = bits_of(np.random.default_rng(0).standard_normal((2, 2, 3, 20, 16)), "bfloat16")
    rows = decode(Codec.RAW, encode(Codec.RAW, bits, "bfloat16"), bits.shape, "bfloat16", sent)
    raw = encode(Codec.RAW, rows, sent)
    numbers = encode(Codec.RAW, decode(Codec.RAW, raw, bits.shape, sent, "float32"), "float32")
    got, want = (
        decode(Codec.RAW, payload, bits.shape, dtype, kept) for payload, dtype in ((raw, sent), (numbers, "float32"))
    )
    assert (got == want).all()


def test_rows_of_fp8_stay_as_they_are_by_way_of_bfloat16() -> None:
    bits = bits_of(np.random.default_rng(0).standard_normal((2, 2, 3, 400, 16)), "float32")
    rows = decode(Codec.RAW, encode(Codec.RAW, bits, "float32"), bits.shape, "float32", "fp8")
    there = decode(Codec.RAW, encode(Codec.RAW, rows, "fp8"), bits.shape, "fp8", "bfloat16")
    back = decode(Codec.RAW, encode(Codec.RAW, there, "bfloat16"), bits.shape, "bfloat16", "fp8")
    numbers = [decode(Codec.RAW, encode(Codec.RAW, one, "fp8"), bits.shape, "fp8", "float32") for one in (rows, back)]
    assert (numbers[0] == numbers[1]).all()
