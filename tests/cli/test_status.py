"""What `halfmoon status` shows."""

from __future__ import annotations

import asyncio
from io import StringIO
from pathlib import Path

import pytest
from aiohttp import web
from rich.console import Console
from typer.testing import CliRunner

from halfmoon.cli.app import app
from halfmoon.cli.status import cluster, health, services_table
from halfmoon.cli.terminal.host_tables import hosts_tables
from halfmoon.pb.gateway_pb2 import LinkSpeed, WorkerLoad
from halfmoon.up.state.state_lock import locked_state_dir
from halfmoon.up.state.written_state import ListedService, ServiceList, WrittenState, read_services
from halfmoon.up.until_stopped import UpContext, until_stopped
from halfmoon.up.up_options import UpOptions
from tests.services.gateway.fakes import running_fleet


def shown(listed: ServiceList, now_s: float) -> list[list[str]]:
    out = StringIO()
    Console(file=out, width=100).print(services_table(listed, now_s))
    return [line.split() for line in out.getvalue().splitlines()]


def test_services_are_listed_by_host_with_how_long_they_run() -> None:
    services = (ListedService("prefill-0", "beta", 7, 1_000.0), ListedService("gateway", "alpha", 5, 900.0))
    assert shown(ServiceList("http://x", services), 1_090.0)[1:] == [
        ["gateway", "alpha", "5", "3", "min"],
        ["prefill-0", "beta", "7", "90", "s"],
    ]


def test_without_a_running_system_it_says_so() -> None:
    result = CliRunner().invoke(app, ["status", "--state-dir", "[old]"])
    assert result.exit_code == 1
    assert "no `halfmoon up` runs with the state directory [old]" in result.output


def test_a_list_of_a_system_that_ended_is_not_believed(tmp_path: Path) -> None:
    (tmp_path / "services.json").write_text('{"url": "http://127.0.0.1:1", "services": []}')
    with locked_state_dir(tmp_path):
        running = CliRunner().invoke(app, ["status", "--state-dir", str(tmp_path)])
    ended = CliRunner().invoke(app, ["status", "--state-dir", str(tmp_path)])
    assert "http://127.0.0.1:1 does not answer" in running.output
    assert "no `halfmoon up` runs" in ended.output


async def test_what_an_earlier_run_left_is_gone_while_the_next_one_starts(tmp_path: Path) -> None:
    (tmp_path / "services.json").write_text('{"url": "http://127.0.0.1:1", "services": []}')
    seen: list[ServiceList | None] = []

    async def starting(context: UpContext) -> None:
        seen.append(read_services(tmp_path))

    await until_stopped(UpOptions(state_dir=tmp_path), Console(file=StringIO()), starting)
    assert seen == [ServiceList("", ())]


@pytest.mark.parametrize("gateway", ["10.0.0.1:7000", "[fd00::1]:7000"])
def test_workers_alone_name_the_gateways_that_they_join(gateway: str, tmp_path: Path) -> None:
    WrittenState(tmp_path, print, joins=gateway).write(())
    with locked_state_dir(tmp_path):
        result = CliRunner().invoke(app, ["status", "--state-dir", str(tmp_path)])
    assert result.exit_code == 0
    assert f"gateways at {gateway}" in result.output


@pytest.mark.parametrize("text", ["", "[]", '{"url": "x"}', '{"url": "x", "services": [{"name": "a"}]}'])
def test_a_damaged_list_counts_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "services.json").write_text(text)
    assert read_services(tmp_path) is None


async def test_a_gateway_that_cannot_place_a_request_says_why() -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=503, text="no prefill worker")

    application = web.Application()
    application.router.add_get("/health", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        assert await health(url) == "cannot place a request: no prefill worker"
    finally:
        await runner.cleanup()


async def test_hosts_and_their_links_are_shown_where_there_are_several(tmp_path: Path) -> None:
    out = StringIO()
    async with running_fleet(tmp_path) as fleet:
        worker = await fleet.add("p0", "prefill", host="alpha")
        decode = await fleet.add("d0", "decode", host="beta")
        link = LinkSpeed(address=decode.address, bandwidth_bytes_per_s=2e9, latency_s=0.25)
        worker.loads.put_nowait(WorkerLoad(sequence=3, links=[link]))
        async with asyncio.timeout(60):
            while fleet.cluster.worker("p0").member.load.sequence != 3:  # noqa: ASYNC110 (a report is no event)
                await asyncio.sleep(0)
        seen = await cluster(fleet.http, None)
    for table in hosts_tables(seen):
        Console(file=out, width=100).print(table)
    lines = [line.split() for line in out.getvalue().splitlines()]
    assert ["beta", "127.0.0.1", "1", "decode"] in lines
    assert ["alpha", "beta", "2", "250", "ms", "1"] in lines
    assert hosts_tables({**seen, "hosts": seen["hosts"][:1]}) == hosts_tables({}) == []


async def test_without_the_token_that_it_wants_a_gateway_shows_no_hosts(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, operator_token="o") as fleet:
        assert await cluster(fleet.http, None) == {}
        assert (await cluster(fleet.http, "o"))["hosts"] == []
