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
from halfmoon.engine.engine import Engine
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


class Prepared:
    """An engine's memory of three regions: how often one was asked for, and whether KV was awaited then."""

    def __init__(self, engine: Engine) -> None:
        self.awaited_kv: list[bool] = []
        self.all = threading.Event()
        self._engine = engine
        engine.prefault = self._prefault  # type: ignore[method-assign]

    async def next(self) -> None:
        await asyncio.to_thread(self.all.wait)
        self.all.clear()

    def _prefault(self) -> bool:
        assert not self._engine.has_work()
        self.awaited_kv.append(self._engine.awaits_kv)
        if len(self.awaited_kv) % 3:
            return True
        self.all.set()
        return False


async def test_memory_is_prepared_in_idle_time_but_not_while_others_compute_for_this_engine(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine()
    prepared = Prepared(engine)
    thread = EngineThread(engine, ignore, None)
    thread.start()
    await prepared.next()
    assert len(prepared.awaited_kv) == 3, "until it is done"
    await thread.call(partial(engine.add, request()))
    await prepared.next()
    await thread.call(partial(engine.reserve, request("reserved")))
    num_times = len(prepared.awaited_kv)
    for _ in range(5):  # as the worker's reports of its load
        assert (await thread.call(engine.stats)).num_reserved == 1
        await asyncio.sleep(0.02)
    assert len(prepared.awaited_kv) == num_times
    await thread.call(partial(engine.cancel, "reserved"))
    await prepared.next()
    assert not any(prepared.awaited_kv)
    await thread.stop()


async def test_memory_is_prepared_little_by_little_until_the_engine_is_quiet(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("halfmoon.engine.engine_thread.PREFAULT_EVERY_S", 3600.0)
    engine, results = make_engine(), asyncio.Queue[StepResult]()
    prepared = Prepared(engine)
    thread = EngineThread(engine, results.put_nowait, None)
    thread.start()
    await prepared.next()
    await thread.call(partial(engine.add, request()))
    while not (await results.get()).outputs[-1].finish_reason:
        pass
    assert (await thread.call(engine.stats)).num_running == 0
    await asyncio.sleep(0.05)
    assert len(prepared.awaited_kv) == 3, "before the first request only"
    monkeypatch.setattr("halfmoon.engine.engine_thread.QUIET_S", 0.0)
    await thread.call(engine.stats)
    await prepared.next()
    await thread.stop()
