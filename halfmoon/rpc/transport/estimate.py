"""Speed of a link, estimated from the transfers that went over it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

_WEIGHT_KEPT = 0.9  # weight of earlier periods with each new one: about the last ten count
_PERIOD_BYTES = 64 << 20  # a period that never ends is cut here
_MOST_ROUND_TRIPS = 4.0  # for a frame to arrive and its credit to return; a line far above is noise
_NUM_ROUND_TRIPS = 16  # the smallest of these counts: others waited for a connection or a busy event loop


@dataclass(frozen=True, slots=True)
class LinkEstimate:
    """A transfer of `n` bytes over an idle link takes about `latency_s + n / bandwidth_bytes_per_s`."""

    bandwidth_bytes_per_s: float
    latency_s: float


class LinkEstimator:
    """Owns the estimate of one link's speed. Has no clock.

    A busy period begins when bytes are in flight and ends when all have been consumed; its bytes and seconds are one
    sample. The estimate is the line through the samples, weighted exponentially. If they say nothing about the latency,
    having a single size, or nothing plausible, it is the round trip of a message without KV.
    """

    def __init__(self) -> None:
        self._under_way_bytes = 0
        self._began_s = 0.0
        self._period_bytes = 0  # consumed in the current period
        self._weight = 0.0
        self._mean_bytes = self._mean_s = 0.0
        self._variance = self._covariance = 0.0
        self._round_trips_s: deque[float] = deque(maxlen=_NUM_ROUND_TRIPS)

    def answered(self, round_trip_s: float) -> None:
        """Records the round trip of a message without KV, less the receiver's own time."""
        self._round_trips_s.append(max(0.0, round_trip_s))

    def sent(self, num_bytes: int, now_s: float) -> None:
        """Records bytes handed to the link."""
        if not self._under_way_bytes:
            self._began_s, self._period_bytes = now_s, 0
        self._under_way_bytes += num_bytes

    def consumed(self, num_bytes: int, now_s: float) -> None:
        """Records bytes in flight that the receiver has consumed."""
        self._under_way_bytes -= num_bytes
        self._period_bytes += num_bytes
        if not self._under_way_bytes or self._period_bytes >= _PERIOD_BYTES:
            self._end_period(now_s)

    def withdrawn(self, num_bytes: int, now_s: float) -> None:
        """Records bytes that the other end has said not to send: the period goes on without them."""
        self._under_way_bytes -= num_bytes
        if not self._under_way_bytes:
            self._end_period(now_s)

    def lost(self, num_bytes: int, now_s: float) -> None:
        """Records bytes in flight that never arrived: their period is discarded."""
        self._under_way_bytes -= num_bytes
        self._began_s, self._period_bytes = now_s, 0

    @property
    def estimate(self) -> LinkEstimate | None:
        """The estimate; None before the first transfer."""
        if not self._weight or self._mean_s <= 0:
            return None
        slope = self._covariance / self._variance if self._variance > (0.01 * self._mean_bytes) ** 2 else 0.0
        latency_s = self._mean_s - slope * self._mean_bytes
        round_trip_s = min(self._round_trips_s, default=None)
        if slope > 0 and latency_s >= 0 and (round_trip_s is None or latency_s <= _MOST_ROUND_TRIPS * round_trip_s):
            return LinkEstimate(1.0 / slope, latency_s)
        latency_s = min(round_trip_s or 0.0, self._mean_s / 2)  # a link has a bandwidth, whatever the round trips say
        return LinkEstimate(self._mean_bytes / (self._mean_s - latency_s), latency_s)

    def _end_period(self, now_s: float) -> None:
        self._add(self._period_bytes, now_s - self._began_s)
        self._began_s, self._period_bytes = now_s, 0

    def _add(self, num_bytes: int, seconds: float) -> None:
        if not num_bytes:
            return
        self._weight = _WEIGHT_KEPT * self._weight + 1.0
        share = 1.0 / self._weight
        off_bytes, off_s = num_bytes - self._mean_bytes, seconds - self._mean_s
        self._mean_bytes += share * off_bytes
        self._mean_s += share * off_s
        self._variance = (1 - share) * (self._variance + share * off_bytes**2)
        self._covariance = (1 - share) * (self._covariance + share * off_bytes * off_s)
