"""When to leave something alone that keeps failing, and when to try it again. No clock."""

from __future__ import annotations

from typing import Literal

State = Literal["closed", "open", "trying"]


class CircuitBreaker:
    """Owns whether something is used. `max_failures` in a row open it for `pause_s`; then one attempt decides.

    Each further failure doubles the pause, up to 16 of them.
    """

    def __init__(self, max_failures: int = 3, pause_s: float = 1.0) -> None:
        self._max_failures = max_failures
        self._pause_s = pause_s
        self._num_failures = 0
        self._until_s = 0.0
        self.state: State = "closed"

    def allows(self, now_s: float) -> bool:
        """Whether to try now. Who is allowed tells how it went."""
        if self.state == "open" and now_s >= self._until_s:
            self.state = "trying"
            return True
        return self.state == "closed"

    def is_open(self, now_s: float) -> bool:
        """Whether nobody should count on it now."""
        return self.state == "open" and now_s < self._until_s

    def wait_s(self, now_s: float) -> float:
        """How long until it may be tried; 0 if now."""
        return max(0.0, self._until_s - now_s) if self.state == "open" else 0.0

    def succeeded(self) -> None:
        """It works."""
        self._num_failures = 0
        self.state = "closed"

    def failed(self, now_s: float) -> None:
        """It did not."""
        self._num_failures += 1
        if self.state == "trying" or self._num_failures >= self._max_failures:
            doublings = min(4, max(0, self._num_failures - self._max_failures))
            self.state = "open"
            self._until_s = now_s + self._pause_s * 2**doublings
