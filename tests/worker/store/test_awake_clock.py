"""A clock that stands still while the event loop does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from halfmoon.engine.checkpoint.checkpoint import Checkpoint
from halfmoon.worker.store.awake_clock import AwakeClock
from tests.rpc.store.test_kvstore_client import served
from tests.worker.conftest import RunningWorker
from tests.worker.store.test_restorer import PROMPT, SLOW, believe, stored
from tests.worker.store.test_store_writer import single
from tests.worker.test_handover import prefilled, reference

Start = Callable[..., Awaitable[RunningWorker]]


class Time:
    """What `time.monotonic` would say."""

    def __init__(self) -> None:
        self.s = 100.0

    def __call__(self) -> float:
        return self.s


def test_time_goes_on_while_nobody_waits() -> None:
    time = Time()
    clock = AwakeClock(time)
    began_s = clock.now_s()
    time.s += 7
    assert clock.now_s() - began_s == 7


def test_a_stop_in_a_wait_does_not_count() -> None:
    time = Time()
    clock = AwakeClock(time)
    began_s = clock.now_s()
    with clock.waiting(1.0):
        time.s += 0.5
        assert clock.now_s() - began_s == 0.5
        time.s += 60
        assert clock.now_s() - began_s == pytest.approx(1.05), "whoever is called back first sees no time either"
    assert clock.now_s() - began_s == pytest.approx(1.05)
    time.s += 2
    assert clock.now_s() - began_s == pytest.approx(3.05)


def test_one_stop_of_several_waits_is_counted_once() -> None:
    time = Time()
    clock = AwakeClock(time)
    began_s = clock.now_s()
    long, short = clock.waiting(5.0), clock.waiting(1.0)
    with long:
        with short:
            time.s += 61.05
        assert clock.now_s() - began_s == pytest.approx(1.05)
        time.s += 3
        assert clock.now_s() - began_s == pytest.approx(4.05)
    assert clock.now_s() - began_s == pytest.approx(4.05)


async def test_sources_are_not_slow_because_the_own_loop_stood_still(
    start_worker: Start, tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything waits for it, so that nothing arrives; all of it is there at the next look."""
    async with served() as (_, address):
        await stored(start_worker, tiny, address)
        worker = await start_worker("prefill", store=address)
        believe(worker, SLOW)
        time = Time()
        worker.restorer._clock = AwakeClock(time)
        real, num_stops = worker.async_engine.load_block, 0

        async def stopped(request_id: str, block: int, cells: memoryview) -> None:
            nonlocal num_stops
            num_stops += 1
            time.s += 3600  # the process was stopped, with loads on their way
            await asyncio.sleep(0)
            await real(request_id, block, cells)

        monkeypatch.setattr(worker.async_engine, "load_block", stopped)
        (first,) = await prefilled(worker, single(tiny, PROMPT))
        assert num_stops == 10
        assert [first.first_token.token.token_id] == reference(tiny, PROMPT, 1)
        assert first.first_token.num_loaded_tokens == 80
