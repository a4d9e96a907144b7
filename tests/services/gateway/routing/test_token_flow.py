"""From an attempt's events to the sink."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from halfmoon.errors import HalfmoonError, Unavailable
from halfmoon.pb.types_pb2 import LENGTH, NOT_FINISHED, Token
from services.gateway.cluster.token_router import Event, TokenArrived, WorkerLost
from services.gateway.routing.token_flow import NotifyingSink, TokenFlow
from tests.services.gateway.fakes import soon


class Sink:
    """Begins when a test says so."""

    def __init__(self, enough: int = 100) -> None:
        self.may_begin = asyncio.Event()
        self.has_tokens = asyncio.Event()
        self.pushed: list[int] = []
        self.num_pushes = 0
        self._enough = enough

    async def begin(self) -> None:
        await self.may_begin.wait()

    def push(self, tokens: Sequence[Token]) -> bool:
        self.pushed += [one.position for one in tokens]
        self.num_pushes += 1
        self.has_tokens.set()
        return len(self.pushed) >= self._enough


def token(position: int, finish_reason: Any = NOT_FINISHED) -> Event:
    return TokenArrived(Token(position=position, finish_reason=finish_reason), 0.0)


def handle(event: Event) -> list[Token]:
    if isinstance(event, TokenArrived):
        return [event.token]
    assert isinstance(event, WorkerLost)
    raise event.error


LOST = WorkerLost("d0", Unavailable("gone"))


async def test_tokens_wait_for_the_sink_and_then_go_straight_through() -> None:
    flow, sink = TokenFlow(handle), Sink()
    running = asyncio.ensure_future(flow.run(sink))
    flow.put(token(0))
    await asyncio.sleep(0)
    flow.put(token(1))
    assert sink.pushed == []
    sink.may_begin.set()
    await soon(sink.has_tokens.wait())
    assert sink.pushed == [0, 1]
    flow.put(token(2))
    assert sink.pushed == [0, 1, 2]  # in that very call
    flow.put(token(3, LENGTH))
    flow.put(LOST)  # too late
    assert await soon(running) is True


@pytest.mark.parametrize("late", [False, True])
async def test_a_failure_comes_after_the_tokens_that_were_due(late: bool) -> None:
    flow, sink = TokenFlow(handle), Sink()
    running = asyncio.ensure_future(flow.run(sink))
    flow.put(token(0))
    if not late:
        flow.put(LOST)
    flow.put(token(1))
    sink.may_begin.set()
    if late:
        await soon(sink.has_tokens.wait())
        flow.put(LOST)
    with pytest.raises(Unavailable):
        await soon(running)
    assert sink.pushed == ([0, 1] if late else [0])


@pytest.mark.parametrize("has_begun", [False, True])
async def test_tokens_that_came_together_go_on_together_up_to_a_failure(has_begun: bool) -> None:
    flow, sink = TokenFlow(handle), Sink()
    running = asyncio.ensure_future(flow.run(sink))
    if has_begun:
        sink.may_begin.set()
        flow.put(token(0))
        await soon(sink.has_tokens.wait())
        flow.put(token(1), token(2), LOST, token(3))
    else:
        flow.put(token(0), token(1), token(2), LOST, token(3))
        sink.may_begin.set()
    with pytest.raises(Unavailable):
        await soon(running)
    assert sink.pushed == [0, 1, 2]
    assert sink.num_pushes == (2 if has_begun else 1)


async def test_what_follows_the_last_token_of_a_message_is_dropped() -> None:
    flow, sink = TokenFlow(handle), Sink()
    running = asyncio.ensure_future(flow.run(sink))
    sink.may_begin.set()
    flow.put(token(0), token(1, LENGTH), LOST)
    assert await soon(running) is True
    assert sink.pushed == [0, 1]


async def test_without_a_token_the_sink_never_begins() -> None:
    flow = TokenFlow(handle)
    flow.put(LOST)
    with pytest.raises(HalfmoonError):
        await soon(flow.run(Sink()))


async def test_a_sink_that_has_enough_ends_the_flow() -> None:
    flow, sink = TokenFlow(handle), Sink(enough=2)
    sink.may_begin.set()
    for position in range(3):
        flow.put(token(position))
    assert await soon(flow.run(sink)) is False


async def test_the_first_tokens_of_each_attempt_go_ahead_of_what_is_noted_of_them() -> None:
    sink = Sink(enough=3)
    sink.may_begin.set()
    seen: list[list[int]] = []
    notifying = NotifyingSink(sink, lambda: seen.append([*sink.pushed]))
    for first in (0, 2):
        flow = TokenFlow(handle)
        running = asyncio.ensure_future(flow.run(notifying))
        flow.put(token(first))
        await asyncio.sleep(0)
        flow.put(token(first + 1))
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert seen == [[0], [0, 1, 2]]
    assert sink.pushed[:3] == [0, 1, 2]


async def test_what_waits_for_first_tokens_is_told_once_by_nested_sinks() -> None:
    sink = Sink(enough=9)
    sink.may_begin.set()
    told: list[str] = []
    nested = NotifyingSink(NotifyingSink(sink, lambda: told.append("inner")), lambda: told.append("outer"))
    for attempt in range(2):
        flow = TokenFlow(handle)
        running = asyncio.ensure_future(flow.run(nested))
        for position in range(3):
            flow.put(token(3 * attempt + position))
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert told == ["inner", "outer"] * (attempt + 1)
