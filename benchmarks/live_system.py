"""A `halfmoon up` that runs as long as a benchmark needs it."""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp

_START_S = 180.0


@asynccontextmanager
async def running_system(
    arguments: Sequence[str], state_dir: Path, num_workers: int = 1, start_s: float = _START_S
) -> AsyncIterator[str]:
    """Yields the gateway's URL once `num_workers` have joined.

    Raises TimeoutError if they do not within `start_s`, and RuntimeError if `halfmoon up` ends before.
    """
    port = free_port()
    where = ("--port", str(port), "--state-dir", str(state_dir), "--no-console")
    command = (sys.executable, "-m", "halfmoon.cli.app", "up", "--slo", "off", *arguments, *where)
    process = await asyncio.create_subprocess_exec(*command, stdout=sys.stderr.fileno())
    try:
        url = f"http://127.0.0.1:{port}"
        await _until_ready(process, url, num_workers, start_s)
        yield url
    finally:
        with suppress(ProcessLookupError):  # it has ended and logged why
            process.terminate()
        await process.wait()


def free_port() -> int:
    """A port of this host that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


async def _until_ready(process: asyncio.subprocess.Process, url: str, num_workers: int, start_s: float) -> None:
    give_up_s = time.monotonic() + start_s
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < give_up_s:
            if process.returncode is not None:
                raise RuntimeError("halfmoon up ended, and said why above")
            try:
                async with session.get(f"{url}/halfmoon/v1/cluster") as response:
                    cluster = await response.json()
                    if not cluster["missing"] and len(cluster["workers"]) >= num_workers:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.2)
    raise TimeoutError(f"{url} was not ready within {start_s:g} s")
