"""`halfmoon drain`, `restart` and `role`, at a gateway whose workers are fakes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from halfmoon.cli.app import app
from halfmoon.cli.gateway_options import GatewayOptions, gateway_url
from halfmoon.cli.workers.drain import until_left
from halfmoon.cli.workers.restart import restart_one
from halfmoon.errors import InvalidRequest, Unavailable
from halfmoon.up.state.state_lock import locked_state_dir
from halfmoon.up.state.written_state import SERVICES_FILE
from tests.services.gateway.fakes import FakeWorker, Fleet, running_fleet
from tests.services.gateway.test_access import ask


async def leave(worker: FakeWorker) -> None:
    """As a worker that has nothing to finish."""
    while not worker.drains:  # noqa: ASYNC110
        await asyncio.sleep(0)
    worker.end_registration.set()


async def leave_and_return(fleet: Fleet, worker: FakeWorker) -> None:
    await leave(worker)
    await fleet.add("d9", "decode")


async def test_it_returns_when_the_worker_has_left(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet, GatewayOptions(gateway=fleet.http).control_api() as api:
        await fleet.pair()
        worker = await fleet.add("e0", "decode")
        leaving = asyncio.create_task(leave(worker))
        assert (await api.change("e", "drain", {}))["worker_id"] == "e0"
        await until_left(api, "e0")
        await leaving
        assert worker.drains == [False]
        assert {one["worker_id"] for one in await api.workers()} == {"p0", "d0"}


async def test_a_restart_waits_for_the_successor(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet, GatewayOptions(gateway=fleet.http).control_api() as api:
        await fleet.pair()
        worker = await fleet.add("e0", "decode")
        returning = asyncio.create_task(leave_and_return(fleet, worker))
        assert await restart_one(api, "e0", force=False) == "e0"
        assert {one["worker_id"] for one in await api.workers()} == {"p0", "d0", "d9"}
        await returning
        assert worker.drains == [True]


async def test_a_role_is_changed_in_the_users_name(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet, GatewayOptions(gateway=fleet.http).control_api() as api:
        await fleet.pair()
        await fleet.add("e0", "decode")
        changed = await api.change("e0", "role", {"role": "prefill"})
        assert (changed["before"], changed["role"]) == ("decode", "prefill")
        while not (rows := (await ask(fleet, "GET", "/halfmoon/v1/worker_changes"))[2]):  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert "@" in rows[0]["changed_by"]


def test_a_role_that_does_not_exist_is_not_asked_for() -> None:
    result = CliRunner().invoke(app, ["role", "e0", "cook", "--gateway", "http://127.0.0.1:9"])
    assert result.exit_code == 2
    assert "prefill, decode, both" in result.output


async def test_a_refusal_says_why(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet, GatewayOptions(gateway=fleet.http).control_api() as api:
        await fleet.pair()
        with pytest.raises(InvalidRequest, match="last worker that can decode"):
            await restart_one(api, "d0", force=False)


async def test_who_does_not_leave_is_told(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet, GatewayOptions(gateway=fleet.http).control_api() as api:
        await fleet.pair()
        with pytest.raises(Unavailable, match=r"still here within 0\.05 s"):
            await api.until(lambda workers: not workers, 0.05, "still here")


async def test_a_gateway_that_is_not_there() -> None:
    async with GatewayOptions(gateway="http://127.0.0.1:9").control_api() as api:
        with pytest.raises(Unavailable, match="does not answer"):
            await api.workers()


def test_a_command_asks_what_runs_with_its_state_directory(tmp_path: Path) -> None:
    (tmp_path / SERVICES_FILE).write_text(json.dumps({"url": "http://127.0.0.1:8123", "services": []}))
    assert gateway_url(None, tmp_path) == "http://127.0.0.1:8000", "what was written has ended"
    with locked_state_dir(tmp_path):
        assert gateway_url(None, tmp_path) == "http://127.0.0.1:8123"
        assert gateway_url("http://elsewhere/", tmp_path) == "http://elsewhere"


def test_a_gateway_that_was_not_named_and_does_not_answer_can_be(tmp_path: Path) -> None:
    (tmp_path / SERVICES_FILE).write_text(json.dumps({"url": "http://127.0.0.1:9", "services": []}))
    command = ["drain", "decode", "--state-dir", str(tmp_path)]
    with locked_state_dir(tmp_path):
        found, named = (
            CliRunner().invoke(app, [*command, *more]) for more in ((), ("--gateway", "http://127.0.0.1:9"))
        )
    assert "does not answer" in found.stderr
    assert "name it by --gateway" in found.stderr
    assert "does not answer" in named.stderr
    assert "name it by" not in named.stderr


def test_what_is_no_url_is_answered_as_any_other() -> None:
    result = CliRunner().invoke(app, ["drain", "d", "--gateway", "http://[::1"])
    assert (result.exit_code, "does not answer" in result.stderr) == (1, True), result.exception
