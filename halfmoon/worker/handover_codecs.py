"""Chooses the encoding of each hand-over by what its link and the codecs were measured at."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Literal, TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from halfmoon.kv.codec import LOSSLESS, Codec, decodable, decode, encode
from halfmoon.kv.codec.choice import CodecCost, quickest_codec
from halfmoon.kv.codec.floats import UNSIGNED
from halfmoon.kv.kv_layout import KVLayout
from halfmoon.rpc.transport.link import KVLink

_SAMPLE_TOKENS = 128
_SAMPLE_BYTES = 1 << 20
_RAW_EVERY = 16  # hand-overs over a link: what raw KV takes on it must not be a matter of the past
_WEIGHT = 0.1  # of a new ratio
_NUM_RUNS = 4

T = TypeVar("T")

Reason = Literal["configured", "measuring", "quickest"]


class HandoverCodecs:
    """Owns what each codec costs on this machine. Links measure themselves.

    A link's first hand-overs are raw, until its speed is known, and so is one in sixteen later.
    """

    def __init__(self, layout: KVLayout) -> None:
        self._layout = layout
        self._costs: dict[Codec, CodecCost] = {}
        self._measuring = asyncio.Lock()
        self._num_chosen: WeakKeyDictionary[KVLink, int] = WeakKeyDictionary()

    async def choose(self, link: KVLink, lossiest: Codec) -> tuple[Codec, Reason]:
        """The codec of the next hand-over over `link`: RAW, a lossless one, or `lossiest`."""
        number = self._num_chosen.get(link, 0)
        self._num_chosen[link] = number + 1
        estimate = link.raw_estimator.estimate
        if estimate is None or not number % _RAW_EVERY:
            return Codec.RAW, "measuring"
        async with self._measuring:
            if not self._costs:
                self._costs = await asyncio.to_thread(measured_costs, self._layout)
        return quickest_codec(1 / estimate.bandwidth_bytes_per_s, self._costs, {*LOSSLESS, lossiest}), "quickest"

    def note_ratio(self, codec: Codec, raw_bytes: int, encoded_bytes: int) -> None:
        """Learns how small real KV became."""
        cost = self._costs.get(codec)
        if cost is not None:
            ratio = cost.ratio + _WEIGHT * (encoded_bytes / raw_bytes - cost.ratio)
            self._costs[codec] = cost._replace(ratio=ratio)


def measured_costs(layout: KVLayout) -> dict[Codec, CodecCost]:
    """Encodes and decodes made-up KV of about a frame in each codec; the quickest of a few runs counts."""
    num_layers = max(1, min(layout.num_layers, _SAMPLE_BYTES // (layout.token_layer_bytes * _SAMPLE_TOKENS)))
    shape = layout.shape(num_layers, _SAMPLE_TOKENS)
    rng = np.random.default_rng(0)
    channels = rng.lognormal(size=(num_layers, 2, layout.num_kv_heads, 1, layout.head_dim))  # differ in size
    values = (channels * rng.standard_normal(shape)).astype(np.float32)
    raw = encode(Codec.RAW, values.view(np.uint32), "float32")
    bits = decode(Codec.RAW, raw, shape, "float32", layout.dtype).view(UNSIGNED[layout.dtype])
    costs = {}
    for codec in decodable() - {Codec.RAW}:
        payload, encode_s = _timed(partial(encode, codec, bits, layout.dtype))
        if payload.nbytes < bits.nbytes:
            _, decode_s = _timed(partial(decode, codec, payload, shape, layout.dtype))
            costs[codec] = CodecCost(payload.nbytes / bits.nbytes, encode_s / bits.nbytes, decode_s / bits.nbytes)
    return costs


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    """The result of `work`, and the seconds of its quickest run."""
    times_s = []
    for _ in range(_NUM_RUNS):
        began_s = time.perf_counter()
        result = work()
        times_s.append(time.perf_counter() - began_s)
    return result, min(times_s)
