"""How KV values are encoded as bytes, one file per codec. numpy and bytes only.

Values come and go in the canonical order `[layers, 2 (K, V), heads, tokens, head_dim]`, as integers that hold the bits
of a dtype, because numpy has no bfloat16; of the dtypes int8 and fp8 a row has two more, its scale. Each codec's file
says what becomes of NaN, infinities and huge numbers; RAW keeps them, and saturates when the dtype has to change to
float16.

Read in this order: names, floats, scaled_rows, groups, int4, int2, lossless.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from halfmoon.errors import InvalidRequest
from halfmoon.kv.codec import int2, int4, scaled_rows
from halfmoon.kv.codec.floats import UNSIGNED, Bits, convert
from halfmoon.kv.codec.lossless import Lossless, compress_planes, decompress_planes, is_installed
from halfmoon.kv.codec.names import Codec
from halfmoon.kv.codec.scaled_rows import ScaledRows
from halfmoon.kv.kv_layout import KVBytes, KVDtype, row_items

__all__ = ["LOSSLESS", "Codec", "check_size", "decodable", "decode", "encode", "encoded_bytes", "gainful"]

Shape = tuple[int, ...]  # [layers, 2, heads, tokens, head_dim], none of them 0


class _Quantiser(Protocol):
    """What each codec's module provides. Encodings are independent of the dtype: any dtype can be decoded to."""

    def encoded_bytes(self, shape: Shape) -> int: ...
    def encode(self, bits: Bits, dtype: KVDtype, payload: NDArray[np.uint8]) -> None: ...
    def decode(self, payload: KVBytes, shape: Shape, dtype: KVDtype) -> Bits: ...


_ROWS: dict[KVDtype, ScaledRows] = {"int8": scaled_rows.INT8, "fp8": scaled_rows.FP8}
_QUANTISERS: dict[Codec, _Quantiser] = {
    Codec.INT8: scaled_rows.INT8,
    Codec.INT4: int4,
    Codec.FP8: scaled_rows.FP8,
    Codec.INT2: int2,
}

LOSSLESS: dict[Codec, Lossless] = {Codec.LZ4: Lossless.LZ4, Codec.ZSTD: Lossless.ZSTD}
"""Codecs whose size is known only from what they encode."""


def decodable() -> frozenset[Codec]:
    """The codecs of transfers that this process can decode: LZ4 and ZSTD need packages."""
    return frozenset(
        codec for codec in Codec if codec is not Codec.INT2 and (codec not in LOSSLESS or is_installed(LOSSLESS[codec]))
    )


def check_size(codec: Codec, num_bytes: int, shape: Shape, dtype: KVDtype) -> None:
    """Raises InvalidRequest unless a payload of `num_bytes` may hold values of `shape`."""
    if codec in LOSSLESS:
        if not 0 < num_bytes < encoded_bytes(Codec.RAW, shape, dtype):
            raise InvalidRequest(
                f"a KV payload of {shape} in {codec.name} is smaller than raw, this one has {num_bytes}"
            )
    elif num_bytes != encoded_bytes(codec, shape, dtype):
        want = encoded_bytes(codec, shape, dtype)
        raise InvalidRequest(f"a KV payload of {shape} in {codec.name} has {want} bytes, this one {num_bytes}")


def encoded_bytes(codec: Codec, shape: Shape, dtype: KVDtype) -> int:
    """The exact size of what `encode` returns for values of this shape and dtype, unless `codec` is lossless."""
    if codec is Codec.RAW:
        return math.prod(_in_memory(shape, dtype)) * UNSIGNED[dtype].itemsize
    return _QUANTISERS[codec].encoded_bytes(shape)


def gainful(codec: Codec, shape: Shape, dtype: KVDtype) -> Codec:
    """`codec` if it makes these values smaller, else RAW: scales may outweigh few tokens or short rows."""
    if codec in LOSSLESS:
        return codec
    smaller = encoded_bytes(codec, shape, dtype) < encoded_bytes(Codec.RAW, shape, dtype)
    return codec if smaller else Codec.RAW


