"""The engine's thread: commands in their order, answers and deaths on the loop, and nobody waits forever."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from halfmoon.engine.config import EngineConfig
from halfmoon.engine.engine import PREFAULT_EVERY_S, Engine
from halfmoon.engine.engine_stats import QUIET_S
from halfmoon.engine.engine_thread import EngineThread
from halfmoon.engine.request import EngineRequest, SamplingParams
from halfmoon.engine.step_result import StepResult
from halfmoon.errors import Unavailable

MakeEngine = Callable[..., Engine]


def request(name: str = "a") -> EngineRequest:
    return EngineRequest(name, tuple(range(3, 23)), SamplingParams(max_tokens=300, temperature=0.0, ignore_eos=True))


def ignore(result: StepResult) -> None:
    """Nobody listens."""


async def test_commands_run_in_their_order_on_one_thread(make_engine: MakeEngine) -> None:
    ran: list[tuple[int, int]] = []
    thread = EngineThread(make_engine(), ignore, None)
    thread.start()
    answers = [thread.put(lambda n=n: ran.append((n, threading.get_ident()))) for n in range(20)]  # type: ignore[misc]
    await asyncio.gather(*(answer for answer in answers if answer is not None))
    await thread.stop()
    assert [number for number, _ in ran] == list(range(20))
    assert {ident for _, ident in ran}.isdisjoint({threading.get_ident()})
    assert thread.put(lambda: None) is None
    with pytest.raises(Unavailable, match="closed"):
        thread.check_open()


async def test_what_is_told_there_is_heard_on_the_loop_behind_what_came_before(make_engine: MakeEngine) -> None:
    heard: list[tuple[Any, int]] = []
    thread = EngineThread(make_engine(), ignore, None)
    tell = thread.on_loop(lambda what: heard.append((what, threading.get_ident())))
    thread.start()
    await thread.call(partial(tell, "first"))
    assert heard == [("first", threading.get_ident())]
    await thread.stop()


async def test_its_death_is_told_to_everybody(make_engine: MakeEngine) -> None:
    engine = make_engine()
    died: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    def broken() -> StepResult:
        raise MemoryError("gone")

    engine.step = broken  # type: ignore[method-assign]
    thread = EngineThread(engine, ignore, died.set_result)
    thread.start()
    await thread.call(partial(engine.add, request()))
    assert isinstance(await died, MemoryError)
    assert isinstance(thread.failed, MemoryError)
    with pytest.raises(Unavailable, match="gone"):
        await thread.call(partial(engine.add, request("b")))
    await thread.stop()
    assert engine.stats().num_free_blocks == engine.num_blocks


async def test_a_death_is_told_even_if_nothing_can_be_freed(make_engine: MakeEngine) -> None:
    engine = make_engine()
    died: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
    reached, go_on = threading.Event(), threading.Event()

    def broken() -> StepResult:
        reached.set()
        go_on.wait()
        raise AssertionError("block 3 is freed twice")

    engine.step = broken  # type: ignore[method-assign]
    engine.cancel_all = broken  # type: ignore[assignment,method-assign]
    thread = EngineThread(engine, ignore, died.set_result)
    thread.start()
    await thread.call(partial(engine.add, request()))
    await asyncio.to_thread(reached.wait)
    late = asyncio.create_task(thread.call(engine.stats))
    await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(Unavailable, match="freed twice"):
        await late
    assert str(await died) == "block 3 is freed twice"
    await thread.stop()


async def test_steps_wait_for_answers_on_their_way_and_commands_do_not(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "halfmoon.engine.engine.gathering_pause_s",
        lambda step_s, batch, num_coming, targets_s: 3600.0 if num_coming >= 2 else 0.0,
    )
    monkeypatch.setattr("halfmoon.host_limits.num_cores", lambda: 1)
    engine, results = make_engine(host_workers=2), asyncio.Queue[StepResult]()
    thread = EngineThread(engine, results.put_nowait, None)
    for name in ("b", "c"):
        engine.reserve(request(name))
    engine.add(replace(request(), sampling=SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)))
    thread.start()
    await thread.call(engine.stats)
    first = await results.get()
    assert [output.request_id for output in first.outputs] == ["a"], "a prompt is computed without a pause"
    for _ in range(20):
        await thread.call(engine.stats)
    assert results.empty()
    await thread.call(partial(engine.cancel, "b"))
    while not (result := await results.get()).outputs[0].finish_reason:
        assert result.num_decode_seqs == 1
    await thread.stop()


@pytest.mark.parametrize(
    ("cores", "threads", "options", "expected"),
    [
        (2, "2", {"host_workers": 2}, True),
        (2, "1", {"host_workers": 2}, False),
        (1, "1", {"host_workers": 2}, True),
        (2, "1", {"host_workers": 2, "num_threads": 1, "tensor_parallel": 2}, True),
        (7, "3", {"host_workers": 3}, False),  # the cores do not divide evenly
        (2, "4", {}, False),  # nobody else is here
        (2, "2", {"host_workers": 2, "device": "cuda"}, False),
    ],
)
def test_a_worker_knows_whether_others_need_its_cores(
    cores: int, threads: str, options: dict[str, Any], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("halfmoon.host_limits.num_cores", lambda: cores)
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    assert EngineConfig(**options).shares_cores is expected


async def test_memory_is_prepared_in_idle_time_only(make_engine: MakeEngine) -> None:
    engine, idle_again = make_engine(), threading.Event()
    prepared: list[bool] = []  # at each call: whether there was work
    left = [3]

    def prefault() -> bool:
        prepared.append(engine.has_work())
        left[0] -= 1
        if left[0] <= 0:
            idle_again.set()
        return left[0] > 0

    engine.prefault = prefault  # type: ignore[method-assign]
    thread = EngineThread(engine, ignore, None)
    thread.start()
    await asyncio.to_thread(idle_again.wait)
    idle_again.clear()
    assert prepared == [False] * 3, "once there is nothing to do, and until it is done"
    await thread.call(partial(engine.add, request()))
    await asyncio.to_thread(idle_again.wait)
    assert not any(prepared), "steps and what waits for them come first"
    assert not engine.has_work()
    await thread.stop()


async def test_others_on_the_same_cores_come_before_memory(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EngineConfig, "shares_cores", True)
    engine, prepared = make_engine(), threading.Event()

    def prefault() -> bool:
        prepared.set()
        return False

    engine.prefault = prefault  # type: ignore[method-assign]
    thread = EngineThread(engine, ignore, None)
    thread.start()
    assert await asyncio.to_thread(prepared.wait, 60)
    await thread.call(partial(engine.reserve, request()))
    prepared.clear()
    for _ in range(5):
        await thread.call(engine.stats)
        await asyncio.sleep(0.02)
    assert not prepared.is_set(), "whoever awaits KV leaves the cores to those who compute it"
    await thread.call(partial(engine.cancel, "a"))
    assert await asyncio.to_thread(prepared.wait, 60)
    await thread.stop()


@pytest.mark.parametrize("shares_cores", [True, False])
def test_memory_is_prepared_slowly_until_the_engine_is_quiet(
    make_engine: MakeEngine, shares_cores: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EngineConfig, "shares_cores", shares_cores)
    engine = make_engine()
    assert engine.prefault_pause_s(QUIET_S + 0.1) == 0
    assert engine.prefault_pause_s(0.1) == (PREFAULT_EVERY_S if shares_cores else 0)
    engine.reserve(request())
    assert engine.prefault_pause_s(QUIET_S + 0.1) == (None if shares_cores else 0)
    engine.start("a", 7)
    assert engine.prefault_pause_s(0.1) == (PREFAULT_EVERY_S if shares_cores else 0)
