"""Learned speed of loading blocks from one holder."""

from __future__ import annotations

from collections.abc import Sequence

from halfmoon.rpc.store.kvstore_client import TierName
from halfmoon.rpc.transport.estimate import LinkEstimate

_LEAST_S_PER_BYTE: dict[TierName, float] = {"dram": 1e-9, "disk": 4e-9, "cold": 2e-8}  # hoped for, or of a slow disk
_WEIGHT = 0.3  # weight of the newest measurement
_HOPE = 0.95  # of the known seconds, each time that a holder is too slow to be asked


class LoadRate:
    """Owns the measured rate of each tier, the hope for a better one, and the bytes in transit. Event-loop thread only.

    Decisions hope, so that a holder that was slow once is asked again and measured; reports do not.
    """

    def __init__(self) -> None:
        self._s_per_byte: dict[TierName, float] = {}
        self._latest_tier: TierName = "dram"
        self._hope = 1.0
        self.bytes_under_way = 0  # over all requests

    @property
    def measured(self) -> LinkEstimate | None:
        """Estimate reported to gateways: the rate of the tier last loaded from; None before the first load."""
        known = self._s_per_byte.get(self._latest_tier)
        return None if known is None else LinkEstimate(1.0 / known, 0.0)

    def s_per_byte(self, tiers: Sequence[TierName], usual: float) -> float:
        """Expected seconds per byte for blocks in these tiers. usual: over a link that was not measured."""
        return sum(self._expected(tier, usual) for tier in tiers) / len(tiers)

    def observe(self, tier: TierName, num_bytes: int, seconds: float) -> None:
        """Learns from a load. `seconds` is the interval in which the bytes followed each other."""
        if num_bytes and seconds > 0:
            self._latest_tier, self._hope = tier, 1.0
            s_per_byte = seconds / num_bytes
            known = self._s_per_byte.get(tier, s_per_byte)
            self._s_per_byte[tier] = known + _WEIGHT * (s_per_byte - known)

    def note_passed_over(self) -> None:
        """Hopes for a little more of a holder that was too slow to be asked: one never asked is never measured."""
        self._hope *= _HOPE

    def note_late(self) -> None:
        """Hopes no more: nothing came in time."""
        self._hope = 1.0

    def _expected(self, tier: TierName, usual: float) -> float:
        least = _LEAST_S_PER_BYTE[tier]
        known = self._s_per_byte.get(tier, usual if tier == "dram" else max(usual, least))
        return min(known, max(self._hope * known, least))
