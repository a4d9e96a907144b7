"""The Ray actor in which one service of `halfmoon up` runs, as a child process that ends with it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import halfmoon
from halfmoon.rpc.processes.private_files import PRIVATE_UMASK
from halfmoon.up.on_ray.rooms import Place
from halfmoon.up.supervision.service_process import LocalProcess, ProcessStart, local_process
from halfmoon.up.this_host.reserved_ports import ReservedPorts

_GATHER_S = 0.02  # for which lines are gathered: each message of Ray costs about a millisecond


class ProcessActor:
    """Owns one child process, and the ports that are reserved for it. The child's stdin ends with this process."""

    def __init__(self, node: str, address: str) -> None:
        os.umask(PRIVATE_UMASK)
        self._place = Place(node, address, socket.gethostname(), sys.executable)
        self._ports = ReservedPorts()
        self._process: LocalProcess | None = None
        self._reading: asyncio.Task[None] | None = None
        self._lines: asyncio.Queue[bytes | None] = asyncio.Queue()

    async def place(self) -> tuple[Place, str]:
        """Returns where this is, and the version of Halfmoon that is installed there."""
        return self._place, halfmoon.__version__

    async def port(self) -> int:
        """Reserves a free port of this host."""
        return self._ports.port(self._place.address)

    async def start(self, start: ProcessStart, directory: str, files: Mapping[str, bytes]) -> int:
        """Starts the process, with a working `directory` and private `files` made before, and returns its id.

        Raises OSError.
        """
        os.makedirs(directory, exist_ok=True)
        await self.write_files(files)
        self._process = await local_process(start)
        self._reading = asyncio.create_task(self._read(self._process))
        return self._process.pid

    async def write_files(self, files: Mapping[str, bytes]) -> None:
        """Writes files, by path, that only this user may read. Each is replaced at once."""
        for name, content in files.items():
            path = Path(name)
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            beside = path.with_name(f".{path.name}.{os.getpid()}")
            beside.write_bytes(content)
            beside.replace(path)

    async def lines(self) -> AsyncIterator[bytes]:
        """Yields whole lines of the process, several at a time. May be called again where a call was broken off."""
        is_over = False
        while not is_over:
            gathered = [await self._lines.get()]
            await asyncio.sleep(_GATHER_S)
            while not self._lines.empty():
                gathered.append(self._lines.get_nowait())
            is_over = gathered[-1] is None
            yield b"".join(line for line in gathered if line is not None)

    async def wait(self) -> int:
        """Returns the exit status, as `ServiceProcess.wait`."""
        assert self._process is not None
        return await self._process.wait()

    async def signal(self, number: int) -> None:
        """Sends a signal to the process's session."""
        assert self._process is not None
        self._process.signal(signal.Signals(number))

    async def kill(self) -> None:
        """Kills the process alone."""
        assert self._process is not None
        self._process.kill()

    async def write(self, data: bytes) -> None:
        """Writes to the process's stdin."""
        assert self._process is not None
        self._process.write(data)

    async def _read(self, process: LocalProcess) -> None:
        async for line in process.lines():
            self._lines.put_nowait(line)
        self._lines.put_nowait(None)
