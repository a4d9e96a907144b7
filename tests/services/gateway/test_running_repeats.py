"""Running requests with a client's id: when their client leaves, and when a newer one comes."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from services.gateway.cluster.token_router import TakenOver
from services.gateway.http.request_ids import ReusedKey
from services.gateway.repeatable import RepeatableRequest
from services.gateway.running_repeats import RunningRepeats
from tests.services.gateway.fakes import soon


def repeatable(body: bytes = b"body") -> RepeatableRequest:
    return RepeatableRequest(b"key", body, 0)


def cancel_later(task: asyncio.Task[web.StreamResponse], num_turns: int) -> None:
    """Cancels after some turns of the event loop."""
    if num_turns:
        asyncio.get_running_loop().call_soon(cancel_later, task, num_turns - 1)
    else:
        task.cancel()


@pytest.mark.parametrize("num_turns", range(6))
async def test_a_client_that_leaves_while_its_answer_ends_has_had_it(num_turns: int) -> None:
    response = web.Response()

    async def answer() -> web.StreamResponse:
        cancel_later(running, num_turns)
        return response

    running = asyncio.create_task(RunningRepeats(0.0).run(repeatable(), answer, lambda: True))
    assert await soon(running) is response


@pytest.mark.parametrize("has_begun", [True, False])
async def test_a_client_that_leaves_ends_its_answer(has_begun: bool) -> None:
    ended = asyncio.Event()
    begun = asyncio.Event()

    async def answer() -> web.StreamResponse:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        raise AssertionError

    grace_s = 0.0 if has_begun else 600.0
    running = asyncio.create_task(RunningRepeats(grace_s).run(repeatable(), answer, lambda: has_begun))
    await soon(begun.wait())
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await soon(running)
    assert ended.is_set()


async def test_a_newer_one_takes_over_from_one_that_waits_for_a_worker() -> None:
    repeats, begun = RunningRepeats(600.0), asyncio.Event()
    response = web.Response()

    async def waits() -> web.StreamResponse:
        begun.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def answers() -> web.StreamResponse:
        return response

    older = asyncio.create_task(repeats.run(repeatable(), waits, lambda: False))
    await soon(begun.wait())
    with pytest.raises(ReusedKey):
        await repeats.run(repeatable(b"other"), answers, lambda: False)
    assert await soon(repeats.run(repeatable(), answers, lambda: False)) is response
    with pytest.raises(TakenOver):
        await soon(older)


async def test_one_that_is_cancelled_twice_is_not_remembered() -> None:
    repeats, begun, ending, may_end = RunningRepeats(600.0), asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def ends_slowly() -> web.StreamResponse:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ending.set()
            await may_end.wait()
        raise AssertionError

    running = asyncio.create_task(repeats.run(repeatable(), ends_slowly, lambda: False))
    await soon(begun.wait())
    running.cancel()
    await soon(ending.wait())
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await soon(running)
    assert len(repeats) == 1
    may_end.set()
    await asyncio.sleep(0)  # the answer ends
    await asyncio.sleep(0)  # which is noticed
    assert not len(repeats)
