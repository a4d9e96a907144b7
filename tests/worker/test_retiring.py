"""A worker that is told to go: at once, or when it has finished what it accepted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from prometheus_client import CollectorRegistry

from halfmoon.pb import gateway_pb2, gateway_pb2_grpc
from halfmoon.rpc.server import running_server
from halfmoon.rpc.telemetry.rpc_metrics import RpcMetrics
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


class Gateway(gateway_pb2_grpc.ClusterServicer):
    """Ends a registration once it has read the last tokens."""

    def __init__(self) -> None:
        self.welcomed = asyncio.Event()
        self.was_told_all = asyncio.Event()
        self.has_read_tokens = asyncio.Event()
        self.last = gateway_pb2.WorkerMessage()

    async def Register(
        self, messages: AsyncIterator[gateway_pb2.WorkerMessage], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[gateway_pb2.GatewayMessage]:
        yield gateway_pb2.GatewayMessage(welcome=gateway_pb2.Welcome(gateway_id="g", heartbeat_interval_s=1000.0))
        async for message in messages:
            self.last = message
            self.welcomed.set()
        self.was_told_all.set()
        await self.has_read_tokens.wait()


class Worker:
    """Serves an engine that has requests; told to go by its futures."""

    def __init__(self, gateway: str = NOBODY) -> None:
        loop = asyncio.get_running_loop()
        self.engine = BusyEngine()
        self.state = WorkerState(gateway_pb2.WorkerIdentity(), cast(Any, None), WorkerMetrics())
        self.stopping: asyncio.Future[None] = loop.create_future()
        self.retiring: asyncio.Future[None] = loop.create_future()
        engine = cast(ServingEngine, self.engine)
        self.serving = Serving(engine, self.state, self.load, loop.create_future())
        work = self.serving.until_stopped(gateway, 0.0, self.stopping, self.retiring)
        self.life = asyncio.create_task(work)

    def load(self) -> gateway_pb2.WorkerLoad:
        return gateway_pb2.WorkerLoad(draining=self.state.draining)

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


async def test_who_has_drained_stays_until_its_gateway_has_read_the_last_tokens() -> None:
    gateway = Gateway()
    add = [lambda server: gateway_pb2_grpc.add_ClusterServicer_to_server(gateway, server)]
    async with running_server("127.0.0.1:0", add, RpcMetrics(CollectorRegistry()), grace_s=0) as server:
        worker = Worker(f"127.0.0.1:{server.port}")
        await asyncio.wait_for(gateway.welcomed.wait(), 60)
        worker.engine.num_running = 0
        worker.retiring.set_result(None)
        await asyncio.wait_for(gateway.was_told_all.wait(), 60)
        assert gateway.last.load.draining
        assert not worker.life.done()
        gateway.has_read_tokens.set()
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
