"""A worker that is told to go: at once, or when it has finished what it accepted."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from halfmoon.pb import gateway_pb2
from halfmoon.worker.metrics import WorkerMetrics
from halfmoon.worker.serving import Serving
from halfmoon.worker.serving_engine import ServingEngine
from halfmoon.worker.state import WorkerState

NOBODY = "127.0.0.1:1"  # a gateway that is away


class BusyEngine:
    """Has requests until it is told otherwise; notes that it was asked often."""

    def __init__(self) -> None:
        self.num_running = 1
        self.num_asked = 0
        self.was_asked_often = asyncio.Event()

    def stats_now(self) -> Any:
        self.num_asked += 1
        if self.num_asked == 3:
            self.was_asked_often.set()
        return SimpleNamespace(num_running=self.num_running, num_waiting=0, num_reserved=0, num_held=0, num_paused=0)


class Worker:
    """Serves an engine that has requests; told to go by its futures."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.engine = BusyEngine()
        self.state = WorkerState(gateway_pb2.WorkerIdentity(), cast(Any, None), WorkerMetrics())
        self.stopping: asyncio.Future[None] = loop.create_future()
        self.retiring: asyncio.Future[None] = loop.create_future()
        engine = cast(ServingEngine, self.engine)
        self.serving = Serving(engine, self.state, gateway_pb2.WorkerLoad, loop.create_future())
        work = self.serving.until_stopped(NOBODY, 0.0, self.stopping, self.retiring)
        self.life = asyncio.create_task(work)

    async def retire(self) -> None:
        """And sees that its requests keep it."""
        self.retiring.set_result(None)
        await self.engine.was_asked_often.wait()
        assert self.state.draining
        assert not self.life.done()


async def test_who_retires_finishes_what_it_has_accepted() -> None:
    worker = Worker()
    await worker.retire()
    worker.engine.num_running = 0
    await asyncio.wait_for(worker.life, 60)


@pytest.mark.parametrize("returns", [True, False])
async def test_an_operator_lets_it_finish_and_end(returns: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    worker = Worker()
    await asyncio.sleep(0)
    worker.serving.drain(returns)
    worker.serving.drain(not returns)
    await worker.engine.was_asked_often.wait()
    assert not worker.life.done()
    worker.engine.num_running = 0
    await asyncio.wait_for(worker.life, 60)
    assert worker.serving.returns == returns
    (drained,) = [record for record in caplog.records if record.message == "worker.drained"]
    assert vars(drained)["returns"] == returns


async def test_a_call_that_the_engine_does_not_know_of_is_finished(caplog: pytest.LogCaptureFixture) -> None:
    worker = Worker()
    worker.engine.num_running = 0
    with worker.state.working():
        worker.retiring.set_result(None)
        await worker.engine.was_asked_often.wait()
        assert not worker.life.done()
    await asyncio.wait_for(worker.life, 60)


async def test_who_is_told_to_stop_meanwhile_does_not() -> None:
    worker = Worker()
    await worker.retire()
    worker.stopping.set_result(None)
    await asyncio.wait_for(worker.life, 60)
    assert worker.engine.num_running


async def test_who_is_told_to_stop_does_not_wait() -> None:
    worker = Worker()
    worker.stopping.set_result(None)
    await asyncio.wait_for(worker.life, 60)
    assert worker.state.draining
