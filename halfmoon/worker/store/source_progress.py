"""One source's part of a restore: what it was asked for, and how fast it delivers. No clock, no I/O."""

from __future__ import annotations

from collections.abc import Collection

from halfmoon.worker.store.block_bits import bits_of

_AT_ONCE_S = 0.05  # seconds of loading in one call, the resolution of decisions
_MOST_AT_ONCE = 8
_EXPECTED_BLOCKS = 2
_STALLED = 4.0  # factor over the expected time after which blocks in transit no longer count
_LEAST_STALL_S = 0.2


class SourceProgress:
    """Owns the blocks under way from one source, those that it can still be asked for, and its measured speed.

    Both sets are bits, as in `block_bits`.
    """

    def __init__(
        self, blocks: Collection[int], load_s_per_block: float, queue_s: float = 0.0, most_by_layer: int = 0
    ) -> None:
        """blocks: that it has, as it said; load_s_per_block: expected.

        queue_s: until what other requests load from it is here; most_by_layer: blocks that it sends by layer at once.
        """
        self.available = bits_of(blocks)
        self.is_gone = False  # slow, away or without its blocks: it is not asked any more
        self.was_asked = False
        self.under_way = 0
        self.most_by_layer = most_by_layer
        self._expected_s = load_s_per_block
        self._queue_s = queue_s
        self._num_loaded = 0
        self._since_s = 0.0  # last arrival, or the request that ended an idle time
        self._busy_s = 0.0  # busy time of the link until then

    @property
    def load_s_per_block(self) -> float:
        """Measured seconds per block; the expected value counts as the first few measurements."""
        return (_EXPECTED_BLOCKS * self._expected_s + self._busy_s) / (_EXPECTED_BLOCKS + self._num_loaded)

    @property
    def measured_s_per_block(self) -> float:
        """Measured seconds per loaded block; 0 before the first."""
        return self._busy_s / self._num_loaded if self._num_loaded else 0.0

    @property
    def most_at_once(self) -> int:
        """Blocks to request in one call; few until the link's speed is known."""
        load_s = self.load_s_per_block
        in_time = int(_AT_ONCE_S / load_s) if load_s > 0 else _MOST_AT_ONCE
        return max(1, min(in_time, self._num_loaded, _MOST_AT_ONCE))

    def drop(self) -> None:
        """Notes that it is asked for nothing more."""
        self.is_gone = True
        self.available = 0

    def ask(self, blocks: int, now_s: float) -> None:
        """Notes that blocks were requested."""
        self._since_s = self._since_s if self.under_way else now_s
        self.under_way |= blocks
        self.was_asked = True

    def came(self, blocks: int, now_s: float) -> None:
        """Notes that requested blocks were loaded."""
        self.under_way &= ~blocks
        self._num_loaded += blocks.bit_count()
        self._busy_s += now_s - self._since_s
        self._since_s = now_s

    def left_out(self, blocks: int) -> None:
        """Notes that requested blocks do not arrive now. They may be requested again."""
        self.under_way &= ~blocks

    def failed(self, blocks: int) -> None:
        """Notes that requested blocks will not arrive from here."""
        self.under_way &= ~blocks
        self.available &= ~blocks

    def waited_s(self, now_s: float) -> float:
        """How long the blocks under way have been without an arrival."""
        return now_s - self._since_s if self.under_way else 0.0

    def left_s(self, now_s: float) -> float:
        """Expected seconds until everything under way is here."""
        queue_s = 0.0 if self._num_loaded else self._queue_s
        return max(0.0, queue_s + self.under_way.bit_count() * self.load_s_per_block - self.waited_s(now_s))

    def is_stalled(self, now_s: float) -> bool:
        """Whether blocks under way are so late that they no longer count."""
        usual_s = min(self.load_s_per_block, self._expected_s) * self.under_way.bit_count()
        limit_s = max(_STALLED * usual_s, _LEAST_STALL_S) + (0.0 if self._num_loaded else self._queue_s)
        return bool(self.under_way) and self.waited_s(now_s) > limit_s
