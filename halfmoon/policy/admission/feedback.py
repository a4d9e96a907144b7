"""Live feedback: where nearly as many of a class's requests are late as it allows, its admission gets stricter.

How many it allows is its attainment. Judged are requests that were admitted since the last step down: those before them
do not show what it did. What is taken off a target is time that others may cost: a target below what an idle worker
takes would refuse everybody, on an idle cluster, too, and nothing is quicker for it.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from halfmoon.policy.admission.classes import QosClass

_WINDOW_S = 60.0
_MAX_SAMPLES = 500
_MIN_SAMPLES = 20
_NEAR = 0.95  # its target: where the quantile of the attainment is above it, admission gets stricter
_FAR = 0.85  # of the target: where it is below it, there is room
_TIGHTEN, _RELAX = 0.9, 1.02  # a step, an interval; down faster than up, so that it settles
_MOST_TAKEN = 0.5  # of what a target leaves beside the time that its requests take alone
_INTERVAL_S = 1.0
_LONGEST_S = 60.0  # between two requests, in which it relaxes: then it is 1 in any case

TargetKind = Literal["ttft", "tbt"]


@dataclass(frozen=True, slots=True)
class AdmissionTargets:
    """What admission holds predictions against; None is no limit."""

    ttft_s: float | None
    tbt_s: float | None


class Alone(NamedTuple):
    """What a request would take with nobody else there, as predicted; 0 where nothing is known."""

    ttft_s: float = 0.0
    tbt_s: float = 0.0


class Tightening(NamedTuple):
    """Why a target that is applied is not the class's own."""

    applied_s: float
    measured_s: float  # what the attainment's share of the latest requests took, when it was last made stricter

    def told(self, attainment: float) -> str:
        """In words, for who was refused by it."""
        share, measured = f"{100 * attainment:.3g} %", _told_s(self.measured_s)
        return f"{_told_s(self.applied_s)}, because {share} of its latest requests took up to {measured}"


class Feedback:
    """Owns the latest measured times of each class, and by how much each target is tightened."""

    def __init__(self) -> None:
        self._scales: dict[tuple[str, TargetKind], _Scale] = {}

    def add(
        self, qos: QosClass, ttft_s: float, tbt_s: float | None, alone: Alone, entered_s: float, now_s: float
    ) -> None:
        """One ended request: its TTFT and its mean TBT, None for one token; `entered_s` is when it was admitted."""
        told: tuple[tuple[TargetKind, float | None, float, float | None], ...]
        told = (("ttft", ttft_s, alone.ttft_s, qos.ttft_s), ("tbt", tbt_s, alone.tbt_s, qos.tbt_s))
        for kind, measured_s, alone_s, target_s in told:
            if measured_s is not None and target_s is not None:
                scale = self._scales.setdefault((qos.name, kind), _Scale())
                scale.add(_Measured(entered_s, now_s, measured_s, alone_s))

    def targets(self, qos: QosClass, now_s: float) -> AdmissionTargets:
        """The class's targets as admission should see them now: at most its own, and above what its
        requests take alone by half of what its own leave, at least."""
        return AdmissionTargets(
            self._scaled(qos, "ttft", qos.ttft_s, now_s), self._scaled(qos, "tbt", qos.tbt_s, now_s)
        )

    def tightenings(self, qos: QosClass) -> dict[TargetKind, Tightening]:
        """Those of the class's targets that are tightened, as of the last `targets`. Changes nothing."""
        own: dict[TargetKind, float | None] = {"ttft": qos.ttft_s, "tbt": qos.tbt_s}
        scales = {kind: self._scales.get((qos.name, kind)) for kind in own}
        found = {kind: scale.tightening(own[kind]) for kind, scale in scales.items() if scale is not None}
        return {kind: one for kind, one in found.items() if one is not None}

    def _scaled(self, qos: QosClass, kind: TargetKind, target_s: float | None, now_s: float) -> float | None:
        scale = self._scales.get((qos.name, kind))
        return (
            target_s if target_s is None or scale is None else target_s * scale.value(target_s, qos.attainment, now_s)
        )


class _Measured(NamedTuple):
    entered_s: float
    ended_s: float
    seconds: float
    alone_s: float


class _Scale:
    """Owns what was measured of one class and kind, and the factor that follows from it. A new target begins at 1."""

    def __init__(self) -> None:
        self._measured: deque[_Measured] = deque(maxlen=_MAX_SAMPLES)
        self._target_s = 0.0
        self._value = 1.0
        self._reached_s = 0.0  # the attainment's quantile at the last step down
        self._adjusted_s = self._tightened_s = -math.inf

    def add(self, measured: _Measured) -> None:
        self._measured.append(measured)

    def value(self, target_s: float, attainment: float, now_s: float) -> float:
        if target_s != self._target_s:
            self._target_s, self._value, self._tightened_s = target_s, 1.0, -math.inf
        if now_s - self._adjusted_s >= _INTERVAL_S:
            self._adjust(attainment, now_s)
            self._adjusted_s = now_s
        return self._value

    def tightening(self, target_s: float | None) -> Tightening | None:
        if target_s is None or target_s != self._target_s or self._value == 1.0:
            return None
        return Tightening(target_s * self._value, self._reached_s)

    def _adjust(self, attainment: float, now_s: float) -> None:
        while self._measured and now_s - self._measured[0].ended_s > _WINDOW_S:
            self._measured.popleft()
        counted = [one.seconds for one in self._measured if one.entered_s >= self._tightened_s]
        if len(counted) < _MIN_SAMPLES:
            self._relax(self._tightened_s + _WINDOW_S, now_s)  # where nobody is let in nothing is measured
            return
        reached = float(np.quantile(counted, attainment)) / self._target_s
        if reached > _NEAR:
            self._value, self._tightened_s = max(self._least(attainment), self._value * _TIGHTEN), now_s
            self._reached_s = reached * self._target_s
        elif reached < _FAR:
            self._relax(self._adjusted_s, now_s)

    def _least(self, attainment: float) -> float:
        """As many of the latest requests as should be in time would be let in where nobody else is."""
        alone_s = float(np.quantile([one.alone_s for one in self._measured], attainment))
        return 1 - _MOST_TAKEN * max(1 - alone_s / self._target_s, 0.0)

    def _relax(self, from_s: float, now_s: float) -> None:
        """For the time since the last adjustment, not before `from_s`: who comes rarely finds what many would."""
        passed_s = min(now_s - max(from_s, self._adjusted_s), _LONGEST_S)
        if passed_s > 0:
            self._value = min(1.0, self._value * _RELAX ** (passed_s / _INTERVAL_S))


def _told_s(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
