"""A worker's connection to the store, and whether it can be relied on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from halfmoon.errors import DeadlineExceeded, Unavailable
from halfmoon.rpc.breaker import CircuitBreaker
from halfmoon.rpc.store.kvstore_client import KVStoreClient


class StoreAway(Unavailable):
    """The store failed a moment ago and is not used for now."""


class StoreLink:
    """Owns the client and the pause after a failure. Event-loop thread only.

    One failure is enough for a pause: requests must not wait for a store that is away.
    """

    def __init__(self, client: KVStoreClient, clock: Callable[[], float] = time.monotonic) -> None:
        self.client = client
        self._clock = clock
        self._breaker = CircuitBreaker(max_failures=1, pause_s=0.5)

    @contextmanager
    def use(self, salt: bytes) -> Iterator[KVStoreClient]:
        """Gives the store as one tenant sees it. Raises StoreAway during a pause; errors inside count as failures."""
        if not self._breaker.allows(self._clock()):
            raise StoreAway("the store is not used for a while: it failed a moment ago")
        try:
            yield self.client.of_tenant(salt)
        except (Unavailable, DeadlineExceeded):
            self._breaker.failed(self._clock())
            raise
        except BaseException:
            self._breaker.succeeded()  # it answered, or the caller is gone
            raise
        self._breaker.succeeded()

    async def aclose(self) -> None:
        """Closes the connection."""
        await self.client.close()
