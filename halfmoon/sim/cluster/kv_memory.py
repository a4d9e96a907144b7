"""One simulated worker's KV memory: pages, and the prefix cache in them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class KvMemory:
    """Owns how many pages are free, and which prefix blocks are cached and by how many used.

    A *unit* is a block of the workload's prefix ids, `unit_pages` pages. Cached units that nobody uses are idle: they
    count as available, and the least recently used one is evicted first. The rules are those of the engine's
    `PrefixCache`, without the ids of pages.
    """

    __slots__ = ("_idle", "_refs", "evicted", "free", "is_cache", "num_pages", "peak_pages", "stored", "unit_pages")

    def __init__(self, num_pages: int, unit_pages: int, *, is_cache: bool) -> None:
        self.num_pages = num_pages
        self.free = num_pages
        self.peak_pages = 0  # taken at once, those of idle units not among them
        self.unit_pages = unit_pages
        self.is_cache = is_cache
        self._refs: dict[int, int] = {}  # users of each unit that has any
        self._idle: OrderedDict[int, None] = OrderedDict()
        self.stored: dict[int, None] = {}  # since the changes were taken last
        self.evicted: dict[int, None] = {}

    @property
    def available(self) -> int:
        """Pages that `take` can give out."""
        return self.free + len(self._idle) * self.unit_pages

    def match(self, units: Sequence[int], most: int) -> list[int]:
        """The longest cached prefix of at most `most` units; the caller uses it from now on."""
        if not self.is_cache:
            return []
        refs, idle, found = self._refs, self._idle, []
        for unit in units[:most]:
            if unit in refs:
                refs[unit] += 1
            elif unit in idle:
                del idle[unit]
                refs[unit] = 1
            else:
                break
            found.append(unit)
        return found

    def take(self, num_pages: int) -> None:
        """There must be as many available; idle units make room."""
        while self.free < num_pages:
            unit, _ = self._idle.popitem(last=False)
            self.free += self.unit_pages
            if self.stored.pop(unit, 0) == 0:
                self.evicted[unit] = None
        self.free -= num_pages
        self.peak_pages = max(self.peak_pages, self.num_pages - self.available)

    def give(self, num_pages: int) -> None:
        """Takes pages back."""
        self.free += num_pages
        assert self.free <= self.num_pages, "more pages were given back than taken"

    def release(self, units: Sequence[int]) -> None:
        """The caller uses these units no more; the end of the prefix is evicted first."""
        for unit in reversed(units):
            left = self._refs[unit] - 1
            if left:
                self._refs[unit] = left
            else:
                del self._refs[unit]
                self._idle[unit] = None

    def insert(self, units: Sequence[int]) -> list[int]:
        """Makes computed units known, in pages that the caller took; which of them were new, and are now in use by it.

        The pages of the others stay the caller's.
        """
        if not self.is_cache:
            return []
        new = [unit for unit in units if unit not in self._refs and unit not in self._idle]
        for unit in new:
            self._refs[unit] = 1
            if self.evicted.pop(unit, 0) == 0:
                self.stored[unit] = None
        return new

    def take_changes(self) -> tuple[list[int], list[int]]:
        """Units stored and evicted since the last call; one that went and came back is in neither."""
        changes = list(self.stored), list(self.evicted)
        self.stored.clear()
        self.evicted.clear()
        return changes

    def clear(self) -> None:
        """Everything is lost, but for what the peak was."""
        self.free = self.num_pages
        for units in (self._refs, self._idle, self.stored, self.evicted):
            units.clear()
