"""A store of objects for tests, which fails when told to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from halfmoon.errors import NotFound


class ColdMemory:
    """A `ColdClient` of a dict."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.is_down = False
        self.is_slow = False
        self.is_full = False
        self.num_refused = 0  # of the next puts
        self.num_puts = 0
        self.listed = asyncio.Event()

    async def put(self, name: str, data: bytes) -> None:
        self.num_puts += 1
        await self._arrive()
        if self.is_full:
            raise OSError(28, "No space left on device")
        if self.num_refused:
            self.num_refused -= 1
            raise ConnectionError("refused")
        self.objects[name] = data

    async def get(self, name: str) -> bytes:
        await self._arrive()
        if name not in self.objects:
            raise NotFound("no such object")
        return self.objects[name]

    async def delete(self, name: str) -> None:
        await self._arrive()
        self.objects.pop(name, None)

    async def list(self, prefix: str) -> AsyncIterator[tuple[str, int]]:
        await self._arrive()
        for name, data in list(self.objects.items()):
            if name.startswith(prefix):
                yield name, len(data)
        self.listed.set()

    async def close(self) -> None:
        pass

    async def _arrive(self) -> None:
        await asyncio.sleep(0)  # as with a server, others run meanwhile
        if self.is_slow:
            await asyncio.Event().wait()
        if self.is_down:
            raise ConnectionError("down")
