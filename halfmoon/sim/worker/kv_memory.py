"""One simulated worker's KV memory: blocks, and the prefix cache that they hold."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile


class KvMemory:
    """Owns the number of free blocks, and the cached prefix blocks with their number of users. Knows nothing of jobs.

    A *prefix block* is a block of the workload's prefix ids; it takes `prefix_block_size` blocks. A cached prefix block
    without users is idle: it counts as available, and the least recently used one is evicted first. The rules are those
    of the engine's `PrefixCache`, on counts instead of block ids.
    """

    __slots__ = (
        "_idle",
        "_refs",
        "evicted",
        "free",
        "is_cache",
        "num_blocks",
        "peak_blocks",
        "prefix_block_size",
        "stored",
    )

    def __init__(self, num_blocks: int, prefix_block_size: int, *, is_cache: bool) -> None:
        self.num_blocks = num_blocks
        self.free = num_blocks
        self.peak_blocks = 0  # the most in use at once, without idle prefix blocks
        self.prefix_block_size = prefix_block_size
        self.is_cache = is_cache
        self._refs: dict[int, int] = {}  # users of each prefix block that has any
        self._idle: OrderedDict[int, None] = OrderedDict()
        self.stored: dict[int, None] = {}  # since `take_changes` was called last
        self.evicted: dict[int, None] = {}

    @property
    def available(self) -> int:
        """Blocks that `take` can provide."""
        return self.free + len(self._idle) * self.prefix_block_size

    def match(self, prefix_blocks: Sequence[int], most: int) -> list[int]:
        """The longest cached prefix, of at most `most` blocks. The caller becomes a user of each of them."""
        if not self.is_cache:
            return []
        refs, idle, result = self._refs, self._idle, []
        for block_id in prefix_blocks[:most]:
            if block_id in refs:
                refs[block_id] += 1
            elif block_id in idle:
                del idle[block_id]
                refs[block_id] = 1
            else:
                break
            result.append(block_id)
        return result

    def num_users(self, block_id: int) -> int:
        """Users of a prefix block."""
        return self._refs.get(block_id, 0)

    def found(self, prefix_blocks: Sequence[int], most: int) -> list[int]:
        """The prefix blocks that `match` would find; nobody becomes a user."""
        known = prefix_blocks[:most] if self.is_cache else ()
        return list(takewhile(lambda one: one in self._refs or one in self._idle, known))

    def use(self, prefix_blocks: Sequence[int], most: int) -> int:
        """Counts a use by another worker, which reads the longest cached prefix; returns its blocks."""
        matched = self.match(prefix_blocks, most)
        self.release(matched)
        return len(matched)

    def take(self, num_blocks: int) -> None:
        """Takes available blocks and evicts idle prefix blocks to make room."""
        while self.free < num_blocks:
            block_id, _ = self._idle.popitem(last=False)
            self.free += self.prefix_block_size
            if self.stored.pop(block_id, 0) == 0:
                self.evicted[block_id] = None
        self.free -= num_blocks
        self.peak_blocks = max(self.peak_blocks, self.num_blocks - self.available)

    def give(self, num_blocks: int) -> None:
        """Returns blocks."""
        self.free += num_blocks
        assert self.free <= self.num_blocks, "more blocks were given back than taken"

    def release(self, prefix_blocks: Sequence[int]) -> None:
        """Ends the caller's use of these prefix blocks. The end of a prefix is evicted first."""
        for block_id in reversed(prefix_blocks):
            left = self._refs[block_id] - 1
            if left:
                self._refs[block_id] = left
            else:
                del self._refs[block_id]
                self._idle[block_id] = None

    def insert(self, prefix_blocks: Sequence[int]) -> list[int]:
        """Caches computed prefix blocks whose memory the caller has taken. Returns the new ones, which the caller uses.

        The memory of blocks that were cached before stays with the caller.
        """
        if not self.is_cache:
            return []
        new = [block_id for block_id in prefix_blocks if block_id not in self._refs and block_id not in self._idle]
        for block_id in new:
            self._refs[block_id] = 1
            if self.evicted.pop(block_id, 0) == 0:
                self.stored[block_id] = None
        return new

    def adopt(self, prefix_blocks: Sequence[int]) -> None:
        """Caches a prefix that came from another worker, as far as there is room. Nobody uses it yet."""
        here = self.match(prefix_blocks, len(prefix_blocks))
        room = self.available // self.prefix_block_size
        left = prefix_blocks[len(here) :]
        new = [block_id for block_id in left if block_id not in self._refs and block_id not in self._idle][:room]
        self.take(len(new) * self.prefix_block_size)
        self.release([*here, *self.insert(new)])

    def take_changes(self) -> tuple[list[int], list[int]]:
        """Prefix blocks stored and evicted since the last call. A block that was evicted and stored again is in neither
        list.
        """
        changes = list(self.stored), list(self.evicted)
        self.stored.clear()
        self.evicted.clear()
        return changes

    def clear(self) -> None:
        """Loses everything except the peak."""
        self.free = self.num_blocks
        for block_ids in (self._refs, self._idle, self.stored, self.evicted):
            block_ids.clear()
