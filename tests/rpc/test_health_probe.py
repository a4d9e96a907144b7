"""The probe that container health checks run."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest
from prometheus_client import CollectorRegistry

from halfmoon.errors import DeadlineExceeded, Unavailable
from halfmoon.rpc.health_probe import probe
from halfmoon.rpc.server import running_server
from halfmoon.rpc.telemetry.rpc_metrics import RpcMetrics


async def test_a_server_serves_when_it_says_so() -> None:
    async with running_server("127.0.0.1:0", [], RpcMetrics(CollectorRegistry())) as server:
        address = f"127.0.0.1:{server.port}"
        assert await probe(address, deadline_s=20) == "NOT_SERVING"
        await server.set_serving()
        assert await probe(address, deadline_s=20) == "SERVING"
        process = await asyncio.create_subprocess_exec(sys.executable, "-m", "halfmoon.rpc.health_probe", address)
        assert await process.wait() == 0


async def test_nobody_there() -> None:
    with pytest.raises((Unavailable, DeadlineExceeded)):
        await probe("127.0.0.1:1")


@pytest.mark.parametrize(("arguments", "said"), [(["127.0.0.1:1"], "127.0.0.1:1: "), ([], "usage: ")])
def test_the_exit_status_is_the_answer(arguments: list[str], said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "halfmoon.rpc.health_probe", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert said in done.stderr
