"""The probe: an idle cluster that refuses every request admits one now and then.

Predictions that are too high for every request would otherwise never be measured again.
"""

from __future__ import annotations

_PROBE_S = 10.0  # how long an idle cluster refuses every request before it admits one


class IdleProbe:
    """Owns since when an idle cluster has refused requests. Is only asked while the cluster is idle."""

    def __init__(self) -> None:
        self._refused_s: float | None = None  # first refusal since a request ended

    def is_due(self, now_s: float) -> bool:
        """Notes a refusal. Returns whether the request should be admitted nevertheless."""
        if self._refused_s is None:
            self._refused_s = now_s
        return now_s - self._refused_s >= _PROBE_S

    def reset(self) -> None:
        """Notes that a request has ended, and so was measured."""
        self._refused_s = None
