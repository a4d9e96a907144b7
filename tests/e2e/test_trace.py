"""One request, one trace: from the client's own span through every service, also where workers die meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

pytest.importorskip("opentelemetry.sdk", reason="OpenTelemetry is not installed: pip install -e '.[tracing]'")

from tests.e2e.system import System, running_system, stored
from tests.rpc.otlp_receiver import Received, Receiver, detached, running_receiver

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

PROMPT = "The moon has two halves, and each of them is told of in its own way. " * 60
EVERY_PART = {
    "text_completion demo",
    "admission",
    "attempt",
    "halfmoon.Prefill/Prefill",
    "queue",
    "restore",
    "halfmoon.KVStore/Match",
    "chunk",
    "transfer",
    "halfmoon.KVTransfer/Push",
    "decode",
    "first token",
}


HANDED_OVER = ("--conditional-disaggregation", "off")  # so that every request has a hand-over
RESTORED = "halfmoon.KVStore/Borrow"
NONE: frozenset[str] = frozenset()
_PATIENCE_S = 60.0


def body(max_tokens: int) -> dict[str, Any]:
    wanted = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    return {"model": "demo", "prompt": PROMPT, **wanted}


def traceparent(number: int) -> dict[str, str]:
    return {"traceparent": f"00-{number:032x}-{number:016x}-01"}


async def whole(receiver: Receiver, number: int, num_attempts: int, others: frozenset[str] = NONE) -> list[Received]:
    """The trace of that number, when everything is there; as far as it is, when that does not come."""

    def of_trace(spans: list[Received]) -> list[Received]:
        return [one for one in spans if one.span.trace_id == number.to_bytes(16)]

    def is_whole(spans: list[Received]) -> bool:
        names = [one.name for one in of_trace(spans)]
        return set(names) >= EVERY_PART | others and names.count("attempt") == num_attempts

    with suppress(TimeoutError):
        await asyncio.wait_for(receiver.until(is_whole), _PATIENCE_S)
    return of_trace(receiver.spans)


async def test_a_request_is_one_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    async with (
        running_receiver() as receiver,
        running_system(tmp_path, *HANDED_OVER, "--dtype", "float32", "--otlp-endpoint", receiver.url) as system,
        aiohttp.ClientSession(system.url) as http,
    ):
        async with http.post("/v1/completions", json=body(8), headers=traceparent(1)) as response:
            assert response.status == 200
            await response.read()
        an_undisturbed_one(await whole(receiver, 1, 1))
        await stored(http, 10)
        await one_whose_workers_die(system, http)
        one_that_was_moved(await whole(receiver, 2, 2, frozenset({RESTORED})))


def an_undisturbed_one(spans: list[Received]) -> None:
    assert {one.name for one in spans} >= EVERY_PART
    assert detached(spans, (1).to_bytes(8)) == []
    assert {one.service for one in spans} == {
        f"halfmoon-{name}" for name in ("gateway", "prefill", "decode", "kvstore")
    }
    assert not [one.name for one in spans if one.error is not None]
    (root,) = [one for one in spans if one.name == "text_completion demo"]
    chunks = [one.attributes["halfmoon.tokens"] for one in spans if one.name == "chunk"]
    assert root.attributes["gen_ai.request.model"] == "demo"
    assert root.attributes["gen_ai.usage.output_tokens"] == 8
    assert sum(chunks) == root.attributes["gen_ai.usage.input_tokens"]
    assert len(chunks) > 1
    (decode,) = [one for one in spans if one.name == "decode"]
    assert decode.service == "halfmoon-decode"
    assert decode.attributes["halfmoon.output_tokens"] == 8


async def one_whose_workers_die(system: System, http: aiohttp.ClientSession) -> None:
    async with http.post("/v1/completions", json=body(120), headers=traceparent(2)) as response:
        for _ in range(20):
            await response.content.readline()
        for worker in await system.cluster(http):
            os.kill(worker["pid"], signal.SIGKILL)
        assert b"[DONE]" in await response.read()


def one_that_was_moved(spans: list[Received]) -> None:
    (root,) = [one for one in spans if one.name == "text_completion demo"]
    failed, served = sorted(
        (one for one in spans if one.name == "attempt"), key=lambda one: one.span.start_time_unix_nano
    )
    assert failed.error is not None
    assert served.error is root.error is None
    assert failed.span.parent_span_id == served.span.parent_span_id == root.span.span_id
    assert root.attributes["halfmoon.num_retries"] == 1
    restores = [one.attributes.get("halfmoon.tokens", 0) for one in spans if one.name == "restore"]
    assert max(restores) > 0  # the new prefill worker had nothing of its own
