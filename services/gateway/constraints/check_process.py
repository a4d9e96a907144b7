"""One process that compiles constraints for the gateway; `check_main.py` is its other end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from contextlib import suppress
from typing import Self

from halfmoon.engine.request import Constraint
from halfmoon.errors import ServiceFailed, Unavailable
from halfmoon.rpc.credentials.child_environment import child_environment

_MOST_S = 20.0  # of waiting for a busy host; the process limits its own CPU time


class CheckProcess:
    """Owns the process. It serves one constraint at a time."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.is_fresh = True  # has checked nothing yet

    @classmethod
    async def start(cls) -> Self:
        """Starts a process."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "services.gateway.constraints.check_main"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,  # tracebacks on demand
            env=child_environment(os.environ)
            | {
                "MALLOC_ARENA_MAX": "1",  # each arena would reserve 64 MiB of its memory
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            },
        )
        return cls(process)

    async def problem(self, constraint: Constraint, most_s: float = _MOST_S) -> str | None:
        """Why the constraint cannot be used; None if it can.

        Raises ServiceFailed if the process died of it, and Unavailable if the host gave it no time. Whatever ends the
        wait early ends the process.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.is_fresh = False
        line = json.dumps({"kind": constraint.kind, "source": constraint.source})
        try:
            async with asyncio.timeout(most_s):
                with suppress(ConnectionError):
                    self._process.stdin.write(line.encode() + b"\n")
                    await self._process.stdin.drain()
                answer = await self._process.stdout.readline()
        except TimeoutError:
            await self.end()
            raise Unavailable("this host is too busy to check a constraint: try again", retry_after_ms=1_000) from None
        except BaseException:
            await self.end()
            raise
        if not answer:
            raise ServiceFailed(f"the process ended with exit status {await self.end()}")
        problem: str | None = json.loads(answer)["problem"]
        return problem

    async def end(self) -> int:
        """Ends the process, if it still runs, and returns its exit status."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)
        return await self._process.wait()
