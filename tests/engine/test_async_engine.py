"""Commands, steps and failures cross between event loop and engine thread in order, and nobody waits forever."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from halfmoon.engine.async_engine import AsyncEngine
from halfmoon.engine.engine import Engine
from halfmoon.engine.request import EngineRequest, SamplingParams, TokenOutput
from halfmoon.engine.step_result import StepResult
from halfmoon.errors import InvalidRequest, NoCapacity, NotFound, Unavailable
from halfmoon.kv.kv_layout import KVSlice

MakeEngine = Callable[..., Engine]


def request(name: str = "a", length: int = 20, max_tokens: int = 12, **options: Any) -> EngineRequest:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return EngineRequest(name, tuple(range(3, 3 + length)), sampling, **options)


class Listener:
    """Collects outputs; `until` waits for one that satisfies a condition."""

    def __init__(self) -> None:
        self.outputs: list[TokenOutput] = []
        self._arrived = asyncio.Event()
        self.thread_ids: set[int] = set()

    def __call__(self, result: StepResult) -> None:
        self.thread_ids.add(threading.get_ident())
        self.outputs += result.outputs
        self._arrived.set()

    async def until(self, condition: Callable[[TokenOutput], bool]) -> TokenOutput:
        while True:
            for output in self.outputs:
                if condition(output):
                    return output
            self._arrived.clear()
            await self._arrived.wait()

    async def finished(self, name: str) -> list[int]:
        await self.until(lambda output: output.request_id == name and output.finish_reason is not None)
        return [output.token_id for output in self.outputs if output.request_id == name]


def alone(make_engine: MakeEngine, one: EngineRequest) -> list[int]:
    engine = make_engine()
    engine.add(one)
    tokens = []
    while engine.has_work():
        tokens += [output.token_id for output in engine.step().outputs]
    return tokens


async def test_requests_run_and_results_arrive_on_the_loop(make_engine: MakeEngine) -> None:
    expected = {name: alone(make_engine, request(name, length)) for name, length in (("a", 20), ("b", 31))}
    heard = Listener()
    async with AsyncEngine(make_engine(), heard) as engine:
        await asyncio.gather(engine.add(request("a", 20)), engine.add(request("b", 31)))
        assert {name: await heard.finished(name) for name in expected} == expected
        assert (await engine.stats()).num_free_blocks == engine.engine.num_blocks
    assert heard.thread_ids == {threading.get_ident()}


async def test_a_hand_over(make_engine: MakeEngine) -> None:
    first, rest = Listener(), Listener()
    async with AsyncEngine(make_engine(), first) as source, AsyncEngine(make_engine(), rest) as target:
        await source.add(request(prefill_only=True))
        await target.reserve(request())
        token = await first.until(lambda output: output.request_id == "a")
        for layer in range(3):
            payload = await source.kv_read("a", KVSlice(layer, layer + 1, 0, 20))
            await target.kv_write("a", KVSlice(layer, layer + 1, 0, 20), payload)
        await source.cancel("a")
        await target.start("a", token.token_id)
        assert [token.token_id, *await rest.finished("a")] == alone(make_engine, request())


async def test_errors_reach_the_one_who_asked(make_engine: MakeEngine) -> None:
    async with AsyncEngine(make_engine(num_blocks=5), Listener()) as engine:
        with pytest.raises(InvalidRequest, match="empty"):
            await engine.add(EngineRequest("x", (), SamplingParams(max_tokens=1)))
        await engine.reserve(request("a"))
        with pytest.raises(NoCapacity):
            await engine.reserve(request("b"))
        with pytest.raises(NotFound):
            await engine.start("c", 5)
        with pytest.raises(InvalidRequest, match="bytes"):
            await engine.kv_write("a", KVSlice(0, 3, 0, 20), b"short")
        with pytest.raises(NotFound):
            await engine.kv_read("a", KVSlice(0, 3, 0, 20))


async def test_after_cancel_there_are_no_outputs_and_no_blocks(make_engine: MakeEngine) -> None:
    heard = Listener()
    async with AsyncEngine(make_engine(), heard) as engine:
        await engine.add(request("a", 20, max_tokens=300))
        await heard.until(lambda output: output.position >= 3)
        assert await engine.cancel("a")
        seen = len(heard.outputs)
        assert not await engine.cancel("a")
        assert (await engine.stats()).num_free_blocks == engine.engine.num_blocks
        await engine.add(request("b"))
        await heard.finished("b")
        assert all(output.request_id == "b" for output in heard.outputs[seen:])


async def test_a_cancelled_wait_leaves_no_reservation(make_engine: MakeEngine) -> None:
    async with AsyncEngine(make_engine(), Listener()) as engine:
        waiting = asyncio.create_task(engine.reserve(request()))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        stats = await engine.stats()
        assert (stats.num_reserved, stats.num_free_blocks) == (0, engine.engine.num_blocks)


async def test_a_cancelled_wait_leaves_another_request_of_that_name_alone(make_engine: MakeEngine) -> None:
    async with AsyncEngine(make_engine(), Listener()) as engine:
        await engine.reserve(request())
        for method in (engine.add, engine.reserve):
            waiting = asyncio.create_task(method(request()))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        assert (await engine.stats()).num_reserved == 1


async def test_a_step_that_only_preempts_is_followed_by_another(make_engine: MakeEngine) -> None:
    heard = Listener()
    inner = make_engine(num_blocks=6, prefix_cache=False)
    async with AsyncEngine(inner, heard) as engine:
        await engine.reserve(request("moving", 20, max_tokens=4, arrival_s=9.0))
        await engine.reserve(request("grows", 15, max_tokens=20, arrival_s=5.0))
        await engine.kv_write("grows", KVSlice(0, 3, 0, 15), bytes(15 * inner.layout.token_bytes))
        await engine.start("grows", 3)
        await engine.add(request("waits", 17, max_tokens=4, arrival_s=1.0))
        assert len(await heard.finished("waits")) == 4
        await engine.cancel("moving")
        await heard.finished("grows")


async def test_work_that_waits_for_blocks_does_not_spin(make_engine: MakeEngine) -> None:
    heard = Listener()
    blocked = make_engine(num_blocks=3)
    async with AsyncEngine(blocked, heard) as engine:
        await engine.add(request("held", 20, max_tokens=1, prefill_only=True))
        await heard.until(lambda output: output.request_id == "held")
        await engine.add(request("next", 20, max_tokens=2))
        steps = 0
        step = blocked.step

        def counted() -> StepResult:
            nonlocal steps
            steps += 1
            return step()

        blocked.step = counted  # type: ignore[method-assign]
        for _ in range(50):
            await engine.stats()
        assert steps <= 51
        await engine.cancel("held")
        assert len(await heard.finished("next")) == 2


async def test_leaving_cancels_everything(make_engine: MakeEngine) -> None:
    heard = Listener()
    async with AsyncEngine(make_engine(), heard) as engine:
        await engine.add(request("a", 20, max_tokens=400))
        await engine.reserve(request("b"))
    stats = engine.engine.stats()
    assert (stats.num_running, stats.num_reserved, stats.num_free_blocks) == (0, 0, stats.num_blocks)
    for call in (engine.add(request("c")), engine.cancel("a"), engine.kv_read("a", KVSlice(0, 1, 0, 1))):
        with pytest.raises(Unavailable, match="closed"):
            await call
