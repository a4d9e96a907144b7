"""How known blocks follow one another: fragments of prompts, the first blocks of some of which are elsewhere."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from halfmoon.catalog.entry import Entry, Tier


class Fragments:
    """Owns the entries by block id, and who follows whom. Knows neither budgets nor the order of eviction."""

    def __init__(self, tiers: Collection[Tier]) -> None:
        self._tiers = tiers
        self._entries: dict[bytes, Entry] = {}
        self._orphans: dict[bytes, set[bytes]] = {}  # by a block that is not here: those that follow it

    def __contains__(self, block: bytes | None) -> bool:
        return block in self._entries

    def __getitem__(self, block: bytes) -> Entry:
        return self._entries[block]

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def get(self, block: bytes | None) -> Entry | None:
        """The block's entry, if it is here."""
        return None if block is None else self._entries.get(block)

    def parent(self, entry: Entry) -> Entry | None:
        """The entry of the block before, if it is here."""
        return self.get(entry.meta.parent)

    @property
    def num_begun_elsewhere(self) -> int:
        """Number of fragments that are no prompt's beginning."""
        return sum(map(len, self._orphans.values()))

    def goes_on(self, block: bytes, num_blocks: int) -> bool:
        """Whether some prompt has at least `num_blocks` known blocks after this one."""
        entry = self._entries.get(block)
        if entry is None or num_blocks == 0:
            return entry is not None
        return any(self.goes_on(child, num_blocks - 1) for child in entry.children)

    def before(self, block: bytes, num_blocks: int) -> bytes | None:
        """The block `num_blocks` before this one in its prompt; None if there is none."""
        ancestor: bytes | None = block
        for _ in range(num_blocks):
            entry = self.get(ancestor)
            ancestor = None if entry is None else entry.meta.parent
        return ancestor

    def precedes(self, block: bytes, later: bytes | None) -> bool:
        """Whether the block is `later` or, as far as is known here, before it."""
        if block not in self._entries and block not in self._orphans:
            return block == later
        while later is not None and later != block:
            entry = self._entries.get(later)
            later = None if entry is None else entry.meta.parent
        return later is not None

    def descendants(self, block: bytes) -> list[Entry]:
        """Entries of the block and all that follow it, each after its parent; none if the block is not here."""
        entries: list[Entry] = []
        todo: list[bytes] = [block] if block in self._entries else []
        while todo:
            entry = self._entries[todo.pop()]
            entries.append(entry)
            todo.extend(entry.children)
        return entries

    def add(self, entry: Entry) -> None:
        """Joins a new entry to the block before it, if that is here, and to those here that follow it."""
        block, parent = entry.meta.id, entry.meta.parent
        self._entries[block] = entry
        entry.children = self._orphans.pop(block, set())
        for tier in self._tiers:
            entry.num_children_in[tier] = self._count(entry.children, tier)
        if parent in self._entries:
            self._entries[parent].children.add(block)
        elif parent is not None:
            self._orphans.setdefault(parent, set()).add(block)

    def remove(self, entry: Entry) -> None:
        """Undoes `add`. Blocks that follow are fragments of their own from now on."""
        block, parent = entry.meta.id, entry.meta.parent
        del self._entries[block]
        if entry.children:
            self._orphans[block] = entry.children
        if parent in self._entries:
            self._entries[parent].children.discard(block)
        elif parent is not None:
            self._orphans[parent].discard(block)
            if not self._orphans[parent]:
                del self._orphans[parent]

    def _count(self, children: Iterable[bytes], tier: Tier) -> int:
        return sum(tier in self._entries[child].tiers for child in children)

    def check_integrity(self) -> None:
        """Asserts that parents, children and orphans agree. For tests; walks over everything."""
        for block, entry in self._entries.items():
            assert all(self._entries[child].meta.parent == block for child in entry.children)
            for tier in Tier:
                assert entry.num_children_in[tier] == self._count(entry.children, tier)
            if entry.meta.parent in self._entries:
                assert block in self._entries[entry.meta.parent].children
            elif entry.meta.parent is not None:
                assert block in self._orphans[entry.meta.parent]
        assert not self._orphans.keys() & self._entries.keys()
        assert all(block in self._entries for blocks in self._orphans.values() for block in blocks)
        assert all(self._orphans.values())
