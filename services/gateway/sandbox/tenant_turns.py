"""Turns by tenant at the few processes of the sandbox: expensive questions delay their own tenant's."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from halfmoon.errors import Unavailable

_RETRY_MS = 2_000


class TenantTurns:
    """Owns the places and who waits for one. Knows nothing of processes.

    A free place goes to the first of the waiting tenants that has none, or else to the first: a tenant gets a second
    place only while no other waits without one. Who gets a place goes behind the others.
    """

    def __init__(self, num_places: int) -> None:
        self._num_free = num_places
        self._taken: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by tenant, in the order of their turns

    @asynccontextmanager
    async def turn(self, tenant: str, most_s: float) -> AsyncIterator[None]:
        """Inside the block, the caller has a place. Raises Unavailable after waiting for `most_s`."""
        await self._take(tenant, most_s)
        try:
            yield
        finally:
            self._give_back(tenant)

    async def _take(self, tenant: str, most_s: float) -> None:
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(mine)
        self._grant()
        try:
            await asyncio.wait({mine}, timeout=most_s)
        except asyncio.CancelledError:
            self._withdraw(tenant, mine)
            raise
        if not mine.done():
            self._withdraw(tenant, mine)
            raise Unavailable(
                "too many structured outputs or templates are waiting to be checked: try again",
                retry_after_ms=_RETRY_MS,
            )

    def _withdraw(self, tenant: str, mine: asyncio.Future[None]) -> None:
        if mine.done():
            self._give_back(tenant)
            return
        self._waiting[tenant].remove(mine)
        if not self._waiting[tenant]:
            del self._waiting[tenant]

    def _give_back(self, tenant: str) -> None:
        self._num_free += 1
        self._taken[tenant] -= 1
        self._taken += Counter()  # forgets those that have none
        self._grant()

    def _grant(self) -> None:
        while self._num_free and self._waiting:
            tenant = next((name for name in self._waiting if not self._taken[name]), next(iter(self._waiting)))
            waiting = self._waiting.pop(tenant)
            waiting.popleft().set_result(None)
            if waiting:
                self._waiting[tenant] = waiting  # behind the others
            self._taken[tenant] += 1
            self._num_free -= 1
