"""A rate limit as a token bucket. Pure: time is an argument."""

from __future__ import annotations

_MINUTE_S = 60.0


class TokenBucket:
    """Owns what is left of one limit. It fills evenly, and holds at most a period's worth, with which it begins.

    A cost above that may be taken from a full bucket, and what a request turns out to cost may exceed its estimate: the
    level is then negative, and nothing can be taken until it has recovered. So over any time the sum of costs is at
    most the rate times that time, plus one bucket, plus what one taker was above it.
    """

    def __init__(self, per_period: float, now_s: float, period_s: float = _MINUTE_S) -> None:
        self.per_period = per_period
        self._period_s = period_s
        self._level = per_period  # at `_at_s`
        self._at_s = now_s

    def level(self, now_s: float) -> float:
        """What is there now; negative after takers that cost more than was there."""
        filled = self._level + max(0.0, now_s - self._at_s) * self.per_period / self._period_s
        return min(self.per_period, filled)

    def wait_s(self, cost: float, now_s: float) -> float:
        """Seconds until `cost` can be taken; 0 if it can be now."""
        missing = min(cost, self.per_period) - self.level(now_s)
        return max(0.0, missing) * self._period_s / self.per_period

    def full_in_s(self, now_s: float) -> float:
        """Seconds until it is full."""
        return self.wait_s(self.per_period, now_s)

    def take(self, cost: float, now_s: float) -> None:
        """Takes `cost`, whether or not it is there; a negative one gives back."""
        self._level = min(self.per_period, self.level(now_s) - cost)
        self._at_s = max(self._at_s, now_s)

    def change_rate(self, per_period: float, now_s: float) -> None:
        """Changes the limit; a bucket that was half full stays half full."""
        share = self.level(now_s) / self.per_period
        self.per_period, self._level, self._at_s = per_period, share * per_period, max(self._at_s, now_s)
