"""Commands and short prompts in the middle of a step: what may run there, and what waits for its end."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from halfmoon.engine.engine import Engine
from halfmoon.engine.engine_core import StepRuns
from halfmoon.engine.engine_thread import EngineThread
from halfmoon.engine.request import EngineRequest
from halfmoon.engine.scheduling.layer_gate import LayerGate
from halfmoon.engine.scheduling.restore_order import RestoreOrder
from halfmoon.engine.step_result import StepResult
from halfmoon.errors import NotFound
from tests.engine.engine_runs import MakeEngine, finish, request

STEP = 256


@pytest.fixture
def engine(make_engine: MakeEngine) -> Engine:
    return make_engine(max_batch_tokens=STEP, num_blocks=400)


def handed_over(name: str, length: int = 20, **options: Any) -> EngineRequest:
    return request(name, length, prefill_only=True, **options)


def once(engine: Engine, call: Callable[[], None], layer: int = 1) -> None:
    """Calls before that layer of the next step that can be interrupted, and never again."""
    calls = [lambda: None] * layer + [call]
    engine.call_between_layers(lambda: calls.pop(0)() if calls else None)


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
    before = time.perf_counter()
    assert engine.step().duration_s < time.perf_counter() - before - 0.5


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


def test_nothing_runs_nested_while_others_wait_for_room(make_engine: MakeEngine) -> None:
    engine = make_engine(max_batch_tokens=STEP, max_running=1)
    engine.add(handed_over("long", 300))
    engine.add(handed_over("first", 100))
    engine.step()
    assert nested_in(engine, handed_over("later", 50), handed_over("short")) == []


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


def test_commands_leave_the_interrupted_requests_alone(engine: Engine) -> None:
    def come() -> None:
        for call in (
            partial(engine.cancel, "long"),
            partial(engine.note_loaded, "long", (0,)),
            partial(engine.move_fence, "long", 0),
            partial(engine.arrive_by_layer, "long", LayerGate((), 1, 0.0)),
        ):
            with pytest.raises(StepRuns):
                call()
        assert engine.cancel("other")
        with pytest.raises(NotFound):
            engine.find("other")

    once(engine, come)
    engine.add(handed_over("long", 300))
    engine.add(handed_over("other", 300))
    engine.step()
    assert engine.cancel("long")
    engine.check_integrity()
    assert engine.stats().num_free_blocks == engine.num_blocks


def test_a_step_that_fails_in_the_middle_ends_with_its_requests_and_no_others(engine: Engine) -> None:
    def come() -> None:
        engine.add(handed_over("short"))
        assert engine.nested_step() is not None
        raise ValueError("broken")

    once(engine, come)
    engine.add(handed_over("long", 300))
    assert [(output.request_id, output.finish_reason) for output in engine.step().outputs] == [("long", "error")]
    assert engine.find("short").state == "held"
    engine.check_integrity()


async def test_commands_keep_their_order_around_one_that_waits_for_the_step(engine: Engine) -> None:
    results: list[StepResult] = []
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
    await asyncio.to_thread(in_step.wait, 10)
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
    await asyncio.to_thread(in_step.wait, 10)
    stopped = asyncio.create_task(thread.stop())
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.wait_for(stopped, 10)
    assert [output.request_id for result in results for output in result.outputs] == ["long"]
    assert engine.stats().num_free_blocks == engine.num_blocks
