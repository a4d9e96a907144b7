"""`halfmoon up` as a child process, and what the tests ask of it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil

ROOT = Path(__file__).resolve().parents[2]
_READY = re.compile(r"halfmoon is ready: (\S+)")
_START_TIMEOUT_S = 120


class System:
    """Owns one running system: its process, its URL, what it printed."""

    def __init__(self, process: asyncio.subprocess.Process, url: str, printed: list[str]) -> None:
        self.process = process
        self.url = url
        self.printed = printed

    def descendants(self) -> list[psutil.Process]:
        """Every process that the command started."""
        return list(psutil.Process(self.process.pid).children(recursive=True))

    def serving(self, service: str) -> list[psutil.Process]:
        """The processes of a service that serve: the templates that forked them are left out."""
        alike = [process for process in self.descendants() if f"services.{service}" in process.cmdline()]
        return [process for process in alike if process.ppid() in {other.pid for other in alike}] or alike

    async def cluster(self, session: aiohttp.ClientSession) -> list[dict[str, Any]]:
        """The workers as the gateway sees them."""
        async with session.get(f"{self.url}/halfmoon/v1/cluster") as response:
            found: list[dict[str, Any]] = (await response.json())["workers"]
            return found


async def stored(session: aiohttp.ClientSession, num_blocks: int) -> None:
    """Waits until the stores have been given this many blocks."""
    found = 0
    while found < num_blocks:
        async with session.get("/halfmoon/v1/stores") as response:
            found = sum(store["num_stored_total"] for store in await response.json())
        await asyncio.sleep(0.1)


async def start_up(state_dir: Path, *options: str) -> asyncio.subprocess.Process:
    """`halfmoon up` on a free port, without waiting for anything."""
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "halfmoon.cli.app", "up", "--port", "0", "--no-console", "--state-dir", str(state_dir), *options),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=ROOT,
        env={**os.environ, "TERM": "dumb", "COLUMNS": "200"},
    )


@asynccontextmanager
async def running_system(
    state_dir: Path, *options: str, start_timeout_s: float = _START_TIMEOUT_S
) -> AsyncIterator[System]:
    """`halfmoon up`, until it printed that it is ready; stopped with Ctrl-C's signal."""
    process = await start_up(state_dir, *options)
    printed: list[str] = []
    try:
        url = await asyncio.wait_for(_until_ready(process, printed), start_timeout_s)
        drain = asyncio.create_task(_drain(process, printed))
        yield System(process, url, printed)
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
        await asyncio.wait_for(process.wait(), 30)
        await drain
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _until_ready(process: asyncio.subprocess.Process, printed: list[str]) -> str:
    assert process.stdout is not None
    url = ""
    async for line in process.stdout:
        printed.append(line.decode().rstrip())
        found = _READY.search(printed[-1])
        url = found.group(1) if found else url
        if url and printed[-1].startswith("curl"):  # the last line of the start
            return url
    await process.wait()
    raise AssertionError("halfmoon up ended before it was ready:\n" + "\n".join(printed))


async def _drain(process: asyncio.subprocess.Process, printed: list[str]) -> None:
    assert process.stdout is not None
    async for line in process.stdout:
        printed.append(line.decode().rstrip())  # noqa: PERF401  # tests read it meanwhile
