"""Workers of another host join a running system.

Hosts are addresses of loopback, or network namespaces, each with services of its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import aiohttp
import pytest

from halfmoon.rpc.credentials.issue import issue_all
from tests.e2e.small_model import small_model
from tests.e2e.system import ROOT, System, running_system
from tests.network_namespace import HERE, network_namespace

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

FIRST, SECOND = "127.0.0.2", "127.0.0.3"
ANOTHER_CLOCK = ("unshare", "--time", "--monotonic", "864000", "--boottime", "864000")  # ten days ahead
PATIENCE_S = 120.0


def free_port(host: str) -> int:
    with socket.socket() as bound:
        bound.bind((host, 0))
        return int(bound.getsockname()[1])


@pytest.fixture
def other_clock() -> tuple[str, ...]:
    """What begins the commands of a host whose monotonic clock is another one; nothing where that cannot be."""
    can = subprocess.run([*ANOTHER_CLOCK, "true"], capture_output=True, check=False).returncode == 0
    return ANOTHER_CLOCK if can else ()


class TwoHosts(NamedTuple):
    """The first one's address, and what begins the commands of the second one."""

    first: str
    on_second: tuple[str, ...]


@pytest.fixture(params=["addresses", "namespaces"])
def two_hosts(request: pytest.FixtureRequest, other_clock: tuple[str, ...]) -> Iterator[TwoHosts]:
    if request.param == "addresses":
        yield TwoHosts(FIRST, ())
        return
    with network_namespace() as name:
        yield TwoHosts(HERE, ("ip", "netns", "exec", name, *other_clock))


