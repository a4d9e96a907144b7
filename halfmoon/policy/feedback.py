"""Live feedback: where a class's measured times come near their targets, its admission gets stricter."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from halfmoon.policy.classes import QosClass

_WINDOW_S = 60.0
_MAX_SAMPLES = 500
_MIN_SAMPLES = 20
_QUANTILE = 0.99
_NEAR = 0.9  # of the target
_FAR = 0.8
_TIGHTEN, _RELAX = 0.9, 1.02  # a step; down faster than up, so that it settles
_LEAST = 0.5
_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class Targets:
    """What admission holds predictions against; None is no limit."""

    ttft_s: float | None
    tbt_s: float | None


class Feedback:
    """Owns the latest measured times of each class, and by how much each target is tightened."""

    def __init__(self) -> None:
        self._scales: dict[tuple[str, str], _Scale] = {}

    def add(self, qos: QosClass, ttft_s: float, tbt_s: float | None, now_s: float) -> None:
        """One ended request: its TTFT and its mean TBT, None for one token."""
        for kind, measured_s, target_s in (("ttft", ttft_s, qos.ttft_s), ("tbt", tbt_s, qos.tbt_s)):
            if measured_s is not None and target_s is not None:
                self._scales.setdefault((qos.name, kind), _Scale()).add(measured_s, now_s)

    def targets(self, qos: QosClass, now_s: float) -> Targets:
        """The class's targets as admission should see them now: at most its own, at least half of them."""
        return Targets(
            self._scaled(qos.name, "ttft", qos.ttft_s, now_s), self._scaled(qos.name, "tbt", qos.tbt_s, now_s)
        )

    def _scaled(self, name: str, kind: str, target_s: float | None, now_s: float) -> float | None:
        scale = self._scales.get((name, kind))
        return target_s if target_s is None or scale is None else target_s * scale.value(target_s, now_s)


class _Scale:
    """Owns what was measured of one class and kind, and the factor that follows from it. A new target begins at 1."""

    def __init__(self) -> None:
        self._measured: deque[tuple[float, float]] = deque(maxlen=_MAX_SAMPLES)  # when, seconds
        self._target_s = 0.0
        self._value = 1.0
        self._adjusted_s = -np.inf

    def add(self, measured_s: float, now_s: float) -> None:
        self._measured.append((now_s, measured_s))

    def value(self, target_s: float, now_s: float) -> float:
        if target_s != self._target_s:
            self._target_s, self._value = target_s, 1.0
        if now_s - self._adjusted_s >= _INTERVAL_S:
            self._adjusted_s = now_s
            self._adjust(now_s)
        return self._value

    def _adjust(self, now_s: float) -> None:
        while self._measured and now_s - self._measured[0][0] > _WINDOW_S:
            self._measured.popleft()
        if len(self._measured) < _MIN_SAMPLES:
            self._value = min(1.0, self._value * _RELAX)  # where nobody is let in nothing is measured
            return
        high = float(np.quantile([seconds for _, seconds in self._measured], _QUANTILE)) / self._target_s
        if high > _NEAR:
            self._value = max(_LEAST, self._value * _TIGHTEN)
        elif high < _FAR:
            self._value = min(1.0, self._value * _RELAX)
