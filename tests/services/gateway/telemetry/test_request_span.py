"""What the gateway records of a request: refused, failed over, given up."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp

from halfmoon.errors import NoCapacity
from halfmoon.rpc.telemetry.spans import NO_ATTRIBUTES, NO_SPAN, Attributes, Span
from tests.services.gateway.fakes import MODEL, Fleet, Script, running_fleet, soon

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "a b c"}], "max_tokens": 4}


class Recorded:
    """A span that keeps what it is told."""

    is_recording = True

    def __init__(self, tracer: Keeping, name: str, parent: Recorded | None, attributes: Attributes) -> None:
        self.name, self.parent, self.attributes = name, parent, dict(attributes)
        self.error: str | None = None
        self.events: list[str] = []
        self.ended = asyncio.Event()
        self._tracer = tracer
        tracer.spans.append(self)

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        return (("traceparent", self.name),)

    def child(self, name: str, start_s: float | None = None, attributes: Attributes = NO_ATTRIBUTES) -> Span:
        return Recorded(self._tracer, name, self, attributes)

    def event(self, name: str, at_s: float) -> None:
        self.events.append(name)

    def end(self, end_s: float | None = None, error: str | None = None, attributes: Attributes = NO_ATTRIBUTES) -> None:
        if not self.ended.is_set():
            self.ended.set()
            self.error = error
            self.attributes |= attributes


class Keeping:
    """A tracer that keeps its spans."""

    def __init__(self) -> None:
        self.spans: list[Recorded] = []

    def request(self, name: str, headers: Mapping[str, str], start_s: float, attributes: Attributes) -> Span:
        return Recorded(self, name, None, {**attributes, "parent": headers.get("traceparent", "")})

    def call(self, method: str, headers: Mapping[str, str]) -> Span:
        return NO_SPAN

    def named(self, name: str) -> list[Recorded]:
        return [one for one in self.spans if one.name == name]


async def status(fleet: Fleet, body: Mapping[str, Any] = CHAT, **headers: str) -> int:
    """Of one request."""
    async with (
        aiohttp.ClientSession(fleet.http, headers=headers) as http,
        http.post("/v1/chat/completions", json=body) as response,
    ):
        await response.read()
        return response.status


async def test_a_request_has_its_parts_and_the_clients_parent(tmp_path: Path) -> None:
    tracer = Keeping()
    async with running_fleet(tmp_path, tracer) as fleet:
        await fleet.pair()
        assert await status(fleet, traceparent="the client's") == 200
    root, admission, attempt = tracer.spans
    assert (root.name, admission.name, attempt.name) == (f"chat {MODEL}", "admission", "attempt")
    assert admission.parent is attempt.parent is root
    assert attempt.events == ["first token"]
    assert all(one.ended.is_set() and one.error is None for one in tracer.spans)
    told = {"parent": "the client's", "gen_ai.usage.output_tokens": 4, "http.response.status_code": 200}
    assert root.attributes.items() >= told.items()
    assert attempt.attributes == {"halfmoon.prefill_worker": "p0", "halfmoon.decode_worker": "d0"}


async def test_refusals_and_bad_requests_are_errors(tmp_path: Path) -> None:
    tracer = Keeping()
    async with running_fleet(tmp_path, tracer, return_wait_s=0.0) as fleet:
        assert await status(fleet) == 503
        assert await status(fleet, CHAT | {"max_tokens": -1}) == 400
    nobody, bad = tracer.spans
    assert (nobody.attributes["error.type"], bad.attributes["error.type"]) == ("no worker", "bad request")
    assert nobody.error is not None
    assert "max_tokens" in (bad.error or "")


async def test_a_second_attempt_is_in_the_same_trace(tmp_path: Path) -> None:
    tracer = Keeping()
    async with running_fleet(tmp_path, tracer) as fleet:
        prefill, _ = await fleet.pair()
        prefill.refuse.append(NoCapacity("full"))
        assert await status(fleet) == 200
    (root,) = tracer.named(f"chat {MODEL}")
    first, second = tracer.named("attempt")
    assert first.parent is second.parent is root
    assert (first.error, second.error, root.error) == ("full", None, None)
    assert root.attributes["halfmoon.num_retries"] == 1


async def test_a_client_that_goes_is_told_of(tmp_path: Path) -> None:
    tracer = Keeping()
    script = Script(decode_gate=asyncio.Event())
    async with running_fleet(tmp_path, tracer) as fleet, aiohttp.ClientSession(fleet.http) as http:
        await fleet.pair(script)
        async with http.post("/v1/chat/completions", json=CHAT | {"stream": True}) as response:
            await response.content.readline()
        await soon(asyncio.gather(*(one.ended.wait() for one in tracer.spans)))
    assert tracer.named("attempt")[0].error == "cancelled"
    assert tracer.named(f"chat {MODEL}")[0].error == "the client went away"
