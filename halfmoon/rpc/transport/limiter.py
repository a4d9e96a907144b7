"""A throttled link: the rate and delay that a transfer would meet on a given network."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """The clock of a link."""

    def time(self) -> float:
        """Seconds since some moment."""

    async def sleep(self, seconds: float) -> None:
        """Returns after `seconds`."""


class WallClock:
    """Real time."""

    def time(self) -> float:
        """See `time.monotonic`."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """See `asyncio.sleep`."""
        await asyncio.sleep(seconds)


class LinkLimiter:
    """Owns when a link of `bytes_per_s` and a one-way `delay_s` is free again. Has no clock: the time is an argument.

    A message waits for those sent before it, takes `num_bytes / bytes_per_s` on the wire and arrives `delay_s` later;
    any number of messages may be in the delay at the same time.
    """

    def __init__(self, bytes_per_s: float | None, delay_s: float = 0.0) -> None:
        self._seconds_per_byte = 0.0 if bytes_per_s is None else 1.0 / bytes_per_s
        self._delay_s = delay_s
        self._free_at_s = 0.0

    def arrival_s(self, num_bytes: int, now_s: float) -> float:
        """When a message sent at `now_s` will have arrived."""
        self._free_at_s = max(self._free_at_s, now_s) + num_bytes * self._seconds_per_byte
        return self._free_at_s + self._delay_s
