"""Chooses the encoding of each hand-over and each fetch by what its link and the codecs were measured at."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Literal, TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from halfmoon.kv.codec import LOSSLESS, Codec, decodable, decode, encode
from halfmoon.kv.codec.choice import CodecCost, quickest_codec
from halfmoon.kv.codec.floats import UNSIGNED
from halfmoon.kv.kv_layout import KVLayout
from halfmoon.rpc.transport.estimate import LinkEstimator

_SAMPLE_TOKENS = 128
_SAMPLE_BYTES = 1 << 20
_RAW_EVERY = 16  # transfers over a link: what raw KV takes on it must not be a matter of the past
_TRY_EVERY = 16  # and so for what codecs were measured to take there
_WEIGHT = 0.1  # of a new ratio
_NUM_RUNS = 4

T = TypeVar("T")

Reason = Literal["configured", "measuring", "quickest"]


class LinkCodecs:
    """Owns what each codec costs on this machine. Links measure themselves.

    A link's first transfers are raw, until its speed is known, and so is one in sixteen later.
    """

    def __init__(self, layout: KVLayout) -> None:
        self._layout = layout
        self._costs: dict[Codec, CodecCost] = {}
        self._measuring: asyncio.Task[None] | None = None
        self._num_chosen: WeakKeyDictionary[LinkEstimator, int] = WeakKeyDictionary()

    async def measure(self, codecs: Collection[Codec] = tuple(LOSSLESS)) -> None:
        """Measures what codecs cost here. Until then nothing travels in them."""
        self._costs |= await asyncio.to_thread(measured_costs, self._layout, codecs)

    def choose(
        self, raw: LinkEstimator, lossiest: Codec = Codec.RAW, coded: Mapping[Codec, LinkEstimator] | None = None
    ) -> tuple[Codec, Reason]:
        """The codec of the next transfer over a link: RAW, a lossless one, or `lossiest`.

        raw: the link's speed with raw KV; coded: its speed with codecs, in bytes of raw KV. What a codec took there
        counts if it is more than what it should take: both ends have other work. Codecs whose cost is not known are
        measured in the background, for later transfers.
        """
        allowed = {*LOSSLESS, lossiest} - {Codec.RAW}
        unknown = allowed - self._costs.keys()
        if unknown and (self._measuring is None or self._measuring.done()):
            self._measuring = asyncio.create_task(self.measure(unknown))
        number = self._num_chosen.get(raw, 0)
        self._num_chosen[raw] = number + 1
        estimate, costs = raw.estimate, self._costs
        if unknown or estimate is None or not number % _RAW_EVERY:
            return Codec.RAW, "measuring"
        if coded and (number + _TRY_EVERY // 2) % _TRY_EVERY:
            costs = {codec: _at_least(cost, coded.get(codec)) for codec, cost in costs.items()}
        return quickest_codec(1 / estimate.bandwidth_bytes_per_s, costs, allowed), "quickest"

    def note_ratio(self, codec: Codec, raw_bytes: int, encoded_bytes: int) -> None:
        """Learns how small real KV became."""
        cost = self._costs.get(codec)
        if cost is not None:
            ratio = cost.ratio + _WEIGHT * (encoded_bytes / raw_bytes - cost.ratio)
            self._costs[codec] = cost._replace(ratio=ratio)


def _at_least(cost: CodecCost, measured: LinkEstimator | None) -> CodecCost:
    """The cost of a codec, with what its slowest stage was measured to take."""
    estimate = None if measured is None else measured.estimate
    return cost if estimate is None else cost._replace(encode_s=max(cost.encode_s, 1 / estimate.bandwidth_bytes_per_s))


def measured_costs(layout: KVLayout, codecs: Collection[Codec]) -> dict[Codec, CodecCost]:
    """Encodes and decodes made-up KV of about a frame in each codec; the quickest of a few runs counts.

    Codecs that are not installed, or make it no smaller, cost more than raw KV over any link.
    """
    num_layers = max(1, min(layout.num_layers, _SAMPLE_BYTES // (layout.token_layer_bytes * _SAMPLE_TOKENS)))
    shape = layout.shape(num_layers, _SAMPLE_TOKENS)
    rng = np.random.default_rng(0)
    channels = rng.lognormal(size=(num_layers, 2, layout.num_kv_heads, 1, layout.head_dim))  # differ in size
    values = (channels * rng.standard_normal(shape)).astype(np.float32)
    raw = encode(Codec.RAW, values.view(np.uint32), "float32")
    bits = decode(Codec.RAW, raw, shape, "float32", layout.dtype).view(UNSIGNED[layout.dtype])
    costs = dict.fromkeys(codecs, CodecCost(1.0, 0.0, 0.0))
    for codec in decodable() & set(codecs):
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
