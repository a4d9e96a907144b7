"""Links that carry KV to decode workers, one an address, each with a channel apart from control."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from halfmoon.rpc.peer import Peer
from halfmoon.rpc.transport.cuda_ipc import DeviceMemory
from halfmoon.rpc.transport.estimate import LinkEstimate
from halfmoon.rpc.transport.link import KVLink, LinkSettings

_MAX_IDLE = 32  # addresses change when workers restart; channels to old ones must not pile up


@dataclass(slots=True)
class _Channel:
    link: KVLink
    num_users: int = 0


class KVChannels:
    """Owns the links; a used one is kept for the next transfer, the longest unused ones are closed.

    `on_fallback` hears the name of each transport that a receiver declined; `device` is that of `KVLink`.
    """

    def __init__(
        self,
        settings: LinkSettings | None = None,
        on_fallback: Callable[[str], None] = lambda transport: None,
        device: DeviceMemory | None = None,
        max_idle: int = _MAX_IDLE,
    ) -> None:
        self._settings = settings or LinkSettings()
        self._on_fallback = on_fallback
        self._device = device
        self._max_idle = max_idle
        self._channels: dict[str, _Channel] = {}  # least recently used first

    @contextmanager
    def to(self, address: str) -> Iterator[KVLink]:
        """The link to `address`; it is not closed while inside."""
        channel = self._channels.pop(address, None) or _Channel(
            KVLink(Peer(address), self._settings, self._on_fallback, self._device)
        )
        self._channels[address] = channel
        channel.num_users += 1
        try:
            yield channel.link
        finally:
            channel.num_users -= 1

    def estimates(self) -> dict[str, LinkEstimate]:
        """How fast the links are, by address, as far as that is known."""
        found = {address: channel.link.estimator.estimate for address, channel in self._channels.items()}
        return {address: estimate for address, estimate in found.items() if estimate is not None}

    async def close_idle(self, max_idle: int | None = None) -> None:
        """Closes channels that nobody uses, beyond the `max_idle` most recent ones (None: as many as are kept)."""
        max_idle = self._max_idle if max_idle is None else max_idle
        idle = [address for address, channel in self._channels.items() if not channel.num_users]
        closing = [self._channels.pop(address) for address in idle[: max(0, len(idle) - max_idle)]]
        for channel in closing:  # no longer known, so that nobody takes one meanwhile
            await channel.link.close()
