"""Routes, outboxes and readers of a worker's token streams."""

from __future__ import annotations

import asyncio

import pytest

from halfmoon.engine.request import TokenOutput
from halfmoon.errors import Cancelled, InvalidRequest, Unavailable
from halfmoon.pb import types_pb2
from halfmoon.worker.token_streams import TokenStreams


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def token(request_id: str, position: int, *, last: bool = False) -> TokenOutput:
    return TokenOutput(request_id, 100 + position, position, "stop" if last else None)


async def test_first_token_goes_to_the_call_and_the_rest_to_the_gateway() -> None:
    router = TokenStreams()
    steps = router.read("g")
    assert not (await anext(steps)).tokens
    first = router.expect_first("r", "g")
    router.deliver([token("r", 0)])
    router.deliver([token("r", 1), token("other", 7)])
    router.deliver([token("r", 2, last=True)])
    assert (await first).output.position == 0
    message = await anext(steps)  # two steps passed unread: one message carries both
    assert [(t.request_id, t.position, t.finish_reason) for t in message.tokens] == [
        ("r", 1, types_pb2.NOT_FINISHED),
        ("r", 2, types_pb2.STOP),
    ]
    assert not router.forget("r"), "a finished request leaves no route"


async def test_the_first_token_tells_of_queue_and_cache() -> None:
    router = TokenStreams()
    first = router.expect_first("r", "g")
    router.note_begun({"r": 64, "other": 1}, 3.0)
    router.note_begun({"r": 0}, 5.0)  # preempted and begun again: the first time counts
    router.deliver([token("r", 0)])
    assert ((await first).num_cached_tokens, (await first).began_s) == (64, 3.0)


async def test_each_gateway_reads_its_own_requests() -> None:
    router = TokenStreams()
    readers = {name: router.read(name) for name in ("a", "b")}
    for reader in readers.values():
        await anext(reader)
    router.route_to_gateway("1", "a")
    router.route_to_gateway("2", "b")
    router.deliver([token("1", 0), token("2", 0)])
    assert [[t.request_id for t in (await anext(r)).tokens] for r in readers.values()] == [["1"], ["2"]]


async def test_a_request_that_runs_cannot_be_routed_again() -> None:
    router = TokenStreams()
    first = router.expect_first("r", "g")
    with pytest.raises(InvalidRequest, match="already"):
        router.expect_first("r", "g")
    router.deliver([token("r", 0)])
    assert (await first).output.position == 0


async def test_forget_wakes_who_waits() -> None:
    router = TokenStreams()
    first = router.expect_first("r", "g")
    assert router.forget("r")
    with pytest.raises(Cancelled):
        await first
    router.deliver([token("r", 0)])


async def test_nothing_is_routed_to_a_gateway_that_does_not_listen() -> None:
    router = TokenStreams()
    with pytest.raises(Unavailable):
        router.route_to_gateway("r", "g")
    steps = router.read("g")
    await anext(steps)
    router.check_listening("g")
    await steps.aclose()
    with pytest.raises(Unavailable):
        router.check_listening("g")


async def test_a_newer_reader_takes_over_with_nothing_lost() -> None:
    router = TokenStreams()
    old = router.read("g")
    await anext(old)
    waiting = asyncio.ensure_future(anext(old))
    await asyncio.sleep(0)
    new = router.read("g")
    await anext(new)
    router.route_to_gateway("r", "g")
    router.deliver([token("r", 0)])
    with pytest.raises(Unavailable, match="newer"):
        await waiting
    assert [t.position for t in (await anext(new)).tokens] == [0]
    router.check_listening("g")


async def test_requests_of_a_gateway_that_stays_away_are_given_up() -> None:
    clock = Clock()
    router = TokenStreams(clock)
    steps = router.read("g")
    await anext(steps)
    router.route_to_gateway("r", "g")
    await steps.aclose()
    clock.now_s = 4.0
    assert router.abandoned(5.0) == []
    clock.now_s = 6.0
    assert router.abandoned(5.0) == ["r"]
    assert router.abandoned(5.0) == []
    router.deliver([token("r", 0)])


async def test_a_gateway_that_comes_back_in_time_finds_its_tokens() -> None:
    clock = Clock()
    router = TokenStreams(clock)
    steps = router.read("g")
    await anext(steps)
    router.route_to_gateway("r", "g")
    await steps.aclose()
    router.deliver([token("r", 0)])
    clock.now_s = 3.0
    back = router.read("g")
    await anext(back)
    clock.now_s = 60.0
    assert router.abandoned(5.0) == []
    assert [t.position for t in (await anext(back)).tokens] == [0]
