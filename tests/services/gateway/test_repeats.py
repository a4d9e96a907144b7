"""Requests with an id of their client, repeated on the same gateway and on another."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from halfmoon.errors import Unavailable
from halfmoon.pb.types_pb2 import Generation
from tests.services.gateway.fakes import MODEL, FakeWorker, Fleet, Script, running_fleet, served_model, soon

HI = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
STREAM = {**HI, "stream": True, "stream_options": {"include_usage": True}}
KEY = {"Idempotency-Key": "once"}
TEXT = "héllo, wörld"


@asynccontextmanager
async def two_gateways(
    tmp_path: Path, script: Script | None = None, **settings: Any
) -> AsyncIterator[tuple[Fleet, Fleet, FakeWorker, FakeWorker]]:
    """Two gateways over the same pair of workers."""
    async with running_fleet(tmp_path, **settings) as one, running_fleet(tmp_path, **settings) as other:
        prefill, decode = await one.pair(script or Script(TEXT))
        await other.join(prefill, decode)
        yield one, other, prefill, decode


@asynccontextmanager
async def posted(
    fleet: Fleet, body: dict[str, Any], headers: dict[str, str], path: str = "chat/completions"
) -> AsyncIterator[aiohttp.ClientResponse]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{fleet.http}/v1/{path}", json=body, headers=headers) as response,
    ):
        yield response


async def whole(
    fleet: Fleet, body: dict[str, Any], headers: dict[str, str], path: str = "chat/completions"
) -> tuple[int, bytes]:
    async with posted(fleet, body, headers, path) as response:
        return response.status, await soon(response.read())


async def events_until(response: aiohttp.ClientResponse, count: int) -> bytes:
    """The first `count` events of a stream."""
    came = b""
    while came.count(b"\n\n") < count:
        came += await soon(response.content.readuntil(b"\n\n"))
    return came


def last_id(came: bytes) -> str:
    return [line for line in came.split(b"\n") if line.startswith(b"id: ")][-1][4:].decode()


def content_of(came: bytes) -> str:
    chunks = [json.loads(line[6:]) for line in came.split(b"\n") if line.startswith(b"data: {")]
    assert not any("error" in chunk for chunk in chunks), chunks
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


async def rows_of(fleet: Fleet, request_id: str, count: int) -> list[dict[str, Any]]:
    """The ledger's rows of a request, once there are `count`: they are written behind it."""
    async with aiohttp.ClientSession() as session, asyncio.timeout(20):
        while True:
            async with session.get(f"{fleet.http}/halfmoon/v1/requests") as response:
                rows = [row for row in await response.json() if row["request_id"] == request_id]
                if len(rows) >= count:
                    return rows


async def test_a_stream_goes_on_where_its_gateway_ended(tmp_path: Path) -> None:
    gate = asyncio.Event()
    async with two_gateways(tmp_path, Script(TEXT, gate, tokens_before_gate=3)) as (one, other, prefill, decode):
        async with posted(one, STREAM, KEY) as response:
            begun = await events_until(response, 4)
            await one.stop()
            broken = await soon(response.read())
        assert b"shutting down" in broken
        assert decode.calls.cancelled == []
        async with posted(other, STREAM, {**KEY, "Last-Event-ID": last_id(begun)}) as response:
            gate.set()
            rest = await soon(response.read())
        assert content_of(begun + rest) == TEXT
        assert rest.endswith(b"data: [DONE]\n\n")
        assert b'"completion_tokens":15' in rest
        rows = await rows_of(other, "once", 1)
        assert [(row["status"], row["output_tokens"]) for row in rows] == [("ok", 15)]
        assert len(prefill.calls.prefills) == 1
        again = await whole(other, STREAM, KEY)
        assert again == (200, begun + rest), "the same bytes, from the first on"


async def test_the_client_of_a_gateway_that_died_without_a_word_is_billed_once(tmp_path: Path) -> None:
    gate = asyncio.Event()
    async with two_gateways(tmp_path, Script(TEXT, gate, tokens_before_gate=3)) as (one, other, prefill, _):
        async with posted(one, STREAM, KEY) as lost:
            await events_until(lost, 4)
            answering = asyncio.ensure_future(whole(other, STREAM, KEY))
            assert b"repeated_elsewhere" in await soon(lost.read()), "as if it came back to life"
            gate.set()
            status, came = await soon(answering)
        assert (status, content_of(came)) == (200, TEXT)
        rows = await rows_of(other, "once", 1)
        assert [(row["status"], row["prompt_tokens"], row["output_tokens"]) for row in rows] == [("ok", 8, 15)]
        assert len(prefill.calls.prefills) == 1


