"""Exact compression of KV: entropy coding by byte planes of raw values, or of a quantiser's output.

A float's mantissa is noise to lz4 and zstd; its sign and exponent are not. The highest byte of each value goes to a
plane of its own, channel-major (the tokens of one channel side by side, which resemble each other), and only that plane
is compressed.

    bytes                      content
    the rest                   the high plane, [layers, 2, heads, head_dim, tokens], compressed
    values * (item_bytes - 1)  the other bytes of each value, canonical order, as they are

Pass at least 64 tokens of all layers at once: small pieces do not compress. Needs the packages lz4 and zstandard (`pip
install halfmoon[kvstore]`).
"""

from __future__ import annotations

import math
from enum import IntEnum
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from halfmoon.errors import DataLoss, Incompatible
from halfmoon.kv.kv_layout import KVBytes

_ZSTD_LEVEL = 1  # 1.5x on the high plane; higher levels gain little and cost much


class Lossless(IntEnum):
    """Method numbers as they are stored. Never reused, never renumbered."""

    NONE = 0
    LZ4 = 1
    ZSTD = 2


def compress_planes(values: KVBytes, shape: tuple[int, ...], item_bytes: int, method: Lossless) -> bytes:
    """Compresses raw KV of `shape` [layers, 2, heads, tokens, head_dim] in little-endian items, as the module says."""
    cells = np.frombuffer(values, np.uint8).reshape(*shape, item_bytes)
    high = np.ascontiguousarray(cells[..., -1].swapaxes(-1, -2))
    return compress(high.data.cast("B"), method) + cells[..., :-1].tobytes()


def decompress_planes(payload: KVBytes, shape: tuple[int, ...], item_bytes: int, method: Lossless) -> NDArray[np.uint8]:
    """Input of `compress_planes`, [values * item_bytes]. Raises DataLoss if `payload` is not its result."""
    num_values = math.prod(shape)
    view = memoryview(payload).cast("B")
    high_bytes = view.nbytes - num_values * (item_bytes - 1)
    if high_bytes <= 0:
        raise DataLoss("a compressed KV payload is cut short")
    high = np.frombuffer(decompress(view[:high_bytes], num_values, method), np.uint8)
    cells = np.empty((*shape, item_bytes), np.uint8)
    cells[..., -1] = high.reshape(*shape[:-2], shape[-1], shape[-2]).swapaxes(-1, -2)
    cells[..., :-1] = np.frombuffer(view[high_bytes:], np.uint8).reshape(*shape, item_bytes - 1)
    return cells.reshape(-1)


def compress(data: KVBytes, method: Lossless) -> bytes:
    """Compresses any bytes. Raises Incompatible if the method's package is not installed."""
    if method is Lossless.LZ4:
        packed: bytes = _module("lz4.block").compress(data, store_size=False)
    elif method is Lossless.ZSTD:
        packed = _module("zstandard").ZstdCompressor(level=_ZSTD_LEVEL, write_content_size=False).compress(data)
    else:
        packed = bytes(data)
    return packed


def decompress(data: KVBytes, num_bytes: int, method: Lossless) -> KVBytes:
    """Input of `compress`, which had `num_bytes`. Raises DataLoss if `data` does not decompress to that."""
    if method is Lossless.NONE:
        unpacked: KVBytes = data
    else:
        package = _module("lz4.block" if method is Lossless.LZ4 else "zstandard")
        failure = package.LZ4BlockError if method is Lossless.LZ4 else package.ZstdError
        try:
            if method is Lossless.ZSTD and package.frame_content_size(data) not in (-1, num_bytes):
                raise DataLoss("a compressed KV payload says another size than it should have")  # and would have it
            if method is Lossless.LZ4:
                unpacked = package.decompress(data, uncompressed_size=num_bytes)
            else:
                unpacked = package.ZstdDecompressor().decompress(data, max_output_size=max(1, num_bytes))
        except failure as err:
            raise DataLoss(f"a compressed KV payload does not decompress: {err}") from err
    if memoryview(unpacked).nbytes != num_bytes:
        raise DataLoss("a compressed KV payload decompresses to another size than it had")
    return unpacked


def is_installed(method: Lossless) -> bool:
    """Whether the method's package is there."""
    return method is Lossless.NONE or find_spec("lz4" if method is Lossless.LZ4 else "zstandard") is not None


def _module(name: str) -> ModuleType:
    try:
        return import_module(name)
    except ImportError as err:
        raise Incompatible(f"the package {name.partition('.')[0]} is not installed: halfmoon[kvstore] has it") from err
