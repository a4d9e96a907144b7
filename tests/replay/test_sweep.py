"""A sweep over rates, and `halfmoon bench`: seeded, open loop, against any server of OpenAI's API."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from typer.testing import CliRunner

from halfmoon.cli.app import app
from halfmoon.replay.outcome import ReplayTargets, summarized
from halfmoon.replay.sweep import RatePoint, Sweep, SweepLoad, highest_kept, markdown_table
from halfmoon.sim.workloads.lengths import named_lengths

LOAD = SweepLoad(named_lengths("in=4,out=3"), 1.0, 7, ReplayTargets(10.0, 1.0), 0.9)


def chunk(**fields: Any) -> bytes:
    return f"data: {json.dumps(fields)}\n\n".encode()


class Server:
    """Answers each body, and keeps it; those of a chat begin with an empty text."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.refuses_from: int | None = None  # all bodies after so many

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "first"}, {"id": "second", "max_model_len": 64}]})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.keys.add(request.headers.get("Authorization"))
        if self.refuses_from is not None and len(self.bodies) > self.refuses_from:
            return web.json_response({"error": {"code": "no_capacity"}}, status=429)
        choice: Any = {"text": "a"} if "prompt" in body else {"delta": {"content": "a"}}
        opening = [] if "prompt" in body else [chunk(choices=[{"delta": {"content": ""}}])]
        usage = {"prompt_tokens": 4, "completion_tokens": body["max_tokens"]}
        return web.Response(body=b"".join([*opening, chunk(choices=[choice]), chunk(choices=[], usage=usage)]))


@pytest.fixture
def server() -> Iterator[tuple[str, Server]]:
    """On a loop of its own: a sweep has one, too."""
    state, ready = Server(), Future[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]]()

    async def serve() -> None:
        routes = web.Application()
        routes.router.add_get("/v1/models", state.models)
        routes.router.add_post("/v1/completions", state.answer)
        routes.router.add_post("/v1/chat/completions", state.answer)
        async with TestServer(routes) as running:
            stop = asyncio.Event()
            ready.set_result((str(running.make_url("")).rstrip("/"), asyncio.get_running_loop(), stop))
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    url, loop, stop = ready.result(20)
    yield url, state
    loop.call_soon_threadsafe(stop.set)
    thread.join()


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["bench", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.output


def test_rates_are_measured_with_new_prompts_each(server: tuple[str, Server], tmp_path: Path) -> None:
    url, state = server
    figures, table = tmp_path / "f.json", tmp_path / "t.md"
    files = ("--json", str(figures), "--markdown", str(table))
    said = run(f"{url}/v1", "--rates", "200,100", "--seconds", "1", "--lengths", "in=4,out=3", "--api-key", "k", *files)
    found = json.loads(figures.read_text())
    assert [point["rate_per_s"] for point in found["rates"]] == [100, 200]
    assert [point["num_requests"] for point in found["rates"]] == [100, 200]
    assert "highest rate with 90% of requests in time" in said
    assert table.read_text() in said
    prompts = [tuple(body["prompt"]) for body in state.bodies]
    assert len(set(prompts)) == len(prompts) == 300
    assert {(len(body["prompt"]), body["max_tokens"], body["model"]) for body in state.bodies} == {(4, 3, "first")}
    assert state.keys == {"Bearer k"}


def test_the_same_seed_sends_the_same(server: tuple[str, Server]) -> None:
    url, state = server
    for seed in ("1", "1", "2"):
        run(url, "--rates", "500", "--seconds", "1", "--lengths", "in=4,out=3", "--seed", seed, "--model", "second")
    first, again, other = (sorted(body["prompt"] for body in state.bodies[at : at + 500]) for at in (0, 500, 1000))
    assert first == again != other


def test_a_chat_is_asked_with_words(server: tuple[str, Server]) -> None:
    url, state = server
    run(url, "--chat", "--rates", "100", "--seconds", "1", "--lengths", "in=4,out=3")
    assert all(len(body["messages"][0]["content"].split()) == 4 for body in state.bodies)
    assert all(body["ignore_eos"] for body in state.bodies)


def test_what_is_refused_is_not_in_time(server: tuple[str, Server]) -> None:
    url, state = server
    state.refuses_from = 10
    said = run(url, "--rates", "100", "--seconds", "1", "--lengths", "in=4,out=3")
    assert "in time: none" in said
    assert "| 90 |" in said


def test_nobody_there() -> None:
    result = CliRunner().invoke(app, ["bench", "http://127.0.0.1:9"])
    assert result.exit_code == 1


def test_a_search_ends_at_the_highest_rate_that_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(sweep: Sweep, rate_per_s: float) -> RatePoint:
        point = RatePoint(rate_per_s, rate_per_s <= 13, summarized([], LOAD.targets, 1.0))
        sweep.points.append(point)
        return point

    monkeypatch.setattr(Sweep, "measure", measure)
    sweep = Sweep(None, LOAD)  # type: ignore[arg-type]
    highest = sweep.search(1.0, 1.25)
    best = highest_kept(sweep.points)
    assert highest is not None
    assert best is not None
    assert 13 / 1.25 <= best.rate_per_s == highest <= 13
    rates = [float(line.split("|")[1]) for line in markdown_table(sweep.points).splitlines()[2:]]
    assert rates == sorted(rates)
