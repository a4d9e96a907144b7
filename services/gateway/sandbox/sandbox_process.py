"""One process that does for the gateway what may kill a process; `sandbox_main.py` is its other end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Self

from halfmoon.errors import ServiceFailed, Unavailable
from halfmoon.rpc.credentials.child_environment import child_environment

_MOST_ANSWER_BYTES = 64 << 20
_MOST_S = 20.0  # of waiting for a busy host; the process limits its own CPU time


class SandboxProcess:
    """Owns the process. It answers one question at a time."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.is_fresh = True  # has answered nothing yet

    @classmethod
    async def start(cls) -> Self:
        """Starts a process."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "services.gateway.sandbox.sandbox_main"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,  # tracebacks on demand
            limit=_MOST_ANSWER_BYTES,
            env=child_environment(os.environ)
            | {
                "MALLOC_ARENA_MAX": "1",  # each arena would reserve 64 MiB of its memory
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            },
        )
        return cls(process)

    async def answer(self, question: Mapping[str, Any], most_s: float = _MOST_S) -> dict[str, Any]:
        """What the process answers to JSON values: `sandbox_main.py` says what there is.

        Raises ServiceFailed if the process died of it, and Unavailable if the host gave it no time. Whatever ends the
        wait early ends the process.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.is_fresh = False
        line = json.dumps(question)
        try:
            async with asyncio.timeout(most_s):
                with suppress(ConnectionError, RuntimeError):  # the latter from uvloop: it has ended, and was seen to
                    self._process.stdin.write(line.encode() + b"\n")
                    await self._process.stdin.drain()
                answer = await self._process.stdout.readline()
        except TimeoutError:
            await self.end()
            raise Unavailable("this host is too busy for this request: try again", retry_after_ms=1_000) from None
        except BaseException:
            await self.end()
            raise
        if not answer:
            raise ServiceFailed(f"the process ended with exit status {await self.end()}")
        reply: dict[str, Any] = json.loads(answer)
        return reply

    async def end(self) -> int:
        """Ends the process, if it still runs, and returns its exit status."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)
        return await self._process.wait()
