"""Live feedback: admission of a class gets stricter when nearly as many of its requests are late as it allows.

The attainment of a class says how many may be late. Only requests admitted since the last step down are judged, since
earlier ones do not show its effect. Tightening takes away time that other requests may cost: a target below the latency
of an idle worker would refuse every request, even on an idle cluster, and make none faster.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Literal, NamedTuple

import numpy as np

from halfmoon.policy.admission.qos_classes import QosClass
from halfmoon.policy.values import AdmissionTargets, UnloadedLatency

_WINDOW_S = 60.0
_MAX_SAMPLES = 500
_MIN_SAMPLES = 20
_NEAR = 0.95  # of the target: admission gets stricter if the attainment's quantile is above
_FAR = 0.85  # of the target: admission relaxes if the quantile is below
_TIGHTEN, _RELAX = 0.9, 1.02  # per step, per interval; down faster than up, so that it settles
_MAX_TAKEN = 0.5  # of the difference between a target and the unloaded latency of its requests
_INTERVAL_S = 1.0
_LONGEST_S = 60.0  # between two requests: by then the scale has relaxed to 1 in any case

TargetKind = Literal["ttft", "tbt"]


class Tightening(NamedTuple):
    """Why the applied target is stricter than the class's own."""

    applied_s: float
    measured_s: float  # the attainment's quantile of the latest requests at the last step down

    def explain(self, attainment: float) -> str:
        """The reason in words, for the client that was refused."""
        share, measured = f"{100 * attainment:.3g} %", _in_words(self.measured_s)
        return f"{_in_words(self.applied_s)}, because {share} of its latest requests took up to {measured}"


class Feedback:
    """Owns the latest measured latencies of each class, and how much each target is tightened."""

    def __init__(self) -> None:
        self._scales: dict[tuple[str, TargetKind], _Scale] = {}

    def add(
        self,
        qos: QosClass,
        ttft_s: float,
        tbt_s: float | None,
        unloaded: UnloadedLatency,
        entered_s: float,
        now_s: float,
    ) -> None:
        """Adds a completed request that was admitted at `entered_s`; its mean TBT is None for one token."""
        latencies: tuple[tuple[TargetKind, float | None, float, float | None], ...]
        latencies = (("ttft", ttft_s, unloaded.ttft_s, qos.ttft_s), ("tbt", tbt_s, unloaded.tbt_s, qos.tbt_s))
        for kind, measured_s, unloaded_s, target_s in latencies:
            if measured_s is not None and target_s is not None:
                scale = self._scales.setdefault((qos.name, kind), _Scale())
                scale.add(_Measured(entered_s, now_s, measured_s, unloaded_s))

    def targets(self, qos: QosClass, now_s: float) -> AdmissionTargets:
        """The targets that admission should apply now.

        At most the class's own; at least halfway between these and the unloaded latency of its requests.
        """
        return AdmissionTargets(
            self._scaled(qos, "ttft", qos.ttft_s, now_s), self._scaled(qos, "tbt", qos.tbt_s, now_s)
        )

    def tightenings(self, qos: QosClass) -> dict[TargetKind, Tightening]:
        """The tightened targets of the class, as of the last `targets`. Changes nothing."""
        own: dict[TargetKind, float | None] = {"ttft": qos.ttft_s, "tbt": qos.tbt_s}
        scales = {kind: self._scales.get((qos.name, kind)) for kind in own}
        tightenings = {kind: scale.tightening(own[kind]) for kind, scale in scales.items() if scale is not None}
        return {kind: tightening for kind, tightening in tightenings.items() if tightening is not None}

    def _scaled(self, qos: QosClass, kind: TargetKind, target_s: float | None, now_s: float) -> float | None:
        scale = self._scales.get((qos.name, kind))
        return (
            target_s if target_s is None or scale is None else target_s * scale.value(target_s, qos.attainment, now_s)
        )


class _Measured(NamedTuple):
    entered_s: float
    ended_s: float
    seconds: float
    unloaded_s: float


class _Scale:
    """Owns the measurements of one class and kind, and the resulting scale of its target. A new target starts at 1."""

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
        counted = [sample.seconds for sample in self._measured if sample.entered_s >= self._tightened_s]
        if len(counted) < _MIN_SAMPLES:
            self._relax(self._tightened_s + _WINDOW_S, now_s)  # if no request is admitted, nothing is measured
            return
        reached = float(np.quantile(counted, attainment)) / self._target_s
        if reached > _NEAR:
            self._value, self._tightened_s = max(self._lowest(attainment), self._value * _TIGHTEN), now_s
            self._reached_s = reached * self._target_s
        elif reached < _FAR:
            self._relax(self._adjusted_s, now_s)

    def _lowest(self, attainment: float) -> float:
        """The strictest scale by which an idle cluster still admits the attainment's share of the latest requests."""
        unloaded_s = float(np.quantile([sample.unloaded_s for sample in self._measured], attainment))
        return 1 - _MAX_TAKEN * max(1 - unloaded_s / self._target_s, 0.0)

    def _relax(self, from_s: float, now_s: float) -> None:
        """Relaxes for all the time since the last adjustment and `from_s`, however rarely requests come."""
        passed_s = min(now_s - max(from_s, self._adjusted_s), _LONGEST_S)
        if passed_s > 0:
            self._value = min(1.0, self._value * _RELAX ** (passed_s / _INTERVAL_S))


def _in_words(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
