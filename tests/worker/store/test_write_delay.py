"""Blocks for the store wait for a busy engine, but never so long that they could be lost."""

from __future__ import annotations

from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from halfmoon.background import running
from halfmoon.engine.engine_stats import QUIET_S, EngineStats
from halfmoon.engine.step_result import BlockChain
from halfmoon.policy.models.latency import PrefillModel
from halfmoon.worker.metrics import WorkerMetrics
from halfmoon.worker.store.chain_queue import ChainQueue
from halfmoon.worker.store.source_links import SourceLinks
from halfmoon.worker.store.store_writer import StoreWriter
from halfmoon.worker.store.write_delay import is_computing, may_wait
from tests.worker.test_handover import until

COUNTS = st.integers(0, 3)


def stats_of(num_running: int = 0, num_waiting: int = 0, num_paused: int = 0, num_free: int = 100) -> EngineStats:
    return EngineStats(100, num_free, 0, num_running, num_waiting, 0, 0, 0, num_paused)


@given(st.integers(0, 100), st.floats(0, 4), st.floats(0, 20), st.integers(0, 60), st.booleans())
def test_it_waits_only_for_a_busy_engine_for_a_while_and_while_nothing_can_be_evicted(
    free: int, idle_s: float, waited_s: float, loose: int, is_half_full: bool
) -> None:
    if may_wait(stats_of(num_free=free), idle_s, waited_s, 10.0, loose, is_half_full=is_half_full):
        assert idle_s < QUIET_S
        assert waited_s < 10.0
        assert free - loose >= loose, "as many others are evicted before"
        assert not is_half_full
    elif waited_s < 10.0 and 2 * loose <= free and not is_half_full:
        assert idle_s >= QUIET_S


@given(COUNTS, COUNTS, COUNTS)
def test_an_engine_with_any_request_computes(num_running: int, num_waiting: int, num_paused: int) -> None:
    assert is_computing(stats_of(num_running, num_waiting, num_paused)) == bool(num_running + num_waiting + num_paused)


class Busy:
    """An engine that computes until it is told otherwise."""

    def __init__(self) -> None:
        self.stats, self.num_looks = stats_of(num_running=1), 0

    def stats_now(self) -> EngineStats:
        self.num_looks += 1
        return self.stats


def writer(engine: Busy, queue: ChainQueue, metrics: WorkerMetrics, *running_ids: str) -> StoreWriter:
    """Without any store, so that what it would put counts as failed."""
    return StoreWriter(
        cast(Any, engine), SourceLinks(), queue, metrics.store, PrefillModel, running_ids.__contains__, 10.0
    )


def num_put(metrics: WorkerMetrics) -> float:
    return float(metrics.registry.get_sample_value("halfmoon_store_put_blocks_total", {"outcome": "failed"}) or 0)


async def test_nothing_is_written_beside_an_engine_that_computes_before_the_worker_ends() -> None:
    engine, queue, metrics = Busy(), ChainQueue(clock=lambda: 0.0), WorkerMetrics()
    queue.offer([BlockChain("a", (b"1", b"2"))])
    async with running(writer(engine, queue, metrics, "a").run()):
        await until(lambda: engine.num_looks >= 3)
        assert num_put(metrics) == 0
        queue.offer([BlockChain("a", (b"1", b"2", b"3")), BlockChain("b", (b"4",))])
        engine.stats = stats_of()
        await queue.settled()
        assert num_put(metrics) == 4, "the newest chain of each"


async def test_an_engine_that_has_just_computed_is_not_idle_yet() -> None:
    now_s = [0.0]
    engine, queue, metrics = Busy(), ChainQueue(clock=lambda: now_s[0]), WorkerMetrics()
    engine.stats = stats_of()
    queue.offer([BlockChain("a", (b"1",))])
    async with running(writer(engine, queue, metrics).run()):
        await until(lambda: engine.num_looks >= 3)
        assert num_put(metrics) == 0, "a chain was offered a moment ago"
        now_s[0] = QUIET_S
        await until(lambda: num_put(metrics) == 1)


async def test_a_busy_engine_is_not_waited_for_for_ever() -> None:
    now_s = [0.0]
    engine, queue, metrics = Busy(), ChainQueue(clock=lambda: now_s[0]), WorkerMetrics()
    queue.offer([BlockChain("a", (b"1",))])
    now_s[0] = 6.0
    queue.offer([BlockChain("a", (b"1", b"2")), BlockChain("b", (b"3",))])
    async with running(writer(engine, queue, metrics, "a", "b").run()):
        await until(lambda: engine.num_looks >= 3)
        now_s[0] = 11.0
        await until(lambda: num_put(metrics) == 2)
        assert queue.waited_s == 5.0
        assert queue.num_blocks(lambda request_id: request_id == "b") == 1
    assert num_put(metrics) == 2, "the other one has waited for 5 s"


async def test_blocks_that_could_be_evicted_are_written_at_once() -> None:
    engine, queue, metrics = Busy(), ChainQueue(), WorkerMetrics()
    engine.stats = stats_of(num_running=1, num_free=3)
    queue.offer([BlockChain("a", (b"1", b"2"))])
    async with running(writer(engine, queue, metrics).run()):
        await until(lambda: num_put(metrics) == 2)
