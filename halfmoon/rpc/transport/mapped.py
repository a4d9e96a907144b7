"""Other processes' shared memory, mapped once for all readers in this process."""

from __future__ import annotations

import asyncio
import socket

from halfmoon.errors import Incompatible, Unavailable
from halfmoon.rpc.transport.memfd import host_id, receive_segment


class MappedSegments:
    """Owns the mappings by segment name; each is dropped when its owner is gone. Needs a running loop."""

    def __init__(self) -> None:
        self._segments: dict[str, tuple[memoryview, socket.socket]] = {}
        self._mapping: dict[str, asyncio.Task[None]] = {}

    async def memory(self, place: str) -> memoryview:
        """Maps `<host id>/<name>`, read-only. Raises Incompatible on another host, Unavailable if the owner is gone."""
        host, _, name = place.partition("/")
        if name not in self._segments:
            if host != host_id():
                raise Incompatible("the shared memory is on another host or in another network namespace")
            if name not in self._mapping:
                self._mapping[name] = asyncio.create_task(self._map(name))
            await asyncio.shield(self._mapping[name])  # others wait, too, and could not close it if cancelled
        if name not in self._segments:
            raise Unavailable("the owner of the shared memory has gone")
        return self._segments[name][0]

    async def aclose(self) -> None:
        """Closes after mappings in progress have ended."""
        await asyncio.gather(*self._mapping.values(), return_exceptions=True)
        self.close()

    def close(self) -> None:
        """Drops every mapping; views in use keep its memory."""
        for name in list(self._segments):
            self._drop(name)

    async def _map(self, name: str) -> None:
        try:
            mapped = await asyncio.to_thread(receive_segment, name)
            self._segments[name] = mapped
            asyncio.get_running_loop().add_reader(mapped[1], self._drop, name)
        finally:
            del self._mapping[name]

    def _drop(self, name: str) -> None:
        _, connection = self._segments.pop(name)
        asyncio.get_running_loop().remove_reader(connection)
        connection.close()
