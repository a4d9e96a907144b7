"""When a service that has ended is started again."""

from __future__ import annotations

from collections.abc import Sequence

DELAYS_S = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)  # before the restarts after successive failures
SETTLED_S = 60.0  # a failure after this long of serving is the first one


class RestartPolicy:
    """Owns how often in a row each service failed. Knows no clock and starts nothing.

    A service fails when it ends on its own, or before it is ready. A service that was ended from outside while it
    served has not failed.
    """

    def __init__(self, delays_s: Sequence[float] = DELAYS_S) -> None:
        """The last of `delays_s` repeats."""
        self._delays_s = delays_s
        self._num_failures: dict[str, int] = {}  # only of services that have been ready

    def delay_s(self, name: str, served_s: float | None, *, from_outside: bool) -> float | None:
        """Returns the time to wait before the next start of a service that ended; None: do not start it again.

        `served_s` is how long it was ready, None if it was not. A service that was never ready would fail again.
        """
        if served_s is None and name not in self._num_failures:
            return None
        num_before = self._num_failures.setdefault(name, 0)
        if served_s is not None and from_outside:
            return 0.0
        if served_s is not None and served_s >= SETTLED_S:
            num_before = 0
        self._num_failures[name] = num_before + 1
        return self._delays_s[min(num_before, len(self._delays_s) - 1)]
