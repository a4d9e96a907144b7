"""The stores of the pool, each of them and all together a holder in the block index."""

from __future__ import annotations

from collections.abc import Iterable

from halfmoon.policy.view.block_index import BlockEvents, BlockIndex
from halfmoon.policy.view.fetch_costs import FetchLinks

_POOL = "pool\0"  # the name of all stores together as a holder; no worker can have it


class PooledStores:
    """Owns which stores the pool has: those named, and those that members use. The index has their blocks."""

    def __init__(self, named: Iterable[str], index: BlockIndex, fetch_links: FetchLinks) -> None:
        self.addresses: frozenset[str] = frozenset()
        self.holder = index.number(_POOL)  # number of all stores together: what any store has, they have
        self._named = frozenset(named)
        self._index = index
        self._fetch_links = fetch_links
        fetch_links.note_store(self.holder)
        self.unite(())

    def unite(self, used: Iterable[str]) -> None:
        """Takes the stores that members use, beside those named."""
        before, self.addresses = self.addresses, self._named.union(used)
        if self.addresses == before:
            return
        for address in before - self.addresses:
            self._index.forget(_name(address))
        numbers = [self.number(address) for address in sorted(self.addresses)]
        for number in numbers:
            self._fetch_links.note_holder(number, serves=False)  # the pool counts instead
        self._index.unite(self.holder, numbers)

    def number(self, address: str) -> int:
        """The number of one store as a holder. Members' `store_holder` is that of the whole pool."""
        return self._index.number(_name(address))

    def note_blocks(self, address: str, events: BlockEvents) -> bool:
        """Takes changes of a store. False if messages are missing: a snapshot is needed."""
        return address not in self.addresses or self._index.apply(self.number(address), events)

    def num_blocks(self, address: str) -> int:
        """Blocks known to be in a store."""
        return self._index.num_blocks(self.number(address)) if address in self.addresses else 0


def _name(address: str) -> str:
    """The name of a store as a holder; no worker can have it."""
    return f"store\0{address}"
