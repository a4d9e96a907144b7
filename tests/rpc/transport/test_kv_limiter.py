"""A limited link takes as long as its rate and delay say, by a clock that the test holds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.kv.frame import KVRange
from halfmoon.kv.kv_layout import KVLayout
from halfmoon.rpc.transfer import transfer_to
from halfmoon.rpc.transport.limiter import LinkLimiter
from halfmoon.rpc.transport.link import LinkSettings
from tests.rpc.transport.conftest import ends

MB = 1_000_000


@pytest.mark.parametrize("mbps", [10, 50, 100, 200])
@pytest.mark.parametrize("delay_ms", [0, 20])
def test_a_burst_takes_its_bytes_over_the_rate_and_one_delay(mbps: int, delay_ms: int) -> None:
    limiter = LinkLimiter(mbps * MB, delay_ms / 1e3)
    arrivals_s = [limiter.arrival_s(MB, now_s=5.0) for _ in range(100)]
    assert arrivals_s == pytest.approx([5.0 + delay_ms / 1e3 + (n + 1) / mbps for n in range(100)])


def test_an_idle_link_starts_again_at_once() -> None:
    limiter = LinkLimiter(10 * MB, 0.01)
    assert limiter.arrival_s(MB, 0.0) == pytest.approx(0.11)
    assert limiter.arrival_s(MB, 0.05) == pytest.approx(0.21)
    assert limiter.arrival_s(MB, 9.0) == pytest.approx(9.11)


def test_a_delay_alone_limits_no_rate() -> None:
    limiter = LinkLimiter(None, 0.5)
    assert [limiter.arrival_s(1 << 30, 1.0) for _ in range(3)] == [1.5] * 3


@given(st.lists(st.tuples(st.integers(0, 5 * MB), st.floats(0, 2)), min_size=1, max_size=30))
def test_no_more_than_the_rate_arrives_and_never_out_of_order(sends: list[tuple[int, float]]) -> None:
    limiter, now_s, arrivals = LinkLimiter(10 * MB, 0.1), 0.0, []
    for num_bytes, pause_s in sends:
        now_s += pause_s
        arrivals.append((num_bytes, limiter.arrival_s(num_bytes, now_s)))
    times_s = [at_s for _, at_s in arrivals]
    assert times_s == sorted(times_s)
    for first in range(len(arrivals)):
        for last in range(first + 1, len(arrivals)):
            num_bytes = sum(size for size, _ in arrivals[first + 1 : last + 1])
            assert times_s[last] - times_s[first] >= num_bytes / (10 * MB) - 1e-9


class _Clock:
    """Time that passes only where the sender sleeps, and everything that it slept."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def time(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now_s += seconds


@pytest.mark.parametrize("transports", [(), ("shm",)], ids=["grpc", "shm"])
@pytest.mark.parametrize("mbps", [10, 200])
async def test_a_transfer_over_a_limited_link_takes_what_the_limit_says(transports: tuple[str, ...], mbps: int) -> None:
    layout = KVLayout(20, 1, 64, "float32", 64)
    clock = _Clock()
    # room for everything at once: credits come in real time, which this clock does not know
    settings = LinkSettings(transports=transports, window_bytes=128 << 20, bytes_per_s=mbps * MB, delay_s=0.02)
    async with ends(settings) as it:
        it.sink.layout = layout
        it.link.clock = clock
        async with transfer_to(it.link, layout, deadline_s=60) as transfer:
            await transfer.open(KVRange(0, 20, 0, 1, 0, 2048), b"1")
            for layer in range(20):
                await transfer.data(KVRange(layer, layer + 1, 0, 1, 0, 2048), bytes(1 << 20))
            await transfer.commit(b"")
        assert clock.now_s - 100.0 == pytest.approx(20 * (1 << 20) / (mbps * MB) + 2 * 0.02, rel=0.01)
