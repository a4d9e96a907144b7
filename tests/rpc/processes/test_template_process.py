"""Services that are forked from a template: killed ones are back if wanted, failed and stopped ones are not."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from halfmoon.rpc.processes.template_process import FORK_AGAIN, was_ended_from_outside
from halfmoon.rpc.server import SUPERVISED_ENV

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs pidfd_open")

SERVICE = """
import asyncio, json, os, signal, sys
from pydantic_settings import BaseSettings
from halfmoon.errors import ServiceFailed
from halfmoon.rpc.server import until_told_to_stop
from halfmoon.rpc.service import service_config, service_main

class Settings(BaseSettings):
    model_config = service_config("kvstore")
    fails: bool = False
    crashes: bool = False

def load(settings):
    return os.getpid()

async def serve(settings, loaded):
    stopping = asyncio.ensure_future(until_told_to_stop())
    await asyncio.sleep(0)  # signals are handled from here on
    print(json.dumps({"event": "up", "pid": os.getpid(), "template": loaded}), file=sys.stderr, flush=True)
    if settings.fails:
        raise ServiceFailed("as asked")
    if settings.crashes:
        os.kill(os.getpid(), signal.SIGSEGV)
    print(json.dumps({"event": await stopping}), file=sys.stderr, flush=True)

service_main("kvstore", Settings, serve, load)
"""

TOLD_AT_ONCE = """
import os, signal
from halfmoon.rpc.processes import template_process

fork = os.fork

def told_at_once():
    pid = fork()
    if pid == 0:
        os.kill(os.getpid(), signal.SIGTERM)
    return pid

os.fork = told_at_once
template_process.fork_service()
"""


class Service:
    """A started service, and the events that it logs."""

    def __init__(self, process: Process) -> None:
        self.process = process

    async def event(self, name: str) -> dict[str, Any]:
        """The next event of this name."""
        assert self.process.stderr is not None
        async with asyncio.timeout(60):
            while line := await self.process.stderr.readline():
                event: dict[str, Any] = json.loads(line)
                if event["event"] == name:
                    return event
        raise AssertionError(f"the service ended without {name}")

    def want_again(self) -> None:
        """Does as the supervisor does when it lets the template fork again."""
        assert self.process.stdin is not None
        self.process.stdin.write(FORK_AGAIN)

    async def ended(self) -> int:
        """Its exit status."""
        async with asyncio.timeout(60):
            await self.process.communicate()
            return await self.process.wait()


@asynccontextmanager
async def service(*arguments: str, is_supervised: bool = True) -> AsyncIterator[Service]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HALFMOON_")}
    environment |= {SUPERVISED_ENV: "1"} if is_supervised else {}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SERVICE, *arguments, stdin=PIPE, stderr=PIPE, env=environment, start_new_session=True
    )
    try:
        yield Service(process)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.communicate()


async def test_a_killed_service_is_back_with_what_the_template_loaded() -> None:
    async with service() as it:
        pids = set()
        for _ in range(3):
            up = await it.event("up")
            assert up["template"] == it.process.pid
            pids.add(up["pid"])
            os.kill(up["pid"], signal.SIGKILL)
            assert (await it.event("service.killed"))["reason"] == "ended with SIGKILL"
            it.want_again()
        assert len(pids) == 3


async def test_a_service_that_was_stopped_alone_is_back() -> None:
    async with service() as it:
        os.kill((await it.event("up"))["pid"], signal.SIGTERM)
        assert (await it.event("service.killed"))["reason"] == "was told to stop"
        it.want_again()
        await it.event("up")


@pytest.mark.parametrize("whole_group", [True, False], ids=["with its template", "through its template"])
async def test_a_template_that_is_told_to_stop_ends_with_its_service(whole_group: bool) -> None:
    async with service() as it:
        await it.event("up")
        (os.killpg if whole_group else os.kill)(it.process.pid, signal.SIGTERM)
        await it.event("signal")
        assert await it.ended() == 0


async def test_without_its_supervisor_it_ends() -> None:
    async with service() as it:
        await it.event("up")
        assert it.process.stdin is not None
        it.process.stdin.close()
        await it.event("orphaned")
        assert await it.ended() == 0


async def test_without_its_template_it_serves_until_its_supervisor_is_gone() -> None:
    async with service() as it:
        await it.event("up")
        it.process.kill()
        assert it.process.stdin is not None
        it.process.stdin.close()
        assert (await it.event("orphaned"))["event"] == "orphaned"


async def test_without_its_supervisor_a_killed_service_is_not_back() -> None:
    async with service() as it:
        os.kill((await it.event("up"))["pid"], signal.SIGKILL)
        await it.event("service.killed")
        assert it.process.stdin is not None
        it.process.stdin.close()
        assert await it.ended() == -signal.SIGKILL


@pytest.mark.parametrize(("what", "exit_code"), [("fails", 1), ("crashes", -signal.SIGSEGV)])
async def test_a_service_that_fails_is_its_supervisors_to_restart(what: str, exit_code: int) -> None:
    async with service(f"--{what}", "true") as it:
        assert await it.ended() == exit_code


@pytest.mark.parametrize(
    ("exit_code", "expected"),
    [(0, True), (1, False), (3, False), (-signal.SIGKILL, True), (-signal.SIGTERM, True), (-signal.SIGSEGV, False),
     (-signal.SIGABRT, False), (-63, True)],
)  # fmt: skip
def test_which_ends_come_from_outside(exit_code: int, expected: bool) -> None:
    assert was_ended_from_outside(exit_code) is expected


async def test_a_service_that_is_told_to_stop_as_it_is_forked_ends() -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", TOLD_AT_ONCE, stdin=PIPE, stderr=PIPE)
    assert process.stdin is not None
    assert process.stderr is not None
    async with asyncio.timeout(60):
        assert await process.stderr.readline() == b"service.killed\n"
        process.stdin.close()
        await process.communicate()
    assert process.returncode == -signal.SIGTERM


async def test_a_service_started_by_hand_is_one_process() -> None:
    async with service(is_supervised=False) as it:
        up = await it.event("up")
        assert (up["pid"], up["template"]) == (it.process.pid, None)
