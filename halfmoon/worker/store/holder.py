"""A holder of KV that this worker loads from, a store or another worker: its link, how it lends, how fast it is."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import NamedTuple

from halfmoon.kv.kv_layout import KVLayout
from halfmoon.pb import gateway_pb2
from halfmoon.policy.view.link_speeds import usual_s_per_byte
from halfmoon.rpc.store.kvstore_client import KVStoreClient
from halfmoon.worker.store.block_source import BlockSource
from halfmoon.worker.store.load_rate import LoadRate
from halfmoon.worker.store.source_links import HolderKind, SourceLinks

_MAX_HOLDERS = 64


class NamedHolder(NamedTuple):
    """A holder that a request names as a source of its prefix."""

    address: str  # host:port
    kind: HolderKind
    num_blocks: int = 0  # leading blocks that it is believed to have


class Holder:
    """Owns what this worker has learned of one holder. The link belongs to `SourceLinks`."""

    def __init__(self, name: NamedHolder, links: SourceLinks, layout: KVLayout) -> None:
        self.address = name.address
        self.kind = name.kind
        self.rate = LoadRate()
        self.blocks = BlockSource(layout, may_lend=name.kind == "store")
        self.num_users = 0  # requests that may load from here now
        self._links = links

    @contextmanager
    def use(self, salt: bytes) -> Iterator[KVStoreClient]:
        """Gives the holder as one tenant sees it. Raises as `SourceLinks.to` and `StoreLink.use`."""
        with self._links.to(self.address, self.kind).use(salt) as client:
            yield client


class Holders:
    """Owns the holders that this worker has loaded from, the latest ones. Event-loop thread only."""

    def __init__(self, links: SourceLinks, layout: KVLayout) -> None:
        self._links = links
        self._layout = layout
        self._holders: OrderedDict[tuple[str, HolderKind], Holder] = OrderedDict()

    @property
    def own(self) -> Holder | None:
        """The worker's nearest store; None without one."""
        address = self._links.own_address
        return None if address is None else self._get(NamedHolder(address, "store"))

    @property
    def has_stores(self) -> bool:
        """Whether the pool has a store."""
        return bool(self._links.stores)

    @asynccontextmanager
    async def of(self, named: Sequence[NamedHolder]) -> AsyncIterator[list[Holder]]:
        """The stores of the pool, the worker's own first, and the named holders: blocks may lie on several stores.

        They count as used while inside. Forgets the oldest unused ones beyond a few.
        """
        stores = [NamedHolder(address, "store") for address in self._links.stores]
        async with self._used((*stores, *named)) as holders:
            yield holders

    @asynccontextmanager
    async def worker(self, address: str) -> AsyncIterator[Holder]:
        """Another worker, likewise."""
        async with self._used([NamedHolder(address, "worker")]) as (holder,):
            yield holder

    @asynccontextmanager
    async def _used(self, names: Iterable[NamedHolder]) -> AsyncIterator[list[Holder]]:
        holders = list(dict.fromkeys(self._get(name) for name in names))
        for holder in holders:
            holder.num_users += 1
        try:
            await self._forget_unused()
            yield holders
        finally:
            for holder in holders:
                holder.num_users -= 1

    async def _forget_unused(self) -> None:
        for key, holder in list(self._holders.items()):
            if len(self._holders) <= _MAX_HOLDERS:
                return
            if not holder.num_users and self._holders.get(key) is holder:  # others forget and use some meanwhile
                del self._holders[key]
                await self._links.close(*key)

    @property
    def usual_s_per_byte(self) -> float:
        """What loading from a holder costs from which nothing was loaded; gateways guess in the same way."""
        return usual_s_per_byte(1.0 / speed.bandwidth_bytes_per_s for speed in self.speeds())

    def speeds(self) -> list[gateway_pb2.LinkSpeed]:
        """The measured speed of loading from each holder from which something was loaded."""
        return [
            gateway_pb2.LinkSpeed(
                address=holder.address,
                bandwidth_bytes_per_s=measured.bandwidth_bytes_per_s,
                latency_s=measured.latency_s,
                is_inbound=True,
                waiting_bytes=holder.rate.bytes_under_way,
            )
            for holder in self._holders.values()
            if (measured := holder.rate.measured) is not None
        ]

    def _get(self, name: NamedHolder) -> Holder:
        key = name.address, name.kind
        if key not in self._holders:
            self._holders[key] = Holder(name, self._links, self._layout)
        self._holders.move_to_end(key)
        return self._holders[key]
