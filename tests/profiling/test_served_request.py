"""Times of requests through a gateway, here a server whose events come as the test says."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import cycle
from typing import Any

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

from halfmoon.errors import Unavailable
from halfmoon.profiling.served_request import RequestTime, measured_request_time
from halfmoon.profiling.target import Cluster
from tests.profiling.profiling_fakes import FakeProbe


@asynccontextmanager
async def answering(*nums_events: int) -> AsyncIterator[str]:
    """A server whose answers have these numbers of events in turn; its URL."""
    nums = cycle(nums_events)

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b'data: {"text": "a"}\n\n' * next(nums))
        return response

    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    async with TestServer(app) as server:
        yield str(server.make_url(""))


async def times(*nums_events: int) -> RequestTime:
    prefill: Any = FakeProbe("prefill", set())
    decode: Any = FakeProbe("decode", set())
    async with answering(*nums_events) as url, ClientSession() as session:
        return await measured_request_time(session, Cluster(url, "model", ()), prefill, decode)


async def test_answers_that_come_in_one_piece_are_left_out() -> None:
    found = await times(4, 1, 2)  # as from a machine that stands still for the others
    assert found.answer_s == pytest.approx(0.001)
    assert found.token_s == 0  # the events of the first come within the 10 ms that a step takes alone


async def test_steps_that_no_answer_shows_are_said() -> None:
    with pytest.raises(Unavailable, match="come in one piece, so their steps cannot be timed"):
        await times(1, 2)


async def test_an_answer_without_a_token_is_an_error() -> None:
    with pytest.raises(Unavailable, match="ended without a token"):
        await times(0)
