"""Whom this worker may hand prompts over to: the members that its own gateways have named."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from halfmoon.background import Changes
from halfmoon.errors import Unavailable

_PATIENCE_S = 2.0  # a request may overtake the news of a worker that has just joined


class DecodePeers:
    """Owns the addresses that each gateway has named. `is_open`: every address will do. Event-loop thread only."""

    def __init__(self, *, is_open: bool) -> None:
        self._is_open = is_open
        self._named: dict[str, set[str]] = {}  # by the gateway's address
        self._changes = Changes()

    def begin_anew(self, gateway: str) -> None:
        """Forgets what the gateway has named: it is about to name all."""
        self._named[gateway] = set()

    def forget(self, gateway: str) -> None:
        """Forgets a gateway that this worker has left."""
        self._named.pop(gateway, None)

    def change(self, gateway: str, joined: Iterable[str], left: Iterable[str]) -> None:
        """Takes what a gateway says about its members."""
        self._named.setdefault(gateway, set()).difference_update(left)
        self._named[gateway].update(joined)
        self._changes.notify()

    def has_left(self, address: str) -> bool:
        """Whether this worker has gateways, and none of them names the address now."""
        return bool(self._named) and not self._is_named(address)

    async def check(self, address: str, patience_s: float = _PATIENCE_S) -> None:
        """Returns once a gateway has named the address. Raises Unavailable if none does within `patience_s`."""
        try:
            async with asyncio.timeout(patience_s):
                while not (self._is_open or self._is_named(address)):
                    await self._changes.next()
        except TimeoutError:
            raise Unavailable(f"no gateway of this worker has a member at {address} that takes prompts over") from None

    def _is_named(self, address: str) -> bool:
        return any(address in named for named in self._named.values())
