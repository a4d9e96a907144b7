"""A service's process on another host of a Ray cluster, as its supervisor sees it."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError

Actor = Any  # a handle of `ProcessActor`

_AGAIN_S = 1.0  # until an actor that could not be reached is asked again


class RemoteProcess:
    """Owns the actor of one process, which ends with it.

    A host that is gone counts as a process that was killed. One that cannot be reached for a moment does not: Ray says
    which it is.
    """

    def __init__(self, actor: Actor, host: str, pid: int, on_ended: Callable[[], None]) -> None:
        self._actor = actor
        self._host = host
        self._pid = pid
        self._on_ended = on_ended

    @property
    def pid(self) -> int:
        """See `ServiceProcess.pid`."""
        return self._pid

    @property
    def host(self) -> str:
        """See `ServiceProcess.host`."""
        return self._host

    async def lines(self) -> AsyncIterator[bytes]:
        """See `ServiceProcess.lines`. Ends when the host is gone, with a line that says so."""
        while True:
            try:
                async for batch in self._actor.lines.options(num_returns="streaming").remote():
                    for line in (await batch).splitlines(keepends=True):
                        yield line
                return
            except ActorUnavailableError:
                await asyncio.sleep(_AGAIN_S)
            except RayError:
                yield json.dumps({"level": "ERROR", "event": f"its host {self._host} is gone"}).encode() + b"\n"
                return

    async def wait(self) -> int:
        """See `ServiceProcess.wait`."""
        try:
            return int(await _answered(self._actor.wait.remote))
        except RayError:
            return -signal.SIGKILL
        finally:
            ray.kill(self._actor)
            self._on_ended()

    def signal(self, number: signal.Signals) -> None:
        """See `ServiceProcess.signal`. Returns before it has arrived."""
        self._actor.signal.remote(int(number))

    def kill(self) -> None:
        """See `ServiceProcess.kill`."""
        self._actor.kill.remote()

    def write(self, data: bytes) -> None:
        """See `ServiceProcess.write`."""
        self._actor.write.remote(data)


async def _answered(call: Callable[[], Awaitable[Any]]) -> Any:
    while True:
        try:
            return await call()
        except ActorUnavailableError:
            await asyncio.sleep(_AGAIN_S)
