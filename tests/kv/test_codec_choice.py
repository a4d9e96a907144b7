"""The quickest codec is chosen, and a simpler one where that costs little."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.kv.codec import Codec
from halfmoon.kv.codec.choice import CodecCost, quickest_codec

COSTS = {
    Codec.LZ4: CodecCost(0.82, 1 / 0.6e9, 1 / 2.0e9),
    Codec.ZSTD: CodecCost(0.68, 1 / 0.5e9, 1 / 1.3e9),
    Codec.INT8: CodecCost(0.52, 1 / 1.4e9, 1 / 2.0e9),
}  # as measured in docs/log/kv.md
EXACT = {Codec.RAW, Codec.LZ4, Codec.ZSTD}


@pytest.mark.parametrize(
    ("mbps", "exact", "lossy"),
    [
        (50, Codec.ZSTD, Codec.INT8),
        (400, Codec.LZ4, Codec.INT8),
        (1_000, Codec.RAW, Codec.INT8),
        (3_000, Codec.RAW, Codec.RAW),
    ],
)
def test_what_links_of_several_speeds_get(mbps: float, exact: Codec, lossy: Codec) -> None:
    assert quickest_codec(1 / (mbps * 1e6), COSTS, EXACT) is exact
    assert quickest_codec(1 / (mbps * 1e6), COSTS, {*EXACT, Codec.INT8}) is lossy


def test_without_measurements_kv_is_raw() -> None:
    assert quickest_codec(1.0, {}, EXACT) is Codec.RAW


costs = st.builds(CodecCost, st.floats(0.1, 1.2), st.floats(0, 10), st.floats(0, 10))


@given(st.floats(0.01, 10), st.dictionaries(st.sampled_from(Codec), costs), st.frozensets(st.sampled_from(Codec)))
def test_it_is_allowed_and_at_most_a_tenth_slower_than_any_other(
    link_s: float, known: dict[Codec, CodecCost], allowed: frozenset[Codec]
) -> None:
    known.pop(Codec.RAW, None)

    def seconds(codec: Codec) -> float:
        cost = known.get(codec, CodecCost(1.0, 0.0, 0.0))
        return max(cost.encode_s, cost.ratio * link_s, cost.decode_s)

    chosen = quickest_codec(link_s, known, allowed)
    assert chosen is Codec.RAW or chosen in allowed
    assert seconds(chosen) <= link_s
    assert all(seconds(chosen) * 0.899 <= seconds(codec) for codec in allowed & known.keys())
