"""Commands and short prompts in the middle of a step: what may run there, and what waits for its end."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from halfmoon.engine.engine import Engine
from halfmoon.engine.engine_thread import EngineThread
from halfmoon.engine.request import EngineRequest
from halfmoon.engine.scheduling.interruptible_step import StepRuns
from halfmoon.engine.scheduling.restore_order import RestoreOrder
from halfmoon.engine.step_result import StepResult
from tests.engine.engine_runs import MakeEngine, finish, prompt, request

STEP = 256


@pytest.fixture
def engine(make_engine: MakeEngine) -> Engine:
    return make_engine(max_batch_tokens=STEP, num_blocks=400)


def handed_over(name: str, length: int = 20, **options: Any) -> EngineRequest:
    return request(name, length, prefill_only=True, **options)


def once(engine: Engine, call: Callable[[], None], layer: int = 1) -> None:
    """Calls before that layer of the next step that can be interrupted, and never again."""
    calls = [engine.interrupt] * layer + [call]
    engine.call_between_layers(lambda: calls.pop(0)())
    engine.interrupt()


def nested_in(engine: Engine, outer: EngineRequest, *newcomers: EngineRequest, layer: int = 1) -> list[str]:
    """Which of the newcomers run nested in the first step of `outer`."""
    results: list[StepResult | None] = []

    def come() -> None:
        for one in newcomers:
            engine.add(one)
        results.append(engine.nested_step())
        assert engine.nested_step() is None, "each is looked at once"

    once(engine, come, layer)
    engine.add(outer)
    engine.step()
    return [] if not results or results[0] is None else [output.request_id for output in results[0].outputs]


def test_a_short_prompt_has_its_token_before_the_step_around_it(engine: Engine) -> None:
    assert nested_in(engine, handed_over("long", 300), handed_over("short")) == ["short"]
    assert engine.find("short").state == "held"
    assert engine.find("long").num_computed == STEP
    assert [output.request_id for output in finish(engine)] == ["long"]


def test_times_are_without_what_runs_nested(engine: Engine) -> None:
    once(engine, lambda: time.sleep(0.5))
    engine.add(handed_over("long", 300))
    before, before_s = time.perf_counter(), time.monotonic()
    result = engine.step()
    assert result.duration_s < time.perf_counter() - before - 0.5
    assert before_s - 0.01 < result.began_s < before_s + result.duration_s


@pytest.mark.parametrize(
    "newcomer",
    [
        handed_over("too long", 130),
        request("decoded here", 20),
        handed_over("less urgent", priority=1),
        handed_over("with log-probabilities", num_prompt_logprobs=1),
    ],
    ids=lambda one: one.request_id,
)
def test_others_wait_for_the_next_step(engine: Engine, newcomer: EngineRequest) -> None:
    assert nested_in(engine, handed_over("long", 300), newcomer) == []
    assert engine.find(newcomer.request_id).state == "waiting"


def test_a_prompt_that_loads_kv_waits_for_the_next_step(engine: Engine) -> None:
    found: list[StepResult | None] = []

    def come() -> None:
        engine.add(handed_over("loading", 20), order=RestoreOrder(1, 0, lambda *_: None))
        found.append(engine.nested_step())

    once(engine, come)
    engine.add(handed_over("long", 300))
    engine.step()
    assert found == [None]


def test_nothing_runs_in_the_middle_of_decodes(engine: Engine) -> None:
    engine.add(request("answer", 5))
    engine.step()
    assert nested_in(engine, handed_over("long", 300), handed_over("short")) == []


def test_nothing_runs_nested_beside_answers_that_wait_for_the_step(engine: Engine) -> None:
    """Such as one that starts meanwhile."""
    found: list[StepResult | None] = []

    def come() -> None:
        engine.reserve(request("answer", 5))
        engine.start("answer", 7)
        engine.add(handed_over("short"))
        found.append(engine.nested_step())

    once(engine, come)
    engine.add(handed_over("long", 300))
    engine.step()
    assert found == [None]


@pytest.mark.parametrize("room", [{"max_running": 3}, {"num_blocks": 10}])
def test_nothing_runs_nested_while_older_ones_have_no_room(make_engine: MakeEngine, room: dict[str, int]) -> None:
    """Or no room without what others may evict: 300, 200 and 20 tokens take 38, 25 and 3 blocks of 8."""
    num_blocks = 65 if "num_blocks" in room else 400
    engine = make_engine(max_batch_tokens=STEP, block_tokens=8, **{"max_running": 4, **room, "num_blocks": num_blocks})
    if "max_running" in room:
        engine.add(handed_over("running", 300))
    engine.add(handed_over("long", 300))
    engine.add(handed_over("older", 200))
    assert nested_in(engine, handed_over("another", 10), handed_over("short")) == []


def test_nothing_runs_nested_while_an_answer_is_paused(make_engine: MakeEngine) -> None:
    engine = make_engine(max_batch_tokens=STEP, block_tokens=16, num_blocks=16)
    engine.add(replace(request("answer", 100, priority=1), class_priority=1, max_pause_s=1e9))
    engine.step()
    assert nested_in(engine, handed_over("long", 150), handed_over("short", 10)) == []
    assert engine.stats().num_paused == 1


def test_a_less_urgent_one_does_not_run_nested_while_an_urgent_one_waits(engine: Engine) -> None:
    newcomers = handed_over("urgent", 200), handed_over("short", priority=1)
    assert nested_in(engine, handed_over("long", 300, priority=1), *newcomers) == []


def test_what_was_cached_when_it_was_chosen_may_be_gone_when_it_is_admitted(make_engine: MakeEngine) -> None:
    """It has its blocks then, and runs in the next step."""
    engine = make_engine(num_blocks=71, max_batch_tokens=64, max_running=40, block_tokens=8)
    for name, tokens in (("known", prompt(1, 300)), ("also known", prompt(3, 208))):
        engine.add(replace(handed_over(name), prompt_token_ids=tokens))
        finish(engine)
        engine.cancel(name)
    results: list[StepResult | None] = []

    def come() -> None:
        for number in range(18):
            engine.add(replace(handed_over(str(number)), prompt_token_ids=prompt(100 + number, 1)))
        engine.add(replace(handed_over("known"), prompt_token_ids=prompt(1, 300)))
        results.append(engine.nested_step())

    once(engine, come)
    engine.add(replace(handed_over("long"), prompt_token_ids=prompt(2, 64)))
    engine.step()
    assert results[0] is not None
    assert results[0].num_prefill_tokens == 18
    assert engine.find("known").state == "running"
    assert [output.request_id for output in finish(engine)] == ["known"]


def test_a_nested_step_is_bounded_by_what_is_left(engine: Engine) -> None:
    num_layers = engine.layout.num_layers
    num_left = STEP // num_layers
    newcomers = handed_over("as long", num_left + 1), handed_over("shorter", num_left - 1)
    assert nested_in(engine, handed_over("long", 300), *newcomers, layer=num_layers - 1) == ["shorter"]


def test_all_nested_steps_have_as_many_tokens_as_the_one_around_them(engine: Engine) -> None:
    names: list[str] = []

    def come() -> None:
        for number in range(3):
            engine.add(handed_over(str(number), 100 + number))
            result = engine.nested_step()
            names.extend(output.request_id for output in (() if result is None else result.outputs))

    once(engine, come, layer=0)
    engine.add(handed_over("long", 300))
    engine.step()
    assert names == ["0", "1"]


def test_a_request_of_the_step_ends_after_it_and_others_at_once(engine: Engine) -> None:
    def come() -> None:
        with pytest.raises(StepRuns):
            engine.cancel("long")
        assert engine.cancel("other")

    once(engine, come)
    engine.add(handed_over("long", 300))
    engine.add(handed_over("other", 300))
    engine.step()
    assert engine.cancel("long")
    engine.check_integrity()
    assert engine.stats().num_free_blocks == engine.num_blocks


def test_a_nested_step_that_fails_ends_its_requests_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, results = engine._runner, list[StepResult | None]()
    run = runner.run

    def broken(*_: Any) -> None:
        raise MemoryError

    def come() -> None:
        engine.add(handed_over("short"))
        with monkeypatch.context() as patched:
            patched.setattr(runner, "run", broken)
            results.append(engine.nested_step())

    once(engine, come)
    engine.add(handed_over("long", 300))
    engine.step()
    assert results[0] is not None
    assert [(output.request_id, output.finish_reason) for output in results[0].outputs] == [("short", "error")]
    assert [output.request_id for output in finish(engine)] == ["long"]
    assert runner.run == run


def test_an_error_of_what_runs_in_the_middle_is_not_one_of_the_step(engine: Engine) -> None:
    def come() -> None:
        raise AssertionError("block 3 is freed twice")

    once(engine, come)
    engine.add(handed_over("long", 300))
    with pytest.raises(AssertionError, match="freed twice"):
        engine.step()


async def in_the_middle_of_a_step(engine: Engine, results: list[StepResult]) -> tuple[EngineThread, threading.Event]:
    """A thread that is about to run commands in the middle of a step of "long", once the event is set."""
    in_step, go_on = threading.Event(), threading.Event()
    thread = EngineThread(engine, results.append, None)
    between_layers = thread._between_layers

    def pause() -> None:
        in_step.set()
        go_on.wait(10)
        between_layers()

    thread._between_layers = pause  # type: ignore[method-assign]
    thread.start()
    await thread.call(partial(engine.add, handed_over("long", STEP)))
    engine.interrupt()
    assert await asyncio.to_thread(in_step.wait, 10)
    return thread, go_on


async def test_commands_keep_their_order_around_one_that_waits_for_the_step(engine: Engine) -> None:
    results: list[StepResult] = []
    thread, go_on = await in_the_middle_of_a_step(engine, results)
    ran: list[str] = []

    def command(name: str, call: Callable[[], Any] = lambda: None) -> asyncio.Future[Any]:
        def run() -> None:
            call()
            ran.append(name)

        answer = thread.put(run)
        assert answer is not None
        return answer

    answers = [
        command("short comes", partial(engine.add, handed_over("short"))),
        command("long ends", partial(engine.cancel, "long")),
        command("it comes again", partial(engine.add, handed_over("long"))),
    ]
    go_on.set()
    await asyncio.wait_for(asyncio.gather(*answers), 10)
    assert ran == ["short comes", "long ends", "it comes again"]
    assert [output.request_id for result in results for output in result.outputs][:2] == ["short", "long"]
    await thread.stop()


async def test_a_thread_that_is_stopped_in_the_middle_of_a_step_ends_it(engine: Engine) -> None:
    results: list[StepResult] = []
    thread, go_on = await in_the_middle_of_a_step(engine, results)
    stopped = asyncio.create_task(thread.stop())
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.wait_for(stopped, 10)
    assert [output.request_id for result in results for output in result.outputs] == ["long"]
    assert engine.stats().num_free_blocks == engine.num_blocks
