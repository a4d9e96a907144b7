"""Compute cost of blocks whose sender did not know it: a decode worker or another store. No I/O."""

from __future__ import annotations

from halfmoon.catalog.block_identity import BlockMeta
from halfmoon.kv.kv_layout import KVLayout

_NUM_COUNTED = 1024  # blocks that the mean covers, so that it follows workers that became faster


class KnownCosts:
    """Owns the mean compute cost of blocks of each layout."""

    def __init__(self) -> None:
        self._means_s: dict[KVLayout, float] = {}
        self._nums: dict[KVLayout, int] = {}

    def note(self, meta: BlockMeta) -> None:
        """Adds one block to the mean if its cost is known."""
        layout = meta.layout
        if layout is None or not meta.recompute_s:
            return
        num = self._nums[layout] = min(self._nums.get(layout, 0) + 1, _NUM_COUNTED)
        mean_s = self._means_s.get(layout, 0.0)
        self._means_s[layout] = mean_s + (meta.recompute_s - mean_s) / num

    def recompute_s(self, meta: BlockMeta) -> float:
        """Seconds to compute the block, else the mean of its layout; 0 if neither is known."""
        if meta.recompute_s or meta.layout is None:
            return meta.recompute_s
        return self._means_s.get(meta.layout, 0.0)
