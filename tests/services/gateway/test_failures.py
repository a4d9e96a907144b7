"""What clients and workers do to a running request: they go away, refuse, die and mix things up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from halfmoon.errors import DeadlineExceeded, HalfmoonError, Incompatible, NoCapacity, Unavailable
from halfmoon.pb.gateway_pb2 import WorkerLoad
from halfmoon.pb.prefill_pb2 import FirstToken, HandedOver, PrefillEvent, PrefillRequest
from halfmoon.pb.types_pb2 import CANCELLED, ERROR, KVLayout
from tests.services.gateway.fakes import FINGERPRINT, MODEL, FakeWorker, Fleet, Script, running_fleet, soon

HI: list[Any] = [{"role": "user", "content": "hi"}]


async def chat(fleet: Fleet, **options: Any) -> str | None:
    answer: ChatCompletion = await fleet.client.chat.completions.create(model=MODEL, messages=HI, **options)
    return answer.choices[0].message.content


async def open_stream(fleet: Fleet, **options: Any) -> openai.AsyncStream[ChatCompletionChunk]:
    stream: openai.AsyncStream[ChatCompletionChunk] = await fleet.client.chat.completions.create(
        model=MODEL, messages=HI, stream=True, **options
    )
    return stream


async def text_until(stream: openai.AsyncStream[ChatCompletionChunk], num_chars: int) -> str:
    text = ""
    while len(text) < num_chars:
        chunk = await soon(anext(stream))
        text += chunk.choices[0].delta.content or ""
    return text


async def rest_of(stream: openai.AsyncStream[ChatCompletionChunk]) -> str:
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


async def last_row(fleet: Fleet, status: str) -> dict[str, Any]:
    """The newest ledger row, once it has this status: it is written behind the request."""
    async with aiohttp.ClientSession() as session, asyncio.timeout(20):
        while True:
            async with session.get(f"{fleet.http}/halfmoon/v1/requests?limit=1") as response:
                rows: list[dict[str, Any]] = await response.json()
                if rows and rows[0]["status"] == status:
                    return rows[0]


async def test_a_client_that_leaves_a_stream_frees_both_workers(tmp_path: Path) -> None:
    gate = asyncio.Event()
    async with running_fleet(tmp_path) as fleet:
        prefill, decode = await fleet.pair(Script("hello", gate, tokens_before_gate=1))
        stream = await open_stream(fleet)
        assert await text_until(stream, 2) == "he"
        await stream.close()
        await soon(decode.calls.cancel_came.wait())
        await soon(prefill.calls.prefill_ended.wait())
        await fleet.until_idle()
        assert decode.calls.cancelled == [prefill.calls.prefills[0].generation.request_id]
        row = await last_row(fleet, "cancelled")
    assert (row["http_status"], row["output_tokens"], row["finish_reason"]) == (499, 2, None)


async def test_a_client_that_leaves_before_the_first_token(tmp_path: Path) -> None:
    async def never(worker: FakeWorker, request: PrefillRequest) -> AsyncIterator[PrefillEvent]:
        await asyncio.Event().wait()
        yield PrefillEvent()

    async with running_fleet(tmp_path) as fleet:
        prefill, decode = await fleet.pair()
        prefill.on_prefill = never
        asking = asyncio.ensure_future(chat(fleet))
        await soon(prefill.calls.prefill_came.wait())
        asking.cancel()
        await soon(decode.calls.cancel_came.wait())
        await soon(prefill.calls.prefill_ended.wait())
        await fleet.until_idle()
        assert (await last_row(fleet, "cancelled"))["ttft_s"] is None


async def test_a_deadline_ends_the_request_everywhere(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, request_deadline_s=0.3) as fleet:
        _, decode = await fleet.pair(Script("hello", asyncio.Event()))
        with pytest.raises(openai.InternalServerError) as caught:
            await chat(fleet)
        assert caught.value.status_code == 504
        await soon(decode.calls.cancel_came.wait())
        decode.calls.cancel_came.clear()
        with pytest.raises(openai.APIError, match=r"not done within 0\.3 s"):
            await rest_of(await open_stream(fleet))
        await soon(decode.calls.cancel_came.wait())


async def test_a_full_decode_worker_is_passed_by(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        prefill, one = await fleet.pair()
        other = await fleet.add("d1", "decode")
        prefill.refuse = [NoCapacity("full", retry_after_ms=1)]
        assert await chat(fleet) == "hello"
        addresses = [request.decode_address for request in prefill.calls.prefills]
        first, second = (one, other) if addresses[0] == one.address else (other, one)
        ids = {request.generation.request_id for request in prefill.calls.prefills}
        await soon(first.calls.cancel_came.wait())
        row = await last_row(fleet, "ok")
    assert addresses == [first.address, second.address]
    assert len(ids) == 2
    assert (row["num_retries"], row["decode_worker"]) == (1, second.worker_id)


async def test_a_worker_that_has_room_again(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        prefill, _ = await fleet.pair()
        prefill.refuse = [NoCapacity("full", retry_after_ms=1), Unavailable("not yet", retry_after_ms=1)]
        assert await chat(fleet) == "hello"


async def test_a_hand_over_that_stalls_is_tried_elsewhere(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        prefill, one = await fleet.pair()
        other = await fleet.add("d1", "decode")
        prefill.refuse = [DeadlineExceeded("the KV link made no progress for 10 s")]
        assert await chat(fleet) == "hello"
    assert {request.decode_address for request in prefill.calls.prefills} == {one.address, other.address}


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (NoCapacity("full", retry_after_ms=1_500), 429),
        (Unavailable("draining", retry_after_ms=1_500), 503),
        (Incompatible("another model"), 500),
    ],
)
async def test_refusals_reach_the_client(tmp_path: Path, error: HalfmoonError, status: int) -> None:
    async with running_fleet(tmp_path) as fleet:
        prefill, _ = await fleet.pair()
        for stream in (False, True):
            prefill.refuse = [NoCapacity("full", retry_after_ms=1)] * 2 + [error]
            with pytest.raises(openai.APIStatusError) as caught:
                await fleet.client.chat.completions.create(model=MODEL, messages=HI, stream=stream)
            assert caught.value.status_code == status
            assert caught.value.response.headers.get("Retry-After") == ("2" if error.retry_after_ms else None)
        assert len(prefill.calls.prefills) == 6
        await last_row(fleet, "rejected" if error.retry_after_ms else "error")


async def test_nobody_is_there(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        with pytest.raises(openai.InternalServerError, match="no prefill worker and no decode worker") as caught:
            await chat(fleet)
        assert caught.value.status_code == 503


async def test_decode_tokens_that_overtake_the_first_one(tmp_path: Path) -> None:
    async def late(worker: FakeWorker, request: PrefillRequest) -> AsyncIterator[PrefillEvent]:
        decode = worker.fleet.by_address[request.decode_address]
        generation = request.generation
        for position in (1, 2):
            decode.send(generation.gateway_id, worker.script.token(generation, position))
        await decode.steps[generation.gateway_id].join()
        yield PrefillEvent(first_token=FirstToken(token=worker.script.token(generation, 0)))
        decode.send(generation.gateway_id, *(worker.script.token(generation, position) for position in (2, 3, 4, 5)))

    async with running_fleet(tmp_path) as fleet:
        prefill, _ = await fleet.pair()
        prefill.on_prefill = late
        assert await chat(fleet) == "hello"


async def test_a_lost_token_is_an_error(tmp_path: Path) -> None:
    async def gap(worker: FakeWorker, request: PrefillRequest) -> AsyncIterator[PrefillEvent]:
        generation = request.generation
        yield PrefillEvent(first_token=FirstToken(token=worker.script.token(generation, 0)))
        decode = worker.fleet.by_address[request.decode_address]
        decode.send(generation.gateway_id, worker.script.token(generation, 2))

    async with running_fleet(tmp_path) as fleet:
        prefill, decode = await fleet.pair()
        prefill.on_prefill = gap
        with pytest.raises(openai.InternalServerError, match="token 1 was lost"):
            await chat(fleet)
        await soon(decode.calls.cancel_came.wait())
        with pytest.raises(openai.APIError, match="token 1 was lost"):
            await rest_of(await open_stream(fleet))


async def test_a_worker_that_fails_while_computing(tmp_path: Path) -> None:
    async def fail(worker: FakeWorker, request: PrefillRequest) -> AsyncIterator[PrefillEvent]:
        generation = request.generation
        yield PrefillEvent(first_token=FirstToken(token=worker.script.token(generation, 0)))
        token = worker.script.token(generation, 1)
        token.finish_reason = ERROR
        worker.fleet.by_address[request.decode_address].send(generation.gateway_id, token)

    async with running_fleet(tmp_path) as fleet:
        prefill, _ = await fleet.pair()
        prefill.on_prefill = fail
        with pytest.raises(openai.InternalServerError, match="failed while computing"):
            await chat(fleet)
        assert len(prefill.calls.prefills) == 1


async def test_a_dead_decode_worker_hands_its_stream_to_another(tmp_path: Path) -> None:
    gate = asyncio.Event()
    async with running_fleet(tmp_path) as fleet:
        prefill, first = await fleet.pair(Script("hello world", gate, tokens_before_gate=3))
        stream = await open_stream(fleet)
        assert await text_until(stream, 4) == "hell"
        second = await fleet.add("d1", "decode", Script("hello world"))
        first.end_registration.set()
        assert await rest_of(stream) == "o world"
        again = prefill.calls.prefills[1].generation
        row = await last_row(fleet, "ok")
        await soon(first.calls.cancel_came.wait())
    assert bytes(again.output_token_ids) == b"hell"
    assert again.sampling == prefill.calls.prefills[0].generation.sampling
    assert prefill.calls.prefills[1].decode_address == second.address
    assert (row["num_retries"], row["output_tokens"], row["decode_worker"]) == (1, 12, "d1")


async def test_a_started_request_waits_for_a_new_worker(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        worker = await fleet.add("b0", "both", Script("hello", asyncio.Event(), tokens_before_gate=1))
        stream = await open_stream(fleet)
        assert await text_until(stream, 2) == "he"
        worker.end_registration.set()
        await fleet.until(lambda: not fleet.placeable())
        await fleet.add("b1", "both")
        assert await rest_of(stream) == "llo"


async def test_a_started_request_outlives_a_host_with_many_workers(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        script = Script("hello", asyncio.Event(), tokens_before_gate=1)
        workers = [await fleet.add(f"b{number}", "both", script) for number in range(6)]
        stream = await open_stream(fleet)
        assert await text_until(stream, 2) == "he"
        for worker in workers:  # dead, and their registrations end one after the other
            worker.refuse = [Unavailable("Socket closed")] * 9
            asyncio.get_running_loop().call_later(0.2, worker.end_registration.set)
        next(worker for worker in workers if worker.calls.prefills).end_registration.set()
        await fleet.until(lambda: not fleet.placeable())
        await fleet.add("new", "both")
        assert await rest_of(stream) == "llo"


async def test_a_started_request_waits_for_room(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        prefill, first = await fleet.pair(Script("hello", asyncio.Event(), tokens_before_gate=1))
        stream = await open_stream(fleet)
        assert await text_until(stream, 2) == "he"
        prefill.refuse = [NoCapacity("full", retry_after_ms=1) for _ in range(4)]  # a new one is refused after three
        await fleet.add("d1", "decode")
        first.end_registration.set()
        assert await rest_of(stream) == "llo"
        assert (await last_row(fleet, "ok"))["num_retries"] == 5


async def test_a_broken_token_stream_moves_its_requests(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        prefill, decode = await fleet.pair(Script("hello", asyncio.Event(), tokens_before_gate=1))
        stream = await open_stream(fleet)
        assert await text_until(stream, 2) == "he"
        decode.script = Script("hello")
        decode.steps[fleet.cluster.gateway_id].put_nowait(Unavailable("restarting"))
        assert await rest_of(stream) == "llo"
        assert len(prefill.calls.prefills) == 2


async def test_a_hand_over_that_fails_after_the_first_token(tmp_path: Path) -> None:
    async def fail_once(worker: FakeWorker, request: PrefillRequest) -> AsyncIterator[PrefillEvent]:
        worker.on_prefill = None
        yield PrefillEvent(first_token=FirstToken(token=worker.script.token(request.generation, 0)))
        raise NoCapacity("the reservation is gone", retry_after_ms=1)

    async with running_fleet(tmp_path) as fleet:
        prefill, _ = await fleet.pair()
        prefill.on_prefill = fail_once
        assert await rest_of(await open_stream(fleet)) == "hello"
        assert bytes(prefill.calls.prefills[1].generation.output_token_ids) == b"h"


async def test_failing_over_and_over_ends_in_one_clear_error(tmp_path: Path) -> None:
    async def give_up(worker: FakeWorker, request: PrefillRequest) -> AsyncIterator[PrefillEvent]:
        position = len(request.generation.output_token_ids)
        yield PrefillEvent(first_token=FirstToken(token=worker.script.token(request.generation, position)))
        raise Unavailable("the hand-over broke", retry_after_ms=1)

    async with running_fleet(tmp_path) as fleet:
        prefill, _ = await fleet.pair()
        prefill.on_prefill = give_up
        stream = await open_stream(fleet)
        with pytest.raises(openai.APIError, match="the hand-over broke"):
            await rest_of(stream)
        assert len(prefill.calls.prefills) == 3


async def test_a_request_that_its_worker_gives_up_goes_on_elsewhere(tmp_path: Path) -> None:
    async def give_up(worker: FakeWorker, request: PrefillRequest) -> AsyncIterator[PrefillEvent]:
        worker.on_prefill = None
        generation = request.generation
        yield PrefillEvent(first_token=FirstToken(token=worker.script.token(generation, 0)))
        token = worker.script.token(generation, 1)
        token.finish_reason = CANCELLED
        worker.fleet.by_address[request.decode_address].send(generation.gateway_id, token)

    async with running_fleet(tmp_path) as fleet:
        prefill, _ = await fleet.pair()
        prefill.on_prefill = give_up
        assert await rest_of(await open_stream(fleet)) == "hello"


async def test_after_the_hand_over_the_prefill_worker_may_die(tmp_path: Path) -> None:
    gate = asyncio.Event()
    async with running_fleet(tmp_path) as fleet:
        prefill, _ = await fleet.pair(Script("hello", gate, tokens_before_gate=1))
        stream = await open_stream(fleet)
        assert await text_until(stream, 2) == "he"
        prefill.end_registration.set()
        await fleet.until(lambda: "p0" not in fleet.placeable())
        gate.set()
        assert await rest_of(stream) == "llo"
        assert len(prefill.calls.prefills) == 1


@pytest.mark.parametrize("is_silent", [True, False], ids=["cut off", "dead"])
async def test_a_prefill_worker_that_is_lost_between_hand_over_and_first_token(tmp_path: Path, is_silent: bool) -> None:
    """Decode's tokens come and never the first one, for which they wait: such a request once hung for good."""
    second_came, is_first = asyncio.Event(), [True]

    async def cut_off(worker: FakeWorker, request: PrefillRequest) -> AsyncIterator[PrefillEvent]:
        if not is_first:
            async for event in worker.usual_prefill(request):
                yield event
            return
        is_first.clear()
        decode = worker.fleet.by_address[request.decode_address]
        decode.send(request.generation.gateway_id, worker.script.token(request.generation, 1))
        await decode.steps[request.generation.gateway_id].join()
        second_came.set()
        if not is_silent:
            raise Unavailable("killed")
        await asyncio.Event().wait()

    async with running_fleet(tmp_path) as fleet:
        prefill, _ = await fleet.pair()
        prefill.on_prefill = cut_off
        other = await fleet.add("p1", "prefill", Script("hello"))
        other.on_prefill = cut_off
        asking = asyncio.ensure_future(chat(fleet))
        await soon(second_came.wait())
        if is_silent:
            (prefill if prefill.calls.prefills else other).end_registration.set()
        assert await soon(asking) == "hello"
        assert len(prefill.calls.prefills) + len(other.calls.prefills) == 2


