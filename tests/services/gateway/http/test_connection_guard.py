"""Strangers who hold connections shut nobody out, and none is held for ever. With real sockets."""

from __future__ import annotations

import asyncio
import json
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from halfmoon.rpc.processes.descriptors import raise_descriptor_limit
from services.gateway.http.connection_guard import ConnectionGuard
from tests.services.gateway.fakes import MODEL, PATIENCE_S, Fleet, Script, running_fleet

HEALTH = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
Stranger = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def strangers(fleet: Fleet, num: int) -> AsyncIterator[list[Stranger]]:
    host, port = fleet.http.removeprefix("http://").split(":")
    opened = [await asyncio.open_connection(host, int(port)) for _ in range(num)]
    try:
        yield opened
    finally:
        for _, writer in opened:
            writer.close()


async def rest(stranger: Stranger) -> bytes:
    """All that comes, to the end of the connection."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            return await stranger[0].read()
    except ConnectionError:
        return b""


async def answer(stranger: Stranger) -> bytes:
    """The head of an answer; its body is read, too."""
    head = await stranger[0].readuntil(b"\r\n\r\n")
    (length,) = [int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length")]
    await stranger[0].readexactly(length)
    return head


async def is_served(fleet: Fleet) -> bool:
    async with aiohttp.ClientSession() as session, session.get(f"{fleet.http}/v1/models") as response:
        return response.status == 200


async def test_an_honest_client_gets_in_while_strangers_hold_every_connection(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_fleet(tmp_path, max_connections=20) as fleet, strangers(fleet, 30) as held:
        assert await is_served(fleet)
        for stranger in held[:11]:  # the oldest
            assert await rest(stranger) == b""
        held[-1][1].write(HEALTH)
        assert (await answer(held[-1])).startswith(b"HTTP/1.1 200")
        assert 'connections_full_total{bound="total",outcome="oldest closed"} 1' in await fleet.metrics()
    (line,) = [record for record in caplog.records if record.message == "http.connections_full"]
    assert (line.levelname, line.bound, line.client) == ("WARNING", "total", "127.0.0.1")  # type: ignore[attr-defined]


def test_it_works_with_the_transports_of_uvloop(tmp_path: Path) -> None:
    """`run_service` takes uvloop where it is installed."""
    uvloop = pytest.importorskip("uvloop")

    async def one_of_each() -> None:
        async with running_fleet(tmp_path, max_connections=2) as fleet, strangers(fleet, 3) as held:
            assert await is_served(fleet)
            assert await rest(held[0]) == b""

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(one_of_each())


async def test_busy_connections_are_kept_and_the_excess_is_refused(tmp_path: Path) -> None:
    script = Script(decode_gate=asyncio.Event())
    assert script.decode_gate is not None
    async with running_fleet(tmp_path, max_connections_per_client=2) as fleet, aiohttp.ClientSession() as session:
        await fleet.pair(script)
        body = {"model": MODEL, "prompt": "x", "stream": True}
        streams = [await session.post(f"{fleet.http}/v1/completions", json=body) for _ in range(2)]
        async with strangers(fleet, 1) as (refused,):
            head, _, told = (await rest(refused)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503")
        assert b"Retry-After: 1" in head
        assert json.loads(told)["error"]["code"] == "too_many_connections"
        script.decode_gate.set()
        assert all([b"[DONE]" in await stream.read() for stream in streams])
        assert await is_served(fleet)


@pytest.mark.parametrize("sent", [b"", b"GET /v1/mod", b"GET /v1/models HTTP/1.1\r\nHost: local"])
async def test_a_connection_without_a_whole_head_is_closed(tmp_path: Path, sent: bytes) -> None:
    async with running_fleet(tmp_path, header_timeout_s=0.01) as fleet, strangers(fleet, 1) as (stranger,):
        stranger[1].write(sent)
        assert await rest(stranger) == b""


async def test_a_second_head_has_no_more_time_than_the_first(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, header_timeout_s=0.3) as fleet, strangers(fleet, 1) as (stranger,):
        stranger[1].write(HEALTH)
        assert (await answer(stranger)).startswith(b"HTTP/1.1 200")
        stranger[1].write(b"GET /v1/mod")
        assert await rest(stranger) == b""


async def test_an_idle_connection_is_closed(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, keepalive_timeout_s=0.3) as fleet, strangers(fleet, 1) as (stranger,):
        stranger[1].write(HEALTH)
        assert (await answer(stranger)).startswith(b"HTTP/1.1 200")
        assert await rest(stranger) == b""


async def test_closed_connections_do_not_count(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, max_connections_per_client=2) as fleet:
        for _ in range(10):
            assert await is_served(fleet)
        assert "connections_full_total{" not in await fleet.metrics()
        assert "halfmoon_gateway_connections 1.0" in await fleet.metrics()


def test_the_bound_leaves_descriptors_to_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1_024, 1_024))
    guard = ConnectionGuard(None, 0, 1.0, lambda bound, admitted: None)
    for number in range(768):
        assert guard.open.admit(object(), str(number)).bound is None  # type: ignore[arg-type]
    assert guard.open.admit(object(), "x").bound == "total"  # type: ignore[arg-type]


def test_the_soft_limit_is_raised_to_the_hard_one(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(1_024, 20_000)]
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda which, wanted: limits.append(wanted))
    assert raise_descriptor_limit() == 20_000
    assert raise_descriptor_limit() == 20_000
    assert limits == [(1_024, 20_000), (20_000, 20_000)]
    limits.append((1_024, resource.RLIM_INFINITY))
    assert raise_descriptor_limit() == 1 << 20


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models", "/nowhere"])
async def test_an_unknown_expectation_is_answered(tmp_path: Path, path: str, caplog: pytest.LogCaptureFixture) -> None:
    async with running_fleet(tmp_path) as fleet, aiohttp.ClientSession() as session:
        headers = {"Expect": "the unexpected"}
        async with session.request("POST", f"{fleet.http}{path}", data=b"{}", headers=headers) as response:
            assert response.status == 417
            assert response.headers["X-Request-Id"]
            error = (await response.json())["error"]
            assert (error["code"], error["type"]) == ("unknown_expectation", "invalid_request_error")
            assert "100-continue" in error["message"]
    assert not [record for record in caplog.records if record.exc_info]


def test_connections_are_served_on_uvloop_too(tmp_path: Path) -> None:
    """Its transports are no asyncio.Transport, and services run on it."""
    uvloop = pytest.importorskip("uvloop")

    async def served() -> bool:
        async with running_fleet(tmp_path) as fleet:
            return await is_served(fleet)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(served())
