"""Learned speed of loading blocks from one holder."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from halfmoon.rpc.store.kvstore_client import TierName
from halfmoon.rpc.transport.estimate import LinkEstimate

# Assumed seconds per byte before the first measurement: the least that a slow disk and a slow network need.
_START_S_PER_BYTE: dict[TierName, float] = {"dram": 1e-9, "disk": 4e-9, "cold": 2e-8}
_WEIGHT = 0.3  # weight of the newest measurement; the first one replaces the assumption
_HOPE = 0.95  # of the known seconds, each time that a holder is too slow to be asked


class LoadRate:
    """Owns the measured rate of each tier and the bytes in transit. Event-loop thread only."""

    def __init__(self) -> None:
        self._s_per_byte = dict(_START_S_PER_BYTE)
        self._measured: set[TierName] = set()
        self._latest_tier: TierName = "dram"
        self.bytes_under_way = 0  # over all requests

    @property
    def is_measured(self) -> bool:
        """Whether something was loaded."""
        return bool(self._measured)

    @property
    def link(self) -> LinkEstimate:
        """Estimate reported to gateways: the rate of the tier last loaded from."""
        return LinkEstimate(1.0 / self._s_per_byte[self._latest_tier], 0.0)

    def s_per_byte(self, tiers: Sequence[TierName]) -> float:
        """Expected seconds per byte for blocks in these tiers."""
        return sum(self._s_per_byte[tier] for tier in tiers) / len(tiers)

    def observe(self, tier: TierName, num_bytes: int, seconds: float) -> None:
        """Learns from a load. `seconds` is the interval in which the bytes followed each other."""
        if num_bytes and seconds > 0:
            self._latest_tier = tier
            known, weight = self._s_per_byte[tier], _WEIGHT if tier in self._measured else 1.0
            self._measured.add(tier)
            self._s_per_byte[tier] = known + weight * (seconds / num_bytes - known)

    def note_passed_over(self, tiers: Collection[TierName]) -> None:
        """Expects a little more of a holder that was too slow to be asked: one that is never asked is never measured.

        A holder that was slow once is thus tried again, after some prompts, and then measured.
        """
        for tier in tiers:
            known = self._s_per_byte[tier]
            self._s_per_byte[tier] = min(known, max(_HOPE * known, _START_S_PER_BYTE[tier]))