def encode(codec: Codec, values: NDArray[np.integer[Any]], dtype: KVDtype, out: memoryview | None = None) -> memoryview:
    """Encodes integers of the dtype's size, of either signedness, in canonical order and not empty.

    Fills `out`, which has exactly `encoded_bytes`, or else new memory; RAW without `out` returns a view where it can.
    Lossless codecs take no `out`. What they do not make smaller cannot be decoded: it is to be sent RAW.
    """
    assert values.ndim == 5, "the canonical order"
    assert values.shape[1] == 2, "the canonical order"
    bits = np.ascontiguousarray(values).view(UNSIGNED[dtype])
    if codec is Codec.RAW and out is None:
        return bits.reshape(-1).view(np.uint8).data
    if codec in LOSSLESS:
        assert out is None, "the size of what is compressed is not known before"
        raw = bits.reshape(-1).view(np.uint8).data
        return memoryview(compress_planes(raw, bits.shape, bits.itemsize, LOSSLESS[codec]))
    shape = (*bits.shape[:-1], bits.shape[-1] - row_items(0, dtype))
    num_bytes = encoded_bytes(codec, shape, dtype)
    payload = np.empty(num_bytes, np.uint8) if out is None else np.frombuffer(out, np.uint8)
    assert payload.size == num_bytes, "a payload has no room to spare"
    rows = _ROWS.get(dtype)
    if codec is Codec.RAW:
        np.copyto(payload, bits.reshape(-1).view(np.uint8))
    elif rows is None:
        _QUANTISERS[codec].encode(bits, dtype, payload)
    elif rows is _QUANTISERS[codec]:
        scaled_rows.from_rows(bits, payload)
    else:
        _QUANTISERS[codec].encode(rows.widen_rows(bits, "float32"), "float32", payload)
    return payload.data


def decode(codec: Codec, payload: KVBytes, shape: Shape, dtype: KVDtype, to: KVDtype | None = None) -> Bits:
    """Values of `shape` as unsigned integers that hold the bits of `to`, or else of `dtype`; codes as rows with scales.

    dtype: the dtype of the values when they were encoded. RAW without a change of dtype returns a view of `payload`.
    Raises InvalidRequest, before anything is allocated, unless `payload` has exactly `encoded_bytes`. Of lossless
    codecs: Incompatible without their package, DataLoss for what is not an encoding.
    """
    check_size(codec, memoryview(payload).nbytes, shape, dtype)
    to = to or dtype
    if codec is Codec.RAW or codec in LOSSLESS:
        if codec in LOSSLESS:
            raw_shape = _in_memory(shape, dtype)
            payload = decompress_planes(payload, raw_shape, np.dtype(UNSIGNED[dtype]).itemsize, LOSSLESS[codec]).data
        bits = np.frombuffer(payload, UNSIGNED[dtype]).reshape(_in_memory(shape, dtype))
        return bits if dtype == to else _converted(bits, dtype, to)
    rows = _ROWS.get(to)
    if rows is None:
        return _decoded(codec, payload, shape, to)
    if rows is _QUANTISERS[codec]:
        return scaled_rows.to_rows(payload, shape)
    return rows.round_rows(_decoded(codec, payload, shape, "float32"), "float32")


def _decoded(codec: Codec, payload: KVBytes, shape: Shape, to: KVDtype) -> Bits:
    with np.errstate(over="ignore", invalid="ignore"):  # the scales come from a peer
        return _QUANTISERS[codec].decode(payload, shape, to)


def _converted(bits: Bits, dtype: KVDtype, to: KVDtype) -> Bits:
    if dtype in _ROWS:
        if to not in _ROWS:
            return _ROWS[dtype].widen_rows(bits, to)
        bits, dtype = _ROWS[dtype].widen_rows(bits, "float32"), "float32"
    return _ROWS[to].round_rows(bits, dtype) if to in _ROWS else convert(bits, dtype, to)


def _in_memory(shape: Shape, dtype: KVDtype) -> Shape:
    return *shape[:-1], row_items(shape[-1], dtype)