async def test_a_whole_answer_is_repeated_without_being_computed_again(tmp_path: Path) -> None:
    async with two_gateways(tmp_path) as (one, other, prefill, decode):
        first = await whole(one, HI, KEY)
        await one.until_told(lambda: bool(decode.calls.settled))
        assert await whole(other, HI, KEY) == first
        assert await whole(one, HI, KEY) == first
        assert len(prefill.calls.prefills) == 1
        assert len(await rows_of(one, "once", 1)) == 1


async def test_a_repeat_that_overtakes_the_news_of_the_end_is_not_billed(tmp_path: Path) -> None:
    async with two_gateways(tmp_path) as (one, _, prefill, decode):
        decode.settles_taken.clear()
        first = await whole(one, HI, KEY)
        assert decode.calls.settled == []
        assert await whole(one, HI, KEY) == first
        decode.settles_taken.set()
        await whole(one, HI, {"Idempotency-Key": "later"})
        assert len(await rows_of(one, "later", 1)) == 1, "rows are written in order"
        assert len(await rows_of(one, "once", 1)) == 1
        assert len(prefill.calls.prefills) == 2


async def test_a_reused_key_is_refused(tmp_path: Path) -> None:
    async with two_gateways(tmp_path) as (one, other, prefill, _):
        await whole(one, HI, KEY)
        status, body = await whole(other, {**HI, "temperature": 0.5}, KEY)
        assert (status, json.loads(body)["error"]["code"]) == (422, "idempotency_key_reused")
        reordered = dict(reversed(HI.items()))
        assert (await whole(other, reordered, KEY))[0] == 200, "the same request, written differently"
        assert len(prefill.calls.prefills) == 1


async def test_a_reused_key_is_refused_while_the_prompt_is_computed(tmp_path: Path) -> None:
    gate = asyncio.Event()
    async with two_gateways(tmp_path, Script(TEXT, gate)) as (one, _, prefill, _):
        first = asyncio.ensure_future(whole(one, HI, KEY))
        await soon(prefill.calls.prefill_came.wait())
        status, _ = await whole(one, {**HI, "temperature": 0.5}, KEY)
        gate.set()
        assert (status, (await soon(first))[0]) == (422, 200)


async def test_two_tenants_may_use_the_same_key(tmp_path: Path) -> None:
    async with two_gateways(tmp_path, api_key=("a", "b")) as (one, other, prefill, _):
        for fleet, tenant in ((one, "a"), (other, "b")):
            assert (await whole(fleet, HI, {**KEY, "Authorization": f"Bearer {tenant}"}))[0] == 200
        assert len(prefill.calls.prefills) == 2


async def test_a_request_id_alone_names_a_request_together_with_its_body(tmp_path: Path) -> None:
    named = {"X-Request-Id": "trace-7"}
    async with two_gateways(tmp_path) as (one, other, prefill, _):
        first = await whole(one, HI, named)
        assert await whole(other, HI, named) == first
        assert (await whole(other, {**HI, "temperature": 0.5}, named))[0] == 200
        assert len(prefill.calls.prefills) == 2


async def test_the_newer_of_two_readers_on_one_gateway_wins(tmp_path: Path) -> None:
    gate = asyncio.Event()
    async with running_fleet(tmp_path) as fleet:
        prefill, decode = await fleet.pair(Script(TEXT, gate, tokens_before_gate=2))
        async with posted(fleet, STREAM, KEY) as older:
            await events_until(older, 3)
            async with posted(fleet, STREAM, KEY) as newer:
                assert b"repeated_elsewhere" in await soon(older.read())
                gate.set()
                assert content_of(await soon(newer.read())) == TEXT
        assert (len(prefill.calls.prefills), decode.calls.cancelled) == (1, [])


