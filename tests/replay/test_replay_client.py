"""How the answers to a replayed request count."""

from __future__ import annotations

import asyncio
import time

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from halfmoon.replay.client import Gateway, ReplayRequest, send
from halfmoon.replay.outcome import End, Outcome


async def replayed(status: int, *parts: str) -> Outcome:
    """The outcome of an answer that comes in parts."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=status)
        await response.prepare(request)
        for part in parts:
            await response.write(part.encode())
            await asyncio.sleep(0.01)
        return response

    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        gateway = Gateway(str(server.make_url("")).rstrip("/"), "m", 100, hides_length=False, speed=2.0)
        return await send(session, gateway, ReplayRequest([1, 2], 3, 3, time.monotonic()))


@pytest.mark.parametrize(
    ("status", "body", "end", "reason"),
    [
        (429, '{"error": {"code": "slo_would_be_missed", "reason": "ttft"}}', "refused", "ttft"),
        (429, '{"error": {"code": "no_capacity"}}', "refused", "no_capacity"),
        (503, '{"error": {"code": "unavailable"}}', "failed", "unavailable"),
        (502, "<html>", "failed", "502"),
        (200, 'data: {"choices": [{"text": "a"}]}\n\n', "failed", "broken stream"),
        (
            200,
            'data: {"choices": [{"text": "a"}]}\n\ndata: {"error": {"code": "unavailable"}}',
            "failed",
            "unavailable",
        ),
    ],
)
async def test_what_is_not_answered(status: int, body: str, end: End, reason: str) -> None:
    found = await replayed(status, body)
    assert (found.end, found.reason) == (end, reason)


async def test_an_answer_counts_by_its_usage() -> None:
    usage = '{"prompt_tokens": 2, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 1}}'
    found = await replayed(
        200, f'data: {{"choices": [{{"text": "a"}}]}}\n\ndata: {{"choices": [], "usage": {usage}}}\n\ndata: [DONE]\n\n'
    )
    assert (found.end, found.num_tokens, found.num_prompt_tokens, found.num_cached_tokens) == ("answered", 3, 2, 1)
    assert found.ttft_s > 0


async def test_tokens_without_usage_are_counted_wherever_a_read_ends() -> None:
    stream = 'data: {"choices": [{"text": "a"}]}\n\n' * 3 + "data: [DONE]\n\n"
    found = await replayed(200, stream[:20], stream[20:45], stream[45:60], stream[60:])
    assert (found.end, found.num_tokens) == ("answered", 3)
