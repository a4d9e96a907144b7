"""Which codec a worker takes for a link: by what both were measured at, and not for good."""

from __future__ import annotations

import threading
from collections.abc import Collection

import pytest

from halfmoon.kv.codec import Codec
from halfmoon.kv.codec.choice import CodecCost
from halfmoon.kv.kv_layout import KVLayout
from halfmoon.rpc.transport.estimate import LinkEstimator
from halfmoon.worker.handover import link_codecs
from halfmoon.worker.handover.link_codecs import LinkCodecs

LAYOUT = KVLayout(2, 2, 16, "bfloat16", 8)


def measured(s_per_byte: float) -> LinkEstimator:
    """The estimate of a link after one transfer."""
    estimator = LinkEstimator()
    estimator.sent(1_000_000, 0.0)
    estimator.consumed(1_000_000, 1_000_000 * s_per_byte)
    return estimator


@pytest.fixture
async def codecs(monkeypatch: pytest.MonkeyPatch) -> LinkCodecs:
    """zstd takes 2 ns a byte to encode and leaves two thirds; lz4 leaves all."""
    costs = {Codec.ZSTD: CodecCost(0.67, 2e-9, 1e-9), Codec.LZ4: CodecCost(1.0, 1e-9, 1e-9)}
    monkeypatch.setattr(link_codecs, "measured_costs", lambda layout, wanted: {codec: costs[codec] for codec in wanted})
    codecs = LinkCodecs(LAYOUT)
    await codecs.measure()
    return codecs


async def test_nobody_waits_until_codecs_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    may_end, num_measured = threading.Event(), 0

    def measured_costs(layout: KVLayout, wanted: Collection[Codec]) -> dict[Codec, CodecCost]:
        nonlocal num_measured
        num_measured += 1
        may_end.wait()
        return {codec: CodecCost(0.5, 1e-9, 1e-9) for codec in wanted}

    monkeypatch.setattr(link_codecs, "measured_costs", measured_costs)
    codecs, raw = LinkCodecs(LAYOUT), measured(1e-6)
    assert [codecs.choose(raw) for _ in range(3)] == [(Codec.RAW, "measuring")] * 3
    may_end.set()
    assert codecs._measuring is not None
    await codecs._measuring
    assert codecs.choose(raw)[1] == "quickest"
    assert num_measured == 1


async def test_a_link_that_was_not_measured_has_raw_kv(codecs: LinkCodecs) -> None:
    assert [codecs.choose(LinkEstimator()) for _ in range(3)] == [(Codec.RAW, "measuring")] * 3


@pytest.mark.parametrize(("mbps", "codec"), [(50, Codec.ZSTD), (200, Codec.ZSTD), (1000, Codec.RAW)])
async def test_a_slow_link_has_a_codec_but_for_one_transfer_in_sixteen(
    codecs: LinkCodecs, mbps: float, codec: Codec
) -> None:
    raw = measured(1 / mbps / 1e6)
    chosen = [codecs.choose(raw) for _ in range(32)]
    assert chosen == [(Codec.RAW, "measuring"), *[(codec, "quickest")] * 15] * 2


async def test_a_codec_that_was_slower_than_raw_kv_is_tried_now_and_then(codecs: LinkCodecs) -> None:
    """On a link of 3 ns a byte it should have taken 2, and took 5: both ends are busy."""
    raw, coded = measured(3e-9), {Codec.ZSTD: measured(5e-9)}
    chosen = [(codecs.choose(raw, coded=coded))[0] for _ in range(32)]
    assert [number for number, codec in enumerate(chosen) if codec is Codec.ZSTD] == [8, 24]
    assert (codecs.choose(measured(3e-9), coded={Codec.ZSTD: measured(2.2e-9)}))[0] is Codec.RAW, "the first"
    quick = measured(3e-9)
    chosen = [(codecs.choose(quick, coded={Codec.ZSTD: measured(2.2e-9)}))[0] for _ in range(3)]
    assert chosen == [Codec.RAW, Codec.ZSTD, Codec.ZSTD]
