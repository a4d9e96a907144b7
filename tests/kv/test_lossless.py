"""Exact compression: every bit comes back, KV shrinks, and damage is told."""

from __future__ import annotations

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.errors import DataLoss, Incompatible
from halfmoon.kv.codec.lossless import Lossless, compress, compress_planes, decompress, decompress_planes

METHODS = [Lossless.LZ4, Lossless.ZSTD]
SHAPES = st.tuples(st.integers(1, 3), st.just(2), st.integers(1, 2), st.integers(1, 9), st.integers(1, 8))


@given(st.data(), SHAPES, st.sampled_from([2, 4]), st.sampled_from(list(Lossless)))
def test_planes_come_back_bit_by_bit(
    data: st.DataObject, shape: tuple[int, ...], item_bytes: int, method: Lossless
) -> None:
    num_bytes = int(np.prod(shape)) * item_bytes
    values = data.draw(st.binary(min_size=num_bytes, max_size=num_bytes))
    packed = compress_planes(values, shape, item_bytes, method)
    assert decompress_planes(packed, shape, item_bytes, method).tobytes() == values


@given(st.binary(max_size=300), st.sampled_from(list(Lossless)))
def test_bytes_come_back(data: bytes, method: Lossless) -> None:
    assert bytes(decompress(compress(data, method), len(data), method)) == data


def channels(shape: tuple[int, ...]) -> bytes:
    """bfloat16 numbers of which each channel has its own magnitude and sign, as keys and values have."""
    random = np.random.default_rng(3)
    scale = random.lognormal(0, 2, (*shape[:3], 1, shape[4])) * random.choice([-1, 1], (*shape[:3], 1, shape[4]))
    values = (scale * (1 + 0.2 * random.standard_normal(shape))).astype(np.float32)
    return bytes((values.view(np.uint32) >> 16).astype("<u2").tobytes())


@pytest.mark.parametrize(("method", "least"), [(Lossless.LZ4, 1.2), (Lossless.ZSTD, 1.4)])
def test_what_resembles_kv_shrinks_more_than_it_does_whole(method: Lossless, least: float) -> None:
    shape = (4, 2, 2, 64, 64)
    values = channels(shape)
    planes = len(compress_planes(values, shape, 2, method))
    assert len(values) / planes > least
    assert planes < len(compress(values, method))


@pytest.mark.parametrize("method", METHODS)
@given(st.data())
def test_damage_is_data_loss_or_other_bytes_of_the_same_size(method: Lossless, data: st.DataObject) -> None:
    shape = (1, 2, 1, 16, 8)
    packed = bytearray(compress_planes(channels(shape), shape, 2, method))
    kept = data.draw(st.integers(0, len(packed)))
    flipped = data.draw(st.integers(0, len(packed) - 1))
    packed[flipped] ^= data.draw(st.integers(1, 255))
    try:
        got = decompress_planes(bytes(packed[:kept]), shape, 2, method)
    except DataLoss:
        return
    assert got.size == len(channels(shape))


def test_what_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr("halfmoon.kv.codec.lossless.import_module", absent)
    with pytest.raises(Incompatible, match=r"zstandard is not installed: halfmoon\[kvstore\]"):
        compress(b"x", Lossless.ZSTD)


def test_a_payload_that_would_become_huge_is_refused() -> None:
    """zstd makes room for what a payload says of itself, whatever limit it is given."""
    with pytest.raises(DataLoss, match="another size"):
        decompress(zstandard.compress(bytes(1 << 24)), 1000, Lossless.ZSTD)
