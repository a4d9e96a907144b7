"""A worker's links to whom it may load KV from: the stores that its gateways name, its own store, other workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Literal

from halfmoon.errors import DeadlineExceeded, Unavailable
from halfmoon.rpc.breaker import CircuitBreaker
from halfmoon.rpc.store.kvstore_client import KVStoreClient

HolderKind = Literal["store", "worker"]


def _client(address: str, kind: HolderKind) -> KVStoreClient:
    return KVStoreClient(address, server_role=kind)


class StoreAway(Unavailable):
    """The store failed a moment ago and is not used for now."""


class StoreLink:
    """Owns the client and the pause after a failure. Event-loop thread only.

    One failure is enough for a pause: requests must not wait for a store that is away.
    """

    def __init__(self, client: KVStoreClient) -> None:
        self.client = client
        self._breaker = CircuitBreaker(max_failures=1, pause_s=0.5)

    @contextmanager
    def use(self, salt: bytes) -> Iterator[KVStoreClient]:
        """Gives the store as one tenant sees it. Raises StoreAway during a pause; errors inside count as failures."""
        if not self._breaker.allows(time.monotonic()):
            raise StoreAway("the store is not used for a while: it failed a moment ago")
        try:
            yield self.client.of_tenant(salt)
        except (Unavailable, DeadlineExceeded):
            self._breaker.failed(time.monotonic())
            raise
        except BaseException:
            self._breaker.succeeded()  # it answered, or the caller is gone
            raise
        self._breaker.succeeded()

    async def aclose(self) -> None:
        """Closes the connection."""
        await self.client.close()


class SourceLinks:
    """Owns one link to each holder, made on demand, and what each gateway has named. Event-loop thread only.

    A link to a store is closed when no gateway names the store any more. Knows nothing of what holders hold.
    """

    def __init__(
        self,
        own: str | None = None,
        connect: Callable[[str, HolderKind], KVStoreClient] = _client,
        *,
        is_open: bool = True,
    ) -> None:
        """own: host:port of the worker's nearest store, which needs no naming; None: it has none.

        is_open: every worker will do, also one that no gateway has named.
        """
        self._own = own
        self._is_open = is_open
        self._workers: dict[str, set[str]] = {}  # by the gateway's address
        self._connect = connect
        self._links: dict[tuple[str, HolderKind], StoreLink] = {}
        self._named: dict[str, frozenset[str]] = {}  # by the gateway's address

    @property
    def own(self) -> StoreLink | None:
        """The link to the worker's nearest store; None without one."""
        return None if self._own is None else self.to(self._own)

    @property
    def own_address(self) -> str | None:
        """Address of the worker's nearest store; None without one."""
        return self._own

    @property
    def stores(self) -> tuple[str, ...]:
        """Addresses of the pool's stores, the worker's own one first."""
        named = frozenset[str]().union(*self._named.values())
        own = () if self._own is None else (self._own,)
        return *own, *sorted(named.difference(own))

    async def name_stores(self, gateway: str, addresses: Iterable[str]) -> None:
        """Takes all stores that a gateway knows, in place of those it named before."""
        self._named[gateway] = frozenset(addresses)
        for address, kind in list(self._links):
            if kind == "store" and address not in self.stores:
                await self.close(address, kind)

    async def forget(self, gateway: str) -> None:
        """Forgets a gateway that this worker has left, and what it alone had named."""
        self._workers.pop(gateway, None)
        await self.name_stores(gateway, ())
        del self._named[gateway]

    def begin_anew(self, gateway: str) -> None:
        """Forgets the workers that the gateway has named: it is about to name all."""
        self._workers[gateway] = set()

    def change_workers(self, gateway: str, joined: Iterable[str], left: Iterable[str]) -> None:
        """Takes what a gateway says about its workers, whose prefix caches may be read."""
        self._workers.setdefault(gateway, set()).difference_update(left)
        self._workers[gateway].update(joined)

    async def close(self, address: str, kind: HolderKind) -> None:
        """Closes the link to a holder that is not used, if there is one."""
        link = self._links.pop((address, kind), None)
        if link is not None:
            await link.aclose()

    def to(self, address: str, kind: HolderKind = "store") -> StoreLink:
        """The link to a holder. Raises Unavailable for one that no gateway of this worker names."""
        if kind == "store" and address not in self.stores:
            raise Unavailable(f"no gateway of this worker names a store at {address}")
        if kind == "worker" and not self._is_open and not any(address in named for named in self._workers.values()):
            raise Unavailable(f"no gateway of this worker names a worker at {address}")
        link = self._links.get((address, kind))
        if link is None:
            link = self._links[address, kind] = StoreLink(self._connect(address, kind))
        return link

    async def aclose(self) -> None:
        """Closes every link."""
        while self._links:
            await self._links.popitem()[1].aclose()
