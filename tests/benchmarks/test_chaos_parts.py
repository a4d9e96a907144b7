"""What the chaos benchmark counts as lost, refused, changed and repeated, and how the soak's trends are drawn."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web

from benchmarks.chaos import all_faults
from benchmarks.chaos_parts.load import Load, run_load
from benchmarks.chaos_parts.samples import Sample, trend_table, trends
from benchmarks.chaos_parts.table import markdown, merged, read_json, write_json
from benchmarks.chaos_parts.trial import Outcome

ONE = Load(num_clients=1, num_streams=1, num_tokens=4, num_words=3)
WORDS = ("a", " b", " c", " d")


class Server:
    """A gateway that breaks each of its first streams after so many events; with `ids`, repeats go on."""

    def __init__(self, breaks_after: tuple[int, ...] = (), status: int = 200, ids: bool = True) -> None:
        self.breaks_after = list(breaks_after)
        self.status = status
        self.ids = ids
        self.asked: list[tuple[str, str | None]] = []

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions."""
        self.asked.append((request.headers["X-Request-Id"], request.headers.get("Last-Event-ID")))
        if self.status != 200:
            return web.json_response({"error": "come back later"}, status=self.status)
        response = web.StreamResponse()
        await response.prepare(request)
        begin = int(request.headers["Last-Event-ID"]) + 1 if "Last-Event-ID" in request.headers else 0
        for number in range(begin, len(WORDS)):
            if self.breaks_after and number >= self.breaks_after[0]:
                self.breaks_after.pop(0)
                assert request.transport is not None
                request.transport.abort()
                return response
            name = f"id: {number}\n" if self.ids else ""
            event = {"choices": [{"text": WORDS[number]}]}
            await response.write(f"{name}data: {json.dumps(event)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response


@asynccontextmanager
async def running(server: Server) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/v1/completions", server.completions)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def test_a_whole_answer() -> None:
    server = Server()
    async with running(server) as url:
        (stream,) = await run_load(url, ONE)
    assert (stream.text, stream.error, stream.num_repeats) == ("a b c d", None, 0)


async def test_a_broken_answer_is_lost_where_clients_do_not_repeat() -> None:
    server = Server(breaks_after=(2,))
    async with running(server) as url:
        (stream,) = await run_load(url, ONE)
    assert stream.error is not None
    assert not stream.is_refused
    assert stream.text == "a b"


@pytest.mark.parametrize("ids", [True, False], ids=["resumed", "from the start"])
async def test_a_repeat_goes_on_with_the_same_id(ids: bool) -> None:
    server = Server(breaks_after=(2, 3), ids=ids)
    async with running(server) as url:
        (stream,) = await run_load(url, replace(ONE, repeats=True))
    assert (stream.text, stream.error, stream.num_repeats) == ("a b c d", None, 2)
    assert len({request_id for request_id, _ in server.asked}) == 1
    assert [last for _, last in server.asked] == [None, "1" if ids else None, "2" if ids else None]


async def test_a_refusal_is_no_loss() -> None:
    async with running(Server(status=503)) as url:
        (refused,) = await run_load(url, ONE)
    async with running(Server(status=500)) as url:
        (failed,) = await run_load(url, ONE)
    assert (refused.is_refused, failed.is_refused) == (True, False)


def test_prompts_are_the_same_every_time_and_salts_are_not() -> None:
    assert ONE.body(3) == ONE.body(3)
    assert ONE.body(3)["prompt"] != ONE.body(4)["prompt"]
    assert "cache_salt" not in ONE.body(0)
    assert Load(salt="x").body(0)["cache_salt"] != Load(salt="y").body(0)["cache_salt"]


def test_rows_of_earlier_runs_stay_until_they_are_measured_again(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    write_json(file, [Outcome("b", 14, lost=3), Outcome("a", 14)])
    rows = merged(read_json(file), [Outcome("b", 14, back_after_s=2.25)], ["a", "b", "c"])
    assert [(row.fault, row.lost) for row in rows] == [("a", 0), ("b", 0)]
    table = markdown([*rows, Outcome("c", note="not tried: no root")])
    assert "| b | 0/14 |" in table
    assert "not tried: no root" in table
    assert {line.count("|") for line in table.splitlines()} == {13}


def test_every_fault_has_a_name_of_its_own() -> None:
    names = [fault.name for fault in all_faults()]
    assert len(names) == len(set(names)) > 30


def test_trends_are_of_processes_that_lived() -> None:
    steady = [Sample(60.0 * minute, "decode-0", 7, "rss", 100 + minute) for minute in range(31)]
    killed = [Sample(60.0 * minute, "decode-1", minute // 10, "rss", 5.0) for minute in range(31)]
    (trend,) = trends([*steady, *killed])
    assert (trend.service, trend.last) == ("decode-0", 130)
    assert trend.slope_per_hour == pytest.approx(60)
    assert "| rss | decode-0 |" in trend_table([trend])
