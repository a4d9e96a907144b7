"""A worker's connection to the store: who uses it, and whether it can be counted on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from halfmoon.errors import DeadlineExceeded, Unavailable
from halfmoon.rpc.breaker import CircuitBreaker
from halfmoon.rpc.kvstore_client import KVStoreClient


class StoreAway(Unavailable):
    """The store failed a moment ago, and is left alone for now."""


class StoreLink:
    """Owns the client, and when the store is left alone. Event-loop thread only.

    One failure is enough: whoever asks a store that is away waits for it, and a request must not.
    """

    def __init__(self, client: KVStoreClient, clock: Callable[[], float] = time.monotonic) -> None:
        self.client = client
        self._clock = clock
        self._breaker = CircuitBreaker(max_failures=1, pause_s=0.5)

    @contextmanager
    def use(self, salt: bytes) -> Iterator[KVStoreClient]:
        """The store as a tenant sees it. Raises StoreAway while it is left alone; what goes wrong inside is noted."""
        if not self._breaker.allows(self._clock()):
            raise StoreAway("the store is left alone for a while: it failed a moment ago")
        try:
            yield self.client.of_tenant(salt)
        except (Unavailable, DeadlineExceeded):
            self._breaker.failed(self._clock())
            raise
        except BaseException:
            self._breaker.succeeded()  # it answered, or the one who asked has gone
            raise
        self._breaker.succeeded()

    async def aclose(self) -> None:
        """Closes the connection."""
        await self.client.close()
