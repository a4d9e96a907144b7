"""Channels that carry KV to decode workers, one an address, apart from control."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from halfmoon.rpc.peer import Peer

_MAX_IDLE = 32  # addresses change when workers restart; channels to old ones must not pile up


@dataclass(slots=True)
class _Channel:
    peer: Peer
    num_users: int = 0


class KVChannels:
    """Owns the channels; a used one is kept for the next transfer, the longest unused ones are closed."""

    def __init__(self) -> None:
        self._channels: dict[str, _Channel] = {}  # least recently used first

    @contextmanager
    def to(self, address: str) -> Iterator[Peer]:
        """The channel to `address`; it is not closed while inside."""
        channel = self._channels.pop(address, None) or _Channel(Peer(address))
        self._channels[address] = channel
        channel.num_users += 1
        try:
            yield channel.peer
        finally:
            channel.num_users -= 1

    async def close_idle(self, max_idle: int = _MAX_IDLE) -> None:
        """Closes channels that nobody uses, beyond the `max_idle` most recent ones."""
        idle = [address for address, channel in self._channels.items() if not channel.num_users]
        for address in idle[: max(0, len(idle) - max_idle)]:
            await self._channels.pop(address).peer.close()