@asynccontextmanager
async def joined(
    gateway: str, state_dir: Path, *options: str, is_awaited: bool = True, on_host: tuple[str, ...] = ()
) -> AsyncIterator[list[str]]:
    """`halfmoon join`, until its workers have joined if that `is_awaited`. Yields what it printed; ends with its
    interrupt.
    """
    process = await asyncio.create_subprocess_exec(
        *(*on_host, sys.executable, "-m", "halfmoon.cli.app", "join", gateway, "--state-dir", str(state_dir), *options),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=ROOT,
        env={**os.environ, "TERM": "dumb", "COLUMNS": "200"},
    )
    assert process.stdout is not None
    printed: list[str] = []
    try:
        async with asyncio.timeout(PATIENCE_S):
            while is_awaited and (line := await process.stdout.readline()):
                printed.append(line.decode())
                if "joined" in printed[-1]:  # or has not, and why
                    break
        yield printed
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
        async with asyncio.timeout(PATIENCE_S):
            printed.append((await process.stdout.read()).decode())
            await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def answer(system: System, session: aiohttp.ClientSession, prompt: str) -> str:
    body = {"model": "small", "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    async with session.post(f"{system.url}/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        return str((await response.json())["choices"][0]["text"])


async def test_a_second_host_joins_serves_and_leaves_without_a_lost_request(
    other_clock: tuple[str, ...], tmp_path: Path
) -> None:
    model, cluster = small_model(tmp_path / "small"), tmp_path / "cluster"
    (cluster / "worker").mkdir(parents=True)
    issue_all(cluster)
    port = free_port(FIRST)
    options = ("--model", str(model), "--dtype", "float32", "--host-address", FIRST, "--cluster-port", str(port))
    trust = ("--cluster-secret-file", str(cluster / "root" / "cluster_secret"), "--tls-dir", str(cluster / "root"))
    never = ("--set", "workers.all.calibrate=never")
    async with (
        running_system(tmp_path / "first", *options, *trust, *never) as system,
        aiohttp.ClientSession() as session,
    ):
        assert any(f"halfmoon join {FIRST}:{port}" in line for line in system.printed)
        prompts = [f"The {number} moons of " * 40 for number in range(8)]
        alone = [await answer(system, session, prompt) for prompt in prompts]
        second = ("--role", "decode", "--count", "2", "--model", str(model), "--host-address", SECOND)
        mine = ("--secrets", str(cluster / "worker"), "--set", "workers.all.dtype=float32", *never)
        async with joined(f"{FIRST}:{port}", tmp_path / "second", *second, *mine, on_host=other_clock) as printed:
            assert f"2 workers have joined {FIRST}:{port}" in printed[-1], "".join(printed)
            workers = await system.cluster(session)
            assert sorted(worker["address"].partition(":")[0] for worker in workers) == [FIRST, FIRST, SECOND, SECOND]
            together = await asyncio.gather(*(answer(system, session, prompt) for prompt in prompts))
            assert together == alone
            ages_s = [worker["age_s"] for worker in await system.cluster(session)]  # of heartbeats
            assert len(ages_s) == 4
            assert all(0 <= age_s < 3600 for age_s in ages_s)  # by the gateway's clock alone
            leaving = [asyncio.create_task(answer(system, session, prompt)) for prompt in prompts]
            await asyncio.sleep(0)
        assert [await task for task in leaving] == alone


async def test_ranks_of_one_worker_on_two_hosts_answer_as_one_process(two_hosts: TwoHosts, tmp_path: Path) -> None:
    model, cluster = small_model(tmp_path / "small"), tmp_path / "cluster"
    (cluster / "worker").mkdir(parents=True)
    issue_all(cluster)
    own = ("--model", str(model), "--dtype", "float32", "--set", "workers.all.calibrate=never")
    prompts = [f"The {number} moons of " * 40 for number in range(4)]
    async with running_system(tmp_path / "alone", *own) as system, aiohttp.ClientSession() as session:
        alone = [await answer(system, session, prompt) for prompt in prompts]

    meeting = f"{two_hosts.first}:{free_port(two_hosts.first)}"
    settings = {"tensor_parallel": 2, "pipeline_parallel": 2, "remote_ranks": 2, "rank_listen": meeting}
    cut = [part for name, value in settings.items() for part in ("--set", f"workers.decode.{name}={value}")]
    trust = ("--host-address", two_hosts.first, "--cluster-secret-file", str(cluster / "root" / "cluster_secret"))
    mine = ("--ranks", "2", "--model", str(model), "--secrets", str(cluster / "worker"))
    async with (
        joined(meeting, tmp_path / "second", *mine, is_awaited=False, on_host=two_hosts.on_second) as ranks,
        running_system(tmp_path / "first", *own, *trust, "--tls-dir", str(cluster / "root"), *cut) as system,
        aiohttp.ClientSession() as session,
    ):
        assert [await answer(system, session, prompt) for prompt in prompts] == alone
        asking = [asyncio.create_task(answer(system, session, prompt)) for prompt in prompts]
        services = json.loads((tmp_path / "second" / "services.json").read_text())["services"]
        os.kill(services[0]["pid"], signal.SIGKILL)  # of one rank: the worker begins anew, on both hosts
        assert await asyncio.gather(*asking) == alone
        assert any(f"decode-0 awaits 2 ranks: halfmoon join {meeting} --ranks 2" in line for line in system.printed)
    assert "2 ranks have joined" in "".join(ranks)


async def test_a_stranger_is_refused_with_a_reason(tmp_path: Path) -> None:
    model = small_model(tmp_path / "small")
    stranger = tmp_path / "stranger"
    (stranger / "worker").mkdir(parents=True)
    issue_all(stranger)
    port = free_port(FIRST)
    options = ("--engine", "sim", "--host-address", FIRST, "--cluster-port", str(port))
    async with running_system(tmp_path / "first", *options):
        mine = ("--role", "decode", "--model", str(model), "--secrets", str(stranger / "worker"))
        never = ("--set", "workers.all.calibrate=never")
        async with joined(f"{FIRST}:{port}", tmp_path / "second", *mine, *never) as printed:
            assert f"decode-0 has not joined {FIRST}:{port}" in printed[-1]
            assert "handshake" in printed[-1].lower() or "secret" in printed[-1]
