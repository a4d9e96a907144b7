"""A `halfmoon up` that runs as long as a benchmark needs it."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp

_START_S = 180.0


@asynccontextmanager
async def running_system(arguments: Sequence[str], state_dir: Path, num_workers: int = 1) -> AsyncIterator[str]:
    """Yields the gateway's URL once `num_workers` have joined. Raises TimeoutError after three minutes."""
    port = random.randrange(20_000, 60_000)
    where = ("--port", str(port), "--state-dir", str(state_dir), "--no-console")
    command = (sys.executable, "-m", "halfmoon.cli.app", "up", "--slo", "off", *arguments, *where)
    process = await asyncio.create_subprocess_exec(*command, stdout=sys.stderr.fileno())
    try:
        url = f"http://127.0.0.1:{port}"
        await _until_ready(url, num_workers)
        yield url
    finally:
        with suppress(ProcessLookupError):  # it has ended and logged why
            process.terminate()
        await process.wait()


async def _until_ready(url: str, num_workers: int) -> None:
    give_up_s = time.monotonic() + _START_S
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < give_up_s:
            try:
                async with session.get(f"{url}/halfmoon/v1/cluster") as response:
                    cluster = await response.json()
                    if not cluster["missing"] and len(cluster["workers"]) >= num_workers:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.2)
    raise TimeoutError(f"{url} was not ready within {_START_S:g} s")
