"""`halfmoon bench`: rates, conversations and traces, against any servers of OpenAI's API by turns."""

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
from halfmoon.replay.bench_load import LoadAmount, RequestLoad, Sent, SessionLoad
from halfmoon.replay.bench_report import markdown_table, search_line
from halfmoon.replay.client import Gateway
from halfmoon.replay.outcome import Outcome, ReplayTargets, summarized
from halfmoon.replay.sweep import Sweep, SweepOptions, highest_kept
from halfmoon.sim.workloads.lengths import named_lengths


def chunk(**fields: Any) -> bytes:
    return f"data: {json.dumps(fields)}\n\n".encode()


class Server:
    """Answers each body, and keeps it; those of a chat begin with an empty text."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.refuses_from: int | None = None  # all bodies after so many
        self.unknown: tuple[str, ...] = ()  # fields that are refused

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "first"}, {"id": "second", "max_model_len": 64}]})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if any(name in body for name in self.unknown):
            return web.json_response({"detail": "extra fields not permitted"}, status=422)
        if body.get("max_tokens") == 2:  # the first one, by which the client learns what the server takes
            return web.Response(body=self.stream(body))
        self.bodies.append(body)
        self.keys.add(request.headers.get("Authorization"))
        if self.refuses_from is not None and len(self.bodies) > self.refuses_from:
            return web.json_response({"error": {"code": "no_capacity"}}, status=429)
        return web.Response(body=self.stream(body))

    def stream(self, body: dict[str, Any]) -> bytes:
        choice: Any = {"text": "a"} if "prompt" in body else {"delta": {"content": f"said {len(self.bodies)}"}}
        opening = [] if "prompt" in body else [chunk(choices=[{"delta": {"content": ""}}])]
        usage = {"prompt_tokens": 4, "completion_tokens": body["max_tokens"]}
        end = [chunk(choices=[], usage=usage)] if "stream_options" in body else []
        return b"".join([*opening, chunk(choices=[choice]), *end, b"data: [DONE]\n\n"])


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
    assert [point["value"] for point in found["points"]] == [100, 200]
    assert [point["num_requests"] for point in found["points"]] == [100, 200]
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
    assert "100 a second: refused 90 (no_capacity 90)" in said


def test_nobody_there() -> None:
    result = CliRunner().invoke(app, ["bench", "http://127.0.0.1:9"])
    assert result.exit_code == 1


def rows(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_conversation_has_its_answers_in_its_prompts(server: tuple[str, Server], tmp_path: Path) -> None:
    url, state = server
    figures = tmp_path / "f.json"
    run(url, "--concurrency", "1", "--requests", "2", "--turns", "3", "--think", "0", "--json", str(figures))
    histories = [[message["role"] for message in body["messages"]] for body in state.bodies]
    assert histories == 2 * [
        ["user"],
        ["user", "assistant", "user"],
        ["user", "assistant", "user", "assistant", "user"],
    ]
    first, second = (body["messages"] for body in state.bodies[1:3])
    assert second[:3] == first
    assert [message["content"] for message in second if message["role"] == "assistant"] == ["said 1", "said 2"]
    point = json.loads(figures.read_text())["points"][0]
    assert point["num_requests"] == 6
    assert point["jobs_per_hour"] == point["jobs_in_time_per_hour"] > 0


def test_a_job_that_was_cut_short_is_not_counted(server: tuple[str, Server], tmp_path: Path) -> None:
    url, state = server
    state.refuses_from, figures = 4, tmp_path / "f.json"
    run(url, "--concurrency", "1", "--requests", "2", "--turns", "3", "--think", "0", "--json", str(figures))
    point = json.loads(figures.read_text())["points"][0]
    assert (point["num_requests"], point["num_refused"]) == (5, 1)
    assert len(state.bodies) == 5


def test_a_trace_of_sessions_is_sent_turn_by_turn(server: tuple[str, Server], tmp_path: Path) -> None:
    url, state = server
    turns = [{"session_id": "b", "timestamp": 100, "input_length": 5, "output_length": 3}]
    turns += [{"session_id": "a", "timestamp": 0, "input_length": 7, "output_length": 4}]
    turns += [{"session_id": "b", "delay": 1, "input_length": 6, "output_length": 5}]
    run(url, "--trace", str(rows(tmp_path / "jobs.jsonl", *turns)))
    sent = [
        (len(body["messages"][-1]["content"].split()), body["max_tokens"])
        for body in state.bodies
        if "messages" in body
    ]
    assert sent == [(5, 3), (6, 5)]  # a session of one turn is sent like any other request
    assert [(len(body["prompt"]), body["max_tokens"]) for body in state.bodies if "prompt" in body] == [(7, 4)]


def test_a_trace_of_requests_shares_what_its_blocks_share(server: tuple[str, Server], tmp_path: Path) -> None:
    url, state = server
    lines = [{"timestamp": 100 * at, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]} for at in range(2)]
    run(url, f"again={url}", "--trace", str(rows(tmp_path / "trace.jsonl", *lines)), "--rates", "20")
    prompts = [body["prompt"][:512] for body in state.bodies]
    assert len(prompts) == 4
    assert prompts[0] == prompts[1] != prompts[2] == prompts[3]


@pytest.mark.parametrize("unknown", [("ignore_eos",), ("stream_options",), ("ignore_eos", "stream_options")])
def test_a_server_that_refuses_parameters(server: tuple[str, Server], unknown: tuple[str, ...], tmp_path: Path) -> None:
    url, state = server
    state.unknown, figures = unknown, tmp_path / "f.json"
    said = run(url, "--rates", "100", "--seconds", "1", "--lengths", "in=4,out=3", "--json", str(figures))
    assert f"refuses {' and '.join(unknown)}" in said
    point = json.loads(figures.read_text())["points"][0]
    assert point["num_failed"] == 0
    assert point["num_output_tokens"] == (100 if "stream_options" in unknown else 300)


def test_several_servers_take_turns(server: tuple[str, Server], tmp_path: Path) -> None:
    url, state = server
    report = tmp_path / "r.md"
    arguments = ("--rates", "100,200", "--requests", "20", "--lengths", "in=4,out=3", "--markdown", str(report))
    said = run(f"one={url}", f"two={url}", "--model", "first", "--model", "second", "--repeat", "2", *arguments)
    order = [state.bodies[at]["model"] for at in range(0, 160, 20)]
    assert order == ["first", "second", "second", "first"] * 2
    assert "two beside one, 100 a second: TTFT p50" in said
    assert report.read_text().count("| two |") == 2
    prompts = [tuple(body["prompt"]) for body in state.bodies]
    assert len(set(prompts)) == len(prompts)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--rates", "1", "--concurrency", "1"), "choose one"),
        (("--concurrency", "1.5"), "whole numbers"),
        (("--rates", "x"), "numbers above 0"),
        (("--trace", "missing.jsonl"), "cannot be read"),
        (("--plot", "p.gif"), ".png or .html"),
        (("--markdown", "missing/r.md"), "not a directory"),
        (("--model", "a", "--model", "b"), "once for each"),
    ],
)
def test_wrong_options(server: tuple[str, Server], arguments: tuple[str, ...], says: str) -> None:
    url, state = server
    result = CliRunner().invoke(app, ["bench", url, *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 1
    assert says in result.output
    assert state.bodies == []


def test_a_wrong_row_of_a_session_is_named(server: tuple[str, Server], tmp_path: Path) -> None:
    url, _ = server
    trace = rows(tmp_path / "t.jsonl", {"session_id": 1, "input_length": 3, "output_length": 3}, {"session_id": 1})
    result = CliRunner().invoke(app, ["bench", url, "--trace", str(trace)], env={"COLUMNS": "200"})
    assert result.exit_code == 1
    assert "row 1" in result.output
    assert "input_length" in result.output


def test_a_plot_is_written(server: tuple[str, Server], tmp_path: Path) -> None:
    pytest.importorskip("vl_convert")
    url, _ = server
    plot = tmp_path / "p.png"
    run(url, "--rates", "100,200", "--requests", "20", "--lengths", "in=4,out=3", "--plot", str(plot))
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_search_ends_at_the_highest_rate_that_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfmoon.replay.sweep._SETTLE_S", 0.0)
    limits = {"fast": 13.0, "slow": 3.0}

    async def sent(self: RequestLoad, server: Gateway, value: float, seed: int, first_request: int) -> Sent:
        ttft_s = 1.0 if value <= limits[server.name] else 100.0
        return Sent([Outcome("answered", ttft_s=ttft_s, tbt_s=0.0, num_tokens=1)], 1.0, 1.0)

    monkeypatch.setattr(RequestLoad, "sent", sent)
    servers = [Gateway("http://x", "m", 100, False, name=name) for name in limits]
    load = RequestLoad(named_lengths("in=4,out=3"), LoadAmount(1.0))
    sweep = Sweep(servers, load, SweepOptions(ReplayTargets(10.0, 1.0), 0.9))
    sweep.search(1.0, 1.25)
    for name, limit in limits.items():
        best = highest_kept(sweep.points, name)
        assert best is not None
        assert limit / 1.25 <= best.value <= limit
    measured = [(point.server, point.value) for point in sweep.points]
    assert len(set(measured)) == len(measured)
    rates = [float(line.split("|")[1]) for line in markdown_table(sweep.points).splitlines()[2:]]
    assert rates == sorted(rates)
    assert not sweep.alone


@pytest.mark.parametrize(("alone_s", "num_points"), [(100.0, 1), (1.0, 5)])
def test_a_search_that_finds_no_rate_ends_soon(
    monkeypatch: pytest.MonkeyPatch, alone_s: float, num_points: int
) -> None:
    """At once, where requests miss the targets one at a time; else before its points take very long."""
    monkeypatch.setattr("halfmoon.replay.sweep._SETTLE_S", 0.0)
    begun = list[tuple[float, int]]()

    async def sent(self: RequestLoad | SessionLoad, server: Gateway, value: float, seed: int, first: int) -> Sent:
        ttft_s = alone_s if isinstance(self, SessionLoad) else 100.0
        outcomes = [Outcome("answered", ttft_s=ttft_s, tbt_s=0.0, num_tokens=1)] * self.num_requests(value)
        return Sent(outcomes, 1.0, 1.0)

    monkeypatch.setattr(RequestLoad, "sent", sent)
    monkeypatch.setattr(SessionLoad, "sent", sent)
    load, options = RequestLoad(named_lengths("in=4,out=3"), LoadAmount(20.0)), SweepOptions(ReplayTargets(10, 1), 0.9)
    servers = [Gateway("http://x", "m", 100, False, name="x")]
    sweep = Sweep(servers, load, options, lambda name, value, num: begun.append((value, num)))
    sweep.search(1.0, 1.25)
    assert highest_kept(sweep.points, "x") is None
    assert [value for value, _ in begun] == [1.0, 0.0, *[point.value for point in sweep.points[1:]]]
    assert begun[1] == (0.0, 5)
    assert len(sweep.points) == num_points
    assert sweep.least == pytest.approx(20 / 120)
    assert sum(load.arrivals_s(point.value) for point in sweep.points) < 320
    line = search_line(sweep, "x")
    assert line.startswith("none: 0 of 5 requests sent one at a time" if num_points == 1 else "none, down to 0.167 a")


@pytest.mark.parametrize(("attainment", "may_keep"), [(0.9, False), (0.5, True)])
def test_requests_one_at_a_time_are_judged_by_the_share_that_is_wanted(attainment: float, may_keep: bool) -> None:
    load, targets = RequestLoad(named_lengths("in=4,out=3"), LoadAmount(20.0)), ReplayTargets(10, 1)
    sweep = Sweep((), load, SweepOptions(targets, attainment))
    outcomes = [Outcome("answered", ttft_s=ttft_s, tbt_s=0.0, num_tokens=1) for ttft_s in (1.0, 1.0, 99.0, 99.0, 99.0)]
    sweep.alone["x"] = summarized(outcomes, targets, 1.0)
    assert sweep.may_keep("x") == may_keep


def test_a_search_says_why_it_found_nothing(server: tuple[str, Server]) -> None:
    url, state = server
    state.refuses_from = 0
    said = run(url, "--start", "100", "--seconds", "1", "--lengths", "in=4,out=3", "--turns", "2", "--think", "0")
    assert "one at a time, 6 requests" in said
    assert "in time: none: 0 of 3 requests sent one at a time were in time" in said
