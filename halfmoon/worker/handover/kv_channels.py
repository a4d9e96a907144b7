"""Links that carry KV to decode workers: one per address, each on a channel separate from control."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from halfmoon.rpc.credentials.credential import Credential
from halfmoon.rpc.peer import Peer
from halfmoon.rpc.transport.cuda_ipc import DeviceMemory
from halfmoon.rpc.transport.estimate import LinkEstimate
from halfmoon.rpc.transport.link import KVLink, LinkSettings
from halfmoon.rpc.transport.ranks import RankLinks

_MAX_IDLE = 32  # addresses change when workers restart; channels to old ones must not pile up


@dataclass(slots=True)
class _Channel:
    link: KVLink
    num_users: int = 0


class KVChannels:
    """Owns the links. Keeps used links for the next transfer and closes those unused for longest.

    `on_fallback` is called with the name of each transport that a receiver declined; `device` and `ranks` are passed to
    `KVLink`.
    """

    def __init__(
        self,
        settings: LinkSettings | None = None,
        on_fallback: Callable[[str], None] = lambda transport: None,
        device: DeviceMemory | None = None,
        max_idle: int = _MAX_IDLE,
        credential: Credential | None = None,
        ranks: RankLinks | None = None,
    ) -> None:
        self._settings = settings or LinkSettings()
        self._on_fallback = on_fallback
        self._device = device
        self._max_idle = max_idle
        self._credential = credential
        self._ranks = ranks
        self._channels: dict[str, _Channel] = {}  # least recently used first

    @contextmanager
    def to(self, address: str) -> Iterator[KVLink]:
        """Gives the link to `address` and keeps it open while inside."""
        channel = self._channels.pop(address, None) or _Channel(
            KVLink(
                Peer(address, self._credential, "worker"), self._settings, self._on_fallback, self._device, self._ranks
            )
        )
        self._channels[address] = channel
        channel.num_users += 1
        try:
            yield channel.link
        finally:
            channel.num_users -= 1

    def estimates(self) -> dict[str, LinkEstimate]:
        """Measured speed of each link by address; links not yet measured are left out."""
        estimates = {address: channel.link.estimator.estimate for address, channel in self._channels.items()}
        return {address: estimate for address, estimate in estimates.items() if estimate is not None}

    async def close_idle(
        self, max_idle: int | None = None, has_left: Callable[[str], bool] = lambda address: False
    ) -> None:
        """Closes unused channels except the `max_idle` most recent ones (None: as many as are kept).

        Those to addresses that have left the cluster are closed anyway: each holds a window of shared memory.
        """
        max_idle = self._max_idle if max_idle is None else max_idle
        idle = [address for address, channel in self._channels.items() if not channel.num_users]
        left = [address for address in idle if has_left(address)]
        idle = [address for address in idle if address not in left]
        closing = [self._channels.pop(address) for address in (*left, *idle[: max(0, len(idle) - max_idle)])]
        for channel in closing:  # already forgotten, so no transfer picks one up while it closes
            await channel.link.close()
