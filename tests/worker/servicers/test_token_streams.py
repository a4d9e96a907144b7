"""Routes, outboxes and readers of a worker's token streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress

import pytest

from halfmoon.engine.request import TokenOutput
from halfmoon.errors import Cancelled, InvalidRequest, Unavailable
from halfmoon.pb import decode_pb2, prefill_pb2, types_pb2
from halfmoon.worker.servicers.kept_answers import KeptAnswers
from halfmoon.worker.servicers.token_streams import TokenStreams


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


async def test_tokens_of_short_steps_share_a_message() -> None:
    clock = Clock()
    router = TokenStreams(clock, interval_s=0.008)
    steps = router.read("g")
    await anext(steps)
    router.route_to_gateway("r", "g")
    sent = []
    for step in range(9):
        clock.now_s = 0.005 * step
        router.deliver([token("r", step)])
        with suppress(TimeoutError):
            async with asyncio.timeout(0):
                sent.append([one.position for one in (await anext(steps)).tokens])
                continue
        steps = router.read("g")  # a reader that was cancelled has ended
        await anext(steps)
    assert sent == [[0], [1, 2], [3, 4], [5, 6], [7, 8]]


async def test_a_token_is_sent_after_the_interval_if_no_step_follows() -> None:
    router = TokenStreams(Clock(), interval_s=0.02)
    steps = router.read("g")
    await anext(steps)
    router.route_to_gateway("r", "g")
    router.deliver([token("r", 0)])
    await anext(steps)
    router.deliver([token("r", 1)])
    assert router.has_pending
    async with asyncio.timeout(5):
        assert [one.position for one in (await anext(steps)).tokens] == [1]


async def test_the_last_token_of_a_request_takes_those_along_that_wait() -> None:
    router = TokenStreams(Clock(), interval_s=60.0)
    steps = router.read("g")
    await anext(steps)
    for request_id in ("r", "s"):
        router.route_to_gateway(request_id, "g")
    router.deliver([token("r", 0)])
    await anext(steps)
    router.deliver([token("r", 1), token("s", 0)])
    router.deliver([token("r", 2, last=True)])
    async with asyncio.timeout(5):
        message = await anext(steps)
    assert [(one.request_id, one.position) for one in message.tokens] == [("r", 1), ("s", 0), ("r", 2)]


async def test_tokens_that_wait_are_sent_before_the_stream_ends() -> None:
    router = TokenStreams(Clock(), interval_s=60.0)
    steps = router.read("g")
    await anext(steps)
    router.route_to_gateway("r", "g")
    router.deliver([token("r", 0)])
    await anext(steps)
    router.deliver([token("r", 1)])
    router.end()
    router.deliver([token("r", 2)])
    assert [[one.position for one in message.tokens] async for message in steps] == [[1, 2]]


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


def generation(request_id: str, gateway_id: str = "a") -> types_pb2.Generation:
    repeatable = types_pb2.Repeatable(key=b"k")
    return types_pb2.Generation(request_id=request_id, gateway_id=gateway_id, repeatable=repeatable)


def first_of(request_id: str) -> prefill_pb2.FirstToken:
    return prefill_pb2.FirstToken(token=types_pb2.Token(request_id=request_id))


async def reading(router: TokenStreams, *gateway_ids: str) -> dict[str, AsyncGenerator[decode_pb2.StepTokens, None]]:
    readers = {gateway_id: router.read(gateway_id) for gateway_id in gateway_ids}
    for reader in readers.values():
        await anext(reader)
    return readers


async def test_an_adopted_answer_goes_on_to_the_gateway_that_adopted_it() -> None:
    router = TokenStreams()
    readers = await reading(router, "a", "b")
    router.route_to_gateway("r", "a")
    router.keep(generation("r"), first_of("r"))
    router.deliver([token("r", 1)])
    assert [old.position for old in router.adopt("r", "b").tokens] == [0, 1]
    router.deliver([token("r", 2, last=True)])
    of_a, of_b = await anext(readers["a"]), await anext(readers["b"])
    assert [(one.position, one.finish_reason) for one in of_a.tokens] == [(1, 0), (0, types_pb2.TAKEN_OVER)]
    assert [one.position for one in of_b.tokens] == [2]
    assert router.belongs_to_another("r", "a")
    assert not router.belongs_to_another("r", "b")


async def test_only_a_gateway_that_reads_may_adopt() -> None:
    router = TokenStreams()
    await reading(router, "a")
    router.route_to_gateway("r", "a")
    router.keep(generation("r"), first_of("r"))
    with pytest.raises(Unavailable):
        router.adopt("r", "b")
    assert not router.belongs_to_another("r", "a")


async def test_a_kept_request_outlives_its_gateway_and_is_given_up_in_the_end() -> None:
    clock = Clock()
    router = TokenStreams(clock, KeptAnswers(keep_s=60))
    readers = await reading(router, "a")
    for request_id in ("kept", "plain"):
        router.route_to_gateway(request_id, "a")
    router.keep(generation("kept"), first_of("kept"))
    router.keep(types_pb2.Generation(request_id="plain"), first_of("plain"))
    await readers["a"].aclose()
    clock.now_s = 6.0
    assert router.abandoned(5.0) == ["plain"]
    router.deliver([token("kept", 1)])
    clock.now_s = 66.0
    assert router.abandoned(5.0) == []
    clock.now_s = 66.1
    assert router.abandoned(5.0) == ["kept"]
    assert (len(router.kept), router.kept.num_bytes) == (0, 0)


async def test_a_request_that_is_kept_no_longer_for_want_of_room_is_given_up_with_its_gateway() -> None:
    clock = Clock()
    router = TokenStreams(clock, KeptAnswers(max_bytes=1_000))
    readers = await reading(router, "a")
    router.route_to_gateway("r", "a")
    router.keep(generation("r"), first_of("r"))
    for position in range(1, 20):
        router.deliver([token("r", position)])
    assert "r" not in router.kept
    assert len((await anext(readers["a"])).tokens) == 19, "its client notices nothing"
    await readers["a"].aclose()
    clock.now_s = 6.0
    assert router.abandoned(5.0) == ["r"]


async def test_what_a_worker_gives_up_is_not_kept() -> None:
    router = TokenStreams()
    await reading(router, "a")
    for request_id in ("cancelled", "failed"):
        router.route_to_gateway(request_id, "a")
        router.keep(generation(request_id), first_of(request_id))
    router.forget("cancelled")
    router.deliver([TokenOutput("failed", 1, 1, "error")])
    assert len(router.kept) == 0


def test_an_answer_of_one_token_is_kept_where_its_prompt_was_computed() -> None:
    router = TokenStreams()
    first = first_of("r")
    router.note_first(generation("r"), first)
    assert len(router.kept) == 0, "it is handed over"
    first.token.finish_reason = types_pb2.LENGTH
    router.note_first(generation("r"), first)
    assert router.kept.find(b"k")[0].num_tokens == 1
