"""The system under test: one `halfmoon up` with its processes, its logs and what its gateway says of its workers."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import psutil

_STOP_S = 60.0
_IDLE = ("num_running", "num_waiting", "num_reserved", "num_held")


class System:
    """Owns the process of `halfmoon up`. Knows nothing of load and faults."""

    def __init__(self, process: asyncio.subprocess.Process, url: str, state_dir: Path, num_workers: int) -> None:
        self.process = process
        self.url = url
        self.state_dir = state_dir
        self.num_workers = num_workers
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2))

    def processes(self) -> dict[str, list[psutil.Process]]:
        """The processes that serve, by role, oldest first. The templates that fork them are left out."""
        found: dict[str, list[psutil.Process]] = {}
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children():
                with suppress(psutil.NoSuchProcess):
                    role = next((part[9:] for part in child.cmdline() if part.startswith("services.")), None)
                    if role is not None:
                        forked = (one for one in child.children() if one.cmdline() == child.cmdline())
                        found.setdefault(role, []).append(next(forked, child))
        return {role: sorted(ones, key=psutil.Process.create_time) for role, ones in found.items()}

    async def workers(self) -> list[dict[str, Any]]:
        """The members as a gateway tells them; none while no gateway answers."""
        try:
            async with self._http.get(f"{self.url}/halfmoon/v1/cluster") as response:
                found: list[dict[str, Any]] = (await response.json())["workers"]
                return found
        except (aiohttp.ClientError, TimeoutError, OSError):
            return []

    async def answers(self) -> bool:
        """Whether the gateway could place a request now."""
        try:
            async with self._http.get(f"{self.url}/health") as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    async def until_whole(self, timeout_s: float) -> bool:
        """Waits until every worker is a member and nothing runs; False if that takes longer than `timeout_s`."""
        give_up_s = time.monotonic() + timeout_s
        while time.monotonic() < give_up_s and self.process.returncode is None:
            workers = await self.workers()
            is_idle = not any(worker["load"][name] for worker in workers for name in _IDLE)
            if len(workers) >= self.num_workers and is_idle and await self.answers():
                return True
            await asyncio.sleep(0.2)
        return False

    async def used_blocks(self) -> int:
        """KV blocks of all workers that neither are free nor can be evicted."""
        return sum(worker["total_blocks"] - worker["load"]["free_blocks"] for worker in await self.workers())

    def log_sizes(self) -> dict[Path, int]:
        """Bytes of each log now, for `log_lines`."""
        return {path: path.stat().st_size for path in (self.state_dir / "logs").glob("*")}

    def log_lines(self, since: Mapping[Path, int]) -> Iterator[str]:
        """Lines that were written after `since`."""
        for path in sorted((self.state_dir / "logs").glob("*")):
            with suppress(OSError), path.open("rb") as file:
                file.seek(min(since.get(path, 0), path.stat().st_size))
                yield from file.read().decode(errors="replace").splitlines()

    def count_lines(self, since: Mapping[Path, int]) -> Counter[str]:
        """Numbers of WARNING and ERROR lines and of tracebacks after `since`."""
        found: Counter[str] = Counter()
        for line in self.log_lines(since):
            found["WARNING"] += '"level": "WARNING"' in line
            found["ERROR"] += '"level": "ERROR"' in line or '"level": "CRITICAL"' in line
            found["traceback"] += "Traceback (most recent call last)" in line
        return found

    async def close(self) -> None:
        """Stops it, by force if it does not end by itself. Idempotent."""
        await self._http.close()
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGINT)
            with suppress(TimeoutError):
                await asyncio.wait_for(self.process.wait(), _STOP_S)
        if self.process.returncode is None:
            self.process.kill()
            await self.process.wait()


@asynccontextmanager
async def running_system(
    arguments: Sequence[str],
    state_dir: Path,
    num_workers: int,
    environment: Mapping[str, str],
    whole_within_s: float = 240.0,
) -> AsyncIterator[System]:
    """A system whose workers have all joined. Raises RuntimeError if it does not start."""
    port = _free_port()
    command = (sys.executable, "-m", "halfmoon.cli.app", "up", "--slo", "off", "--no-console", *arguments)
    where = ("--port", str(port), "--state-dir", str(state_dir))
    state_dir.mkdir(parents=True, exist_ok=True)
    with (state_dir.parent / f"{state_dir.name}.up.log").open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            *command, *where, stdout=output, stderr=output, env={**os.environ, **environment}
        )
    system = System(process, f"http://127.0.0.1:{port}", state_dir, num_workers)
    try:
        if not await system.until_whole(whole_within_s):
            said = (state_dir.parent / f"{state_dir.name}.up.log").read_text().strip()
            raise RuntimeError(f"halfmoon up did not start: {said[-200:]}")
        yield system
    finally:
        await system.close()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
