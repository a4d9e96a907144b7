"""Which codec brings KV over a link soonest."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from halfmoon.kv.codec.names import Codec

_LEAST_GAIN = 0.1  # what a codec must save of the time of the next simpler one: it takes CPU time from other work


class CodecCost(NamedTuple):
    """What a codec does to KV, per byte of raw KV."""

    ratio: float  # encoded bytes
    encode_s: float
    decode_s: float


def quickest_codec(link_s_per_byte: float, costs: Mapping[Codec, CodecCost], allowed: Collection[Codec]) -> Codec:
    """The codec with the least time per byte, in which encoding, the link and decoding overlap: the slowest counts.

    Exact ones come before others, RAW before all; a later one must save at least a tenth of the time.
    """
    best, best_s = Codec.RAW, link_s_per_byte
    for codec in sorted(set(allowed) & set(costs), key=lambda one: (not one.is_exact, one)):
        cost = costs[codec]
        seconds = max(cost.encode_s, cost.ratio * link_s_per_byte, cost.decode_s)
        if seconds < best_s * (1 - _LEAST_GAIN):
            best, best_s = codec, seconds
    return best
