"""When to stop using something that keeps failing, and when to try it again. No clock."""

from __future__ import annotations

from typing import Literal

State = Literal["closed", "open", "trying"]


class CircuitBreaker:
    """Owns whether something may be used. `max_failures` in a row open it for `pause_s`; then one attempt decides.

    Each further failure doubles the pause, up to 16 times `pause_s`.
    """

    def __init__(self, max_failures: int = 3, pause_s: float = 1.0) -> None:
        self._max_failures = max_failures
        self._pause_s = pause_s
        self._num_failures = 0
        self._until_s = 0.0
        self.state: State = "closed"

    def allows(self, now_s: float) -> bool:
        """Whether to try now. Whoever is allowed must call `succeeded` or `failed`."""
        if self.state == "open" and now_s >= self._until_s:
            self.state = "trying"
            return True
        return self.state == "closed"

    def is_open(self, now_s: float) -> bool:
        """Whether nothing should rely on it now."""
        return self.state == "open" and now_s < self._until_s

    def wait_s(self, now_s: float) -> float:
        """Seconds until it may be tried; 0 if now."""
        return max(0.0, self._until_s - now_s) if self.state == "open" else 0.0

    def succeeded(self) -> None:
        """Reports success."""
        self._num_failures = 0
        self.state = "closed"

    def failed(self, now_s: float) -> None:
        """Reports failure."""
        self._num_failures += 1
        if self.state == "trying" or self._num_failures >= self._max_failures:
            doublings = min(4, max(0, self._num_failures - self._max_failures))
            self.state = "open"
            self._until_s = now_s + self._pause_s * 2**doublings
