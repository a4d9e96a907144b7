"""Admission: a request that would miss its class's targets is refused before anything is computed for it.

Mooncake (section 7): early rejection by the load of now, or by the decode load predicted for when the prefill ends.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from halfmoon.errors import NoCapacity
from halfmoon.policy.admission.classes import QosClass
from halfmoon.policy.admission.feedback import AdmissionTargets, TargetKind, Tightening
from halfmoon.policy.models.latency import Floats
from halfmoon.policy.placement.ttft import TtftPrediction

AdmissionMode = Literal["off", "load", "predicted"]
RefusalReason = Literal["ttft", "tbt", "reservation", "shed"]

_SHORT_WAIT_S = 1.0
_LONG_WAIT_S = 60.0


class PredictedLatency(NamedTuple):
    """What is predicted of a request, from now."""

    ttft_s: float
    tbt_s: float | None  # None for one token, which has no gap
    queue_s: float = 0.0  # of `ttft_s`: what waiting would take off
    is_least: bool = False  # the prompt is not known: no request at all would be quicker
    ranked_by: TtftPrediction | None = None  # the workers, for who asks why


class Refused(NoCapacity):
    """The request would miss its class's targets. Nothing was computed, no worker knows of it."""

    def __init__(
        self,
        qos: QosClass,
        reason: RefusalReason,
        message: str,
        outlook: PredictedLatency,
        applied: AdmissionTargets,
        wait_s: float | None,
    ) -> None:
        """`wait_s` is None where the request would be refused by itself, too, with nobody else here."""
        bounded_s = _LONG_WAIT_S if wait_s is None else min(max(wait_s, _SHORT_WAIT_S), _LONG_WAIT_S)
        retry_after_ms = math.ceil(1000 * bounded_s)
        super().__init__(message, retry_after_ms=retry_after_ms)
        self.qos_class = qos.name
        self.reason = reason
        self.is_by_others = wait_s is not None
        self.ttft_s = outlook.ttft_s
        self.tbt_s = outlook.tbt_s
        self.is_least = outlook.is_least
        self.ranked_by = outlook.ranked_by
        self.targets = AdmissionTargets(qos.ttft_s, qos.tbt_s)
        self.applied = applied  # the targets as feedback has them now


def missed_target(outlook: PredictedLatency, targets: AdmissionTargets) -> TargetKind | None:
    """Which target the predictions miss; None where they meet both."""
    if targets.ttft_s is not None and outlook.ttft_s > targets.ttft_s:
        return "ttft"
    if targets.tbt_s is not None and outlook.tbt_s is not None and outlook.tbt_s > targets.tbt_s:
        return "tbt"
    return None


def over_target(
    qos: QosClass,
    missed: TargetKind,
    outlook: PredictedLatency,
    applied: AdmissionTargets,
    tightening: Tightening | None,
    ends_in_s: Floats,
) -> Refused:
    """The refusal of a request over a target, with when it might be met: the queue shrinks, others leave.

    `ends_in_s` is in how many seconds those who decode there leave, soonest first.
    """
    would = "would be at least" if outlook.is_least else "would be"
    if missed == "ttft":
        assert applied.ttft_s is not None
        assert qos.ttft_s is not None
        message = f"time to first token {would} {outlook.ttft_s:.3g} s, class {qos.name} allows {qos.ttft_s:.3g} s"
        wait_s = _until_shorter_s(outlook, applied.ttft_s)
    else:
        assert applied.tbt_s is not None
        assert outlook.tbt_s is not None
        assert qos.tbt_s is not None
        allowed = f"class {qos.name} allows {1000 * qos.tbt_s:.3g} ms"
        message = f"time between tokens {would} {1000 * outlook.tbt_s:.3g} ms, {allowed}"
        wait_s = _until_lighter_s(outlook.tbt_s, applied.tbt_s, ends_in_s)
    why = "" if tightening is None else f"; now {tightening.told(qos.attainment)}"
    return Refused(qos, missed, message + why, outlook, applied, wait_s)


def _until_shorter_s(outlook: PredictedLatency, target_s: float) -> float | None:
    """A prompt that takes longer than the target by itself gains nothing by waiting."""
    if outlook.ttft_s - outlook.queue_s > target_s:
        return None
    return outlook.ttft_s - target_s


def _until_lighter_s(tbt_s: float, target_s: float, ends_in_s: Floats) -> float | None:
    """Until so many requests have left that steps take the target, each bearing an equal part of them."""
    num_leaving = math.ceil(len(ends_in_s) * (1 - target_s / tbt_s))
    return float(ends_in_s[num_leaving - 1]) if num_leaving > 0 else None  # nobody is there who could leave
