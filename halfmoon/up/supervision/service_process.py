"""A running service process as its supervisor sees it, and how one is started on this host."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from halfmoon.rpc.credentials.child_environment import child_environment
from halfmoon.rpc.server import SUPERVISED_ENV

_DEFAULTS = {"GRPC_VERBOSITY": "ERROR"}  # gRPC writes a line for each failed handshake, and so for each stranger


class ServiceProcess(Protocol):
    """A process with a session of its own, whose stdin is held open as long as it shall live."""

    @property
    def pid(self) -> int:
        """Its process id on its host."""

    @property
    def host(self) -> str:
        """The name of its host; "" for this one."""

    def lines(self) -> AsyncIterator[bytes]:
        """Yields what it and its children write, until all have closed their ends. May be iterated once."""

    async def wait(self) -> int:
        """Returns its exit status, or minus the number of the signal that ended it."""

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to its whole session."""

    def kill(self) -> None:
        """Kills this process alone, and not its children."""

    def write(self, data: bytes) -> None:
        """Writes to its stdin."""


@dataclass(frozen=True, slots=True)
class ProcessStart:
    """The interpreter, its arguments, the additional environment and the inherited descriptors of a process."""

    python: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    descriptors: tuple[int, ...] = ()


class LocalProcess:
    """A process of this host."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        """Its process id, which is also its session's."""
        return self._process.pid

    @property
    def host(self) -> str:
        """See `ServiceProcess.host`."""
        return ""

    @property
    def returncode(self) -> int | None:
        """What `wait` will return; None while it runs."""
        return self._process.returncode

    async def lines(self) -> AsyncIterator[bytes]:
        """See `ServiceProcess.lines`. Lines have any length; one that exceeds the buffer arrives in pieces."""
        stream = self._process.stdout
        assert stream is not None
        while True:
            try:
                line = await stream.readuntil(b"\n")
            except asyncio.IncompleteReadError as err:
                if err.partial:
                    yield err.partial
                return
            except asyncio.LimitOverrunError as err:
                line = await stream.readexactly(err.consumed)
            yield line

    async def wait(self) -> int:
        """See `ServiceProcess.wait`."""
        return await self._process.wait()

    def signal(self, number: signal.Signals) -> None:
        """See `ServiceProcess.signal`."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """See `ServiceProcess.kill`."""
        with suppress(ProcessLookupError):
            self._process.kill()

    def write(self, data: bytes) -> None:
        """See `ServiceProcess.write`."""
        assert self._process.stdin is not None
        self._process.stdin.write(data)


async def local_process(start: ProcessStart) -> LocalProcess:
    """Starts a process on this host. Of secrets it inherits only what its module reads. Raises OSError."""
    module = start.arguments[1] if start.arguments[:1] == ("-m",) else ""
    inherited = child_environment(os.environ, module)
    return LocalProcess(
        await asyncio.create_subprocess_exec(
            start.python,
            *start.arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            pass_fds=start.descriptors,
            env={**_DEFAULTS, **inherited, SUPERVISED_ENV: "1", "PYTHONUNBUFFERED": "1", **start.environment},
        )
    )