async def test_a_repeat_does_not_wait_for_a_reader_that_has_stalled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The older connection is open and its buffers are full: its end once was waited for a minute."""
    gate, stalled = asyncio.Event(), [asyncio.Event()]
    write_eof = web.StreamResponse.write_eof

    async def write_eof_once_read(response: web.StreamResponse, data: bytes = b"") -> None:
        if response.content_type == "text/event-stream" and stalled:
            await stalled.pop().wait()
        await write_eof(response, data)

    monkeypatch.setattr(web.StreamResponse, "write_eof", write_eof_once_read)
    async with running_fleet(tmp_path) as fleet:
        prefill, decode = await fleet.pair(Script(TEXT, gate, tokens_before_gate=2))
        async with posted(fleet, STREAM, KEY) as older:
            await events_until(older, 3)
            async with posted(fleet, STREAM, KEY) as newer:
                gate.set()
                assert content_of(await soon(newer.read())) == TEXT
            with pytest.raises(aiohttp.ClientError):
                await soon(older.read())
        assert (len(prefill.calls.prefills), decode.calls.cancelled) == (1, [])
        assert [row["status"] for row in await rows_of(fleet, "once", 1)] == ["ok"]


async def test_a_client_that_left_comes_back_within_the_grace(tmp_path: Path) -> None:
    gate = asyncio.Event()
    async with running_fleet(tmp_path, disconnect_grace_s=600) as fleet:
        prefill, decode = await fleet.pair(Script(TEXT, gate, tokens_before_gate=2))
        async with posted(fleet, STREAM, KEY) as response:
            begun = await events_until(response, 3)
        gate.set()
        async with posted(fleet, STREAM, {**KEY, "Last-Event-ID": last_id(begun)}) as response:
            assert content_of(begun + await soon(response.read())) == TEXT
        assert (len(prefill.calls.prefills), decode.calls.cancelled) == (1, [])


async def test_a_client_that_stays_away_frees_its_blocks(tmp_path: Path) -> None:
    gate = asyncio.Event()
    async with running_fleet(tmp_path, disconnect_grace_s=0.01) as fleet:
        _, decode = await fleet.pair(Script(TEXT, gate, tokens_before_gate=2))
        async with posted(fleet, STREAM, KEY) as response:
            await events_until(response, 3)
        await soon(decode.calls.cancel_came.wait())
        assert len(decode.kept) == 0
        (row,) = await rows_of(fleet, "once", 1)
        assert (row["status"], row["output_tokens"]) == ("cancelled", 3)


async def test_a_client_that_leaves_before_the_first_token_frees_its_blocks_at_once(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, disconnect_grace_s=600) as fleet:
        prefill, decode = await fleet.pair()
        prefill.refuse = []

        async def never(worker: FakeWorker, request: Any) -> AsyncIterator[Any]:
            await asyncio.Event().wait()
            yield None

        prefill.on_prefill = never
        asking = asyncio.ensure_future(whole(fleet, HI, KEY))
        await soon(prefill.calls.prefill_came.wait())
        asking.cancel()
        await soon(decode.calls.cancel_came.wait())


async def test_when_the_worker_is_gone_too_the_rest_is_computed_again(tmp_path: Path) -> None:
    gate = asyncio.Event()
    async with two_gateways(tmp_path, Script(TEXT, gate, tokens_before_gate=3)) as (one, other, prefill, decode):
        async with posted(one, STREAM, KEY) as response:
            begun = await events_until(response, 4)
            await one.stop()
        decode.kept.drop(prefill.calls.prefills[0].generation.request_id)
        gate.set()
        async with posted(other, STREAM, {**KEY, "Last-Event-ID": last_id(begun)}) as response:
            assert content_of(begun + await soon(response.read())) == TEXT
        seeds = {request.generation.sampling.seed for request in prefill.calls.prefills}
        assert (len(prefill.calls.prefills), len(seeds)) == (2, 1), "with the same seed"


async def lost_in_adoption(directory: Path, body: dict[str, Any]) -> tuple[bytes, list[Generation]]:
    """All that a repeat gets whose worker is lost after it was adopted, and what was asked of the prefill worker."""
    gate = asyncio.Event()
    async with two_gateways(directory, Script(TEXT, gate, tokens_before_gate=3)) as (one, other, prefill, decode):
        async with posted(one, body, KEY) as response:
            begun = await events_until(response, 4)
            await one.stop()
        async with posted(other, body, KEY) as response:
            again = await events_until(response, 4)
            gate.set()
            decode.steps[other.cluster.gateway_id].put_nowait(Unavailable("the stream broke"))
            came = again + await soon(response.read())
        assert again == begun
        return came, [request.generation for request in prefill.calls.prefills]


async def test_an_answer_that_is_lost_during_the_adoption_goes_on_elsewhere(tmp_path: Path) -> None:
    came, generations = await lost_in_adoption(tmp_path, STREAM)
    assert content_of(came) == TEXT
    assert [len(generation.repeatable.tokens) for generation in generations] == [0, 4]
    assert [generation.repeatable.attempt for generation in generations] == [0, 1]


async def test_an_answer_that_is_lost_during_the_adoption_keeps_its_length(tmp_path: Path) -> None:
    came, generations = await lost_in_adoption(tmp_path, {**STREAM, "max_tokens": 6})
    assert b'"completion_tokens":6' in came
    assert [generation.sampling.max_tokens for generation in generations] == [6, 6]


async def test_what_a_second_attempt_loaded_is_cached_as_a_repeat_tells_it(tmp_path: Path) -> None:
    script = Script(TEXT, asyncio.Event(), tokens_before_gate=3, cached_tokens=6, loaded_tokens=4)
    async with two_gateways(tmp_path, script) as (one, other, prefill, _):
        prefill.refuse = [Unavailable("not yet", retry_after_ms=1)]
        async with posted(one, STREAM, KEY) as response:
            await events_until(response, 4)
            await one.stop()
        assert script.decode_gate is not None
        script.decode_gate.set()
        status, answer = await whole(other, HI, KEY)
        assert status == 422, "another body"
        status, answer = await whole(other, STREAM, KEY)
        assert (status, content_of(answer)) == (200, TEXT)
        assert b'"cached_tokens":6' in answer
        rows = await rows_of(other, "once", 2)  # that of the other body, too
        assert [(row["status"], row["cached_tokens"]) for row in rows if row["status"] != "rejected"] == [("ok", 6)]


async def test_a_kept_answer_without_the_log_probabilities_of_its_prompt_is_computed_again(tmp_path: Path) -> None:
    gate = asyncio.Event()
    body = {"model": MODEL, "prompt": "hi", "stream": True, "echo": True, "logprobs": 0, "max_tokens": 9}
    async with two_gateways(tmp_path, Script(TEXT, gate, tokens_before_gate=3)) as (one, other, prefill, decode):
        async with posted(one, body, KEY, "completions") as response:
            came = await events_until(response, 3)
            gate.set()
            decode.steps[one.cluster.gateway_id].put_nowait(Unavailable("the stream broke"))
            came += await soon(response.read())
        assert await whole(other, body, KEY, "completions") == (200, came)
        assert [bool(request.generation.output_token_ids) for request in prefill.calls.prefills] == [False, True, False]


CASES: list[tuple[str, dict[str, Any], str]] = [
    ("chat/completions", {**STREAM, "logprobs": True, "top_logprobs": 2}, TEXT),
    ("chat/completions", {**STREAM, "stop": ["wö"], "n": 1}, TEXT),
    ("chat/completions", {**STREAM, "max_tokens": 1}, TEXT),
    ("chat/completions", {**STREAM, "max_tokens": 6}, TEXT),
    (
        "chat/completions",
        {**STREAM, "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]},
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
    ),
    ("completions", {"model": MODEL, "prompt": "hi", "stream": True, "logprobs": 1, "max_tokens": 9}, TEXT),
    (
        "completions",
        {"model": MODEL, "prompt": "hi", "stream": True, "stream_options": {"include_usage": True}, "echo": True},
        TEXT,
    ),
    ("responses", {"model": MODEL, "input": "hi", "stream": True}, TEXT),
]


@pytest.mark.parametrize(("path", "body", "text"), CASES)
async def test_whatever_the_client_has_it_gets_the_other_bytes(
    tmp_path: Path, path: str, body: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = dataclasses.replace(served_model(), tool_format="hermes")
    monkeypatch.setattr("tests.services.gateway.fakes.served_model", lambda aliases: model)
    async with running_fleet(tmp_path) as fleet:
        prefill, _ = await fleet.pair(Script(text))
        status, undisturbed = await whole(fleet, body, KEY, path)
        assert status == 200, undisturbed
        events = [event + b"\n\n" for event in undisturbed.split(b"\n\n")[:-1]]
        named = [number for number, event in enumerate(events) if event.startswith(b"id: ")]
        assert len(named) >= len(events) - 1, "all but [DONE]"
        assert await whole(fleet, body, KEY, path) == (200, undisturbed)
        for number in named:
            resuming = {**KEY, "Last-Event-ID": last_id(events[number])}
            assert await whole(fleet, body, resuming, path) == (200, b"".join(events[number + 1 :]))
        assert len(prefill.calls.prefills) == 1


async def test_several_outputs_go_on_each_where_it_was(tmp_path: Path) -> None:
    body = {**STREAM, "n": 3, "seed": 1}
    async with two_gateways(tmp_path) as (one, other, prefill, _):
        status, undisturbed = await whole(one, body, KEY)
        assert status == 200
        events = [event + b"\n\n" for event in undisturbed.split(b"\n\n")[:-1]]
        cut = len(events) // 2
        _, rest = await whole(other, body, {**KEY, "Last-Event-ID": last_id(events[cut - 1])})
        came = events[:cut] + [event + b"\n\n" for event in rest.split(b"\n\n")[:-1]]
        for index in range(3):
            mark = b'"index":%d,' % index
            own = [event.split(b"\n", 1)[1] for event in came if mark in event]
            assert own == [event.split(b"\n", 1)[1] for event in events if mark in event]
        assert len(came) == len(events)
        assert len(prefill.calls.prefills) == 3
        assert (await whole(other, body, {**KEY, "Last-Event-ID": "7"}))[0] == 400


async def test_a_request_without_an_id_is_as_ever(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        prefill, decode = await fleet.pair(Script(TEXT))
        _, came = await whole(fleet, STREAM, {})
        assert b"id: " not in came.replace(b'"id', b"")
        assert not prefill.calls.prefills[0].generation.HasField("repeatable")
        assert (len(decode.kept), decode.calls.settled) == (0, [])
