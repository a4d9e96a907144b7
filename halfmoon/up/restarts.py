"""When a service that has ended is started again."""

from __future__ import annotations

from collections.abc import Sequence

DELAYS_S = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)  # before successive restarts of a service that ends at once
SETTLED_S = 3.0  # a service that was ready for this long did not end at once


class RestartPolicy:
    """Owns how often in a row each service ended at once. Knows no clock and starts nothing."""

    def __init__(self, delays_s: Sequence[float] = DELAYS_S) -> None:
        """The last of `delays_s` repeats."""
        self._delays_s = delays_s
        self._num_early_ends: dict[str, int] = {}  # only of services that have been ready

    def delay_s(self, name: str, served_s: float | None) -> float | None:
        """Returns the time to wait before the next start of a service that ended; None: do not start it again.

        `served_s` is how long it was ready, None if it was not. A service that was never ready would fail again.
        """
        if served_s is None and name not in self._num_early_ends:
            return None
        if served_s is not None and served_s >= SETTLED_S:
            self._num_early_ends[name] = 0
            return 0.0
        num_before = self._num_early_ends.get(name, 0)
        self._num_early_ends[name] = num_before + 1
        return self._delays_s[min(num_before, len(self._delays_s) - 1)]
