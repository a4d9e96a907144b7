"""A new request outlives what a running stream outlives: a worker that is away for a moment."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from halfmoon.errors import Unavailable
from halfmoon.pb.prefill_pb2 import PrefillEvent, PrefillRequest
from halfmoon.rpc.health_probe import probe
from services.gateway.openai.bodies.parse_body import parse_request
from tests.services.gateway.fakes import LAYOUT, MODEL, ByteTokenizer, FakeWorker, Fleet, Script, running_fleet, soon

HI: list[Any] = [{"role": "user", "content": "hi"}]


async def chat(fleet: Fleet, **options: Any) -> str | None:
    answer = await fleet.client.chat.completions.create(model=MODEL, messages=HI, **options)
    text: str | None = answer.choices[0].message.content
    return text


async def until_a_request_is_inside(fleet: Fleet) -> None:
    async with asyncio.timeout(20):
        while "requests_in_flight 1.0" not in await fleet.metrics():
            pass


async def until_it_serves(fleet: Fleet) -> None:
    async with asyncio.timeout(20):
        while await probe(fleet.gateway.address) != "SERVING":  # noqa: ASYNC110 (health has no event)
            await asyncio.sleep(0.01)


async def test_a_gateway_is_not_serving_before_its_first_workers(tmp_path: Path) -> None:
    """Else a rolling update would send clients to one that can place nothing yet."""
    async with running_fleet(tmp_path, first_workers_wait_s=300) as fleet:
        await fleet.add("p0", "prefill")
        assert await probe(fleet.gateway.address) == "NOT_SERVING"
        await fleet.add("d0", "decode")
        await until_it_serves(fleet)


@pytest.mark.parametrize("wait_s", [0, 0.05])
async def test_a_gateway_serves_without_workers_in_the_end(tmp_path: Path, wait_s: float) -> None:
    async with running_fleet(tmp_path, first_workers_wait_s=wait_s) as fleet:
        if wait_s:
            await until_it_serves(fleet)
        assert await probe(fleet.gateway.address) == "SERVING"


async def test_a_new_request_waits_for_a_worker_that_just_left(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, return_wait_s=300) as fleet:
        worker = await fleet.add("b0", "both")
        worker.end_registration.set()
        await fleet.until(lambda: not fleet.placeable())
        asking = asyncio.ensure_future(chat(fleet))
        await until_a_request_is_inside(fleet)
        await fleet.add("b0", "both")
        assert await soon(asking) == "hello"


async def test_a_request_without_a_token_yet_waits_as_long_as_others_when_its_worker_dies(tmp_path: Path) -> None:
    async def die(worker: FakeWorker, request: PrefillRequest) -> AsyncIterator[PrefillEvent]:
        worker.end_registration.set()
        raise Unavailable("gone", retry_after_ms=1)
        yield PrefillEvent()

    async with running_fleet(tmp_path, return_wait_s=0, failover_wait_s=300) as fleet:
        worker = await fleet.add("b0", "both")
        worker.on_prefill = die
        asking = asyncio.ensure_future(chat(fleet))
        await fleet.until(lambda: not fleet.placeable())
        await fleet.add("b1", "both")
        assert await soon(asking) == "hello"


async def test_a_started_stream_waits_while_a_worker_loads_its_model_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy host that takes the most part of a minute."""
    ahead_s, num_asked, is_waiting = 0.0, 0, asyncio.Event()

    def monotonic() -> float:
        nonlocal num_asked
        num_asked += 1
        if num_asked == 2:  # when to give up; how long that is
            is_waiting.set()
        return time.monotonic() + ahead_s

    monkeypatch.setattr("services.gateway.routing.relay.time", SimpleNamespace(monotonic=monotonic))
    async with running_fleet(tmp_path) as fleet:
        _, decode = await fleet.pair(Script("hello", asyncio.Event(), tokens_before_gate=1))
        stream = await fleet.client.chat.completions.create(model=MODEL, messages=HI, stream=True)
        text = ""
        while len(text) < 2:
            text += (await soon(anext(stream))).choices[0].delta.content or ""
        decode.end_registration.set()
        await soon(is_waiting.wait())
        ahead_s = 45.0
        await fleet.add("p1", "prefill")  # the cluster changed, and there is still nobody to decode
        await fleet.add("d1", "decode")
        async with asyncio.timeout(20):
            text += "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == "hello"


async def test_the_wait_is_bounded(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, return_wait_s=0.2) as fleet:
        worker = await fleet.add("b0", "both")
        worker.end_registration.set()
        await fleet.until(lambda: not fleet.placeable())
        with pytest.raises(openai.InternalServerError, match="no prefill worker") as caught:
            await soon(chat(fleet))
        assert caught.value.status_code == 503


async def test_a_half_that_was_never_there_is_not_waited_for(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, return_wait_s=300) as fleet:
        await fleet.add("p0", "prefill")
        with pytest.raises(openai.InternalServerError, match="no decode worker"):
            await soon(chat(fleet))


async def test_a_request_that_fits_no_worker_is_wrong_and_not_early(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        await fleet.add("b0", "both", total_blocks=3)
        fits = 3 * LAYOUT.block_tokens
        with pytest.raises(openai.BadRequestError, match=f"the context length is {fits} tokens") as caught:
            await fleet.client.completions.create(model=MODEL, prompt="x" * fits)
        assert caught.value.code == "context_length_exceeded"
        assert "Retry-After" not in caught.value.response.headers
        assert await chat(fleet) == "hello"  # by default, what is left of the worker's memory


async def test_a_request_that_fits_no_worker_of_those_that_came_meanwhile(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, return_wait_s=300) as fleet:
        large = await fleet.add("b0", "both")
        large.end_registration.set()
        await fleet.until(lambda: not fleet.placeable())
        asking = asyncio.ensure_future(chat(fleet, max_tokens=100))
        await until_a_request_is_inside(fleet)
        await fleet.add("small", "both", total_blocks=3)
        await fleet.add("b0", "both")
        assert await soon(asking) == "hello"


async def test_long_bodies_are_read_beside_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[bool] = []
    encoded: list[bool] = []

    def noting(notes: list[bool], function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any, **options: Any) -> Any:
            notes.append(threading.current_thread() is threading.main_thread())
            return function(*arguments, **options)

        return noted

    monkeypatch.setattr("services.gateway.openai.endpoint_bodies.parse_request", noting(parsed, parse_request))
    monkeypatch.setattr(ByteTokenizer, "render_chat", noting(encoded, ByteTokenizer.render_chat))
    monkeypatch.setattr(ByteTokenizer, "encode", lambda self, text, **options: list(text.encode())[:50])
    async with running_fleet(tmp_path) as fleet:
        await fleet.pair()
        assert await chat(fleet) == "hello"
        many: list[Any] = [{"role": "user", "content": ""}] * 5_000
        answer = await fleet.client.chat.completions.create(model=MODEL, messages=many)
        assert answer.choices[0].message.content == "hello"
    assert parsed == encoded == [True, False]