async def test_a_prefill_call_that_ends_without_a_token(tmp_path: Path) -> None:
    async def nothing(worker: FakeWorker, request: PrefillRequest) -> AsyncIterator[PrefillEvent]:
        return
        yield PrefillEvent(handed_over=HandedOver())

    async with running_fleet(tmp_path) as fleet:
        prefill, _ = await fleet.pair()
        prefill.on_prefill = nothing
        with pytest.raises(openai.InternalServerError, match="without a token"):
            await chat(fleet)


async def test_silent_workers_are_removed(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        worker = await fleet.add("b0", "both", Script("hello", asyncio.Event()))
        stream = await open_stream(fleet)
        assert await text_until(stream, 1) == "h"
        fleet.cluster.expire(fleet.cluster.clock() + 2_999)
        assert fleet.placeable() == {"b0"}
        fleet.cluster.expire(fleet.cluster.clock() + 3_001)
        assert fleet.placeable() == set()
        await soon(worker.calls.cancel_came.wait())
        await fleet.add("b1", "both")
        assert await rest_of(stream) == "ello"


async def test_workers_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        await fleet.add("b0", "both")
        for change, match in (
            ({"model_fingerprint": "another"}, f"another.*{FINGERPRINT}"),
            ({"layout": KVLayout(num_layers=7)}, "num_layers 7"),
        ):
            wrong = FakeWorker("x0", "both", Script(), fleet)
            wrong.address = "127.0.0.1:1"
            wrong.changes = change
            with pytest.raises(Incompatible, match=match):
                await soon(wrong.register(fleet.gateway.address))
        assert fleet.placeable() == {"b0"}


async def test_a_draining_worker_gets_no_requests(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        prefill, first = await fleet.pair()
        second = await fleet.add("d1", "decode")
        first.loads.put_nowait(WorkerLoad(free_blocks=50, draining=True))
        async with asyncio.timeout(20):
            while "d0" in fleet.placeable():  # noqa: ASYNC110 (a load report is no event)
                await asyncio.sleep(0)
        assert await chat(fleet) == "hello"
        assert prefill.calls.prefills[0].decode_address == second.address
