"""Refusal: a request that would miss the targets of its class is refused before anything is computed for it.

Mooncake (section 7): early rejection by the present load, or by the decode load predicted for the end of the prefill.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from halfmoon.errors import NoCapacity
from halfmoon.policy.admission.feedback import TargetKind, Tightening
from halfmoon.policy.admission.qos_classes import QosClass
from halfmoon.policy.models.latency import Floats
from halfmoon.policy.values import AdmissionTargets, TtftPrediction, UnloadedLatency

AdmissionMode = Literal["off", "load", "predicted"]
RefusalReason = Literal["ttft", "tbt", "reservation", "fair share", "shed"]

_SHORT_WAIT_S = 1.0
_LONG_WAIT_S = 60.0


class PredictedLatency(NamedTuple):
    """The latency predicted for a request, from now."""

    ttft_s: float
    tbt_s: float | None  # None for an answer of one token
    queue_s: float = 0.0  # part of `ttft_s` that waiting would take off
    is_lower_bound: bool = False  # the prompt is unknown: no request would be faster
    ranked_by: TtftPrediction | None = None  # the estimates of all workers, to explain the decision


class Refused(NoCapacity):
    """The request would miss the targets of its class. Nothing was computed, and no worker was asked."""

    def __init__(
        self,
        qos: QosClass,
        reason: RefusalReason,
        message: str,
        latency: PredictedLatency,
        applied: AdmissionTargets,
        wait_s: float | None,
    ) -> None:
        """`wait_s` is None if the request would be refused on an idle cluster, too."""
        bounded_s = _LONG_WAIT_S if wait_s is None else min(max(wait_s, _SHORT_WAIT_S), _LONG_WAIT_S)
        retry_after_ms = math.ceil(1000 * bounded_s)
        super().__init__(message, retry_after_ms=retry_after_ms)
        self.qos_class = qos.name
        self.reason = reason
        self.is_by_others = wait_s is not None
        self.ttft_s = latency.ttft_s
        self.tbt_s = latency.tbt_s
        self.is_early = latency.is_lower_bound
        self.ranked_by = latency.ranked_by
        self.targets = AdmissionTargets(qos.ttft_s, qos.tbt_s)
        self.applied = applied  # the targets as tightened by feedback


def missed_target(latency: PredictedLatency, targets: AdmissionTargets) -> TargetKind | None:
    """The target that the predictions miss; None if they meet both."""
    if targets.ttft_s is not None and latency.ttft_s > targets.ttft_s:
        return "ttft"
    if targets.tbt_s is not None and latency.tbt_s is not None and latency.tbt_s > targets.tbt_s:
        return "tbt"
    return None


def overload_targets(targets: AdmissionTargets, unloaded: UnloadedLatency) -> AdmissionTargets:
    """The targets of a class that rejects only overload: one that an idle cluster would miss, too, is not enforced.

    The first token may still wait for other requests as long as the TTFT target.
    """
    ttft_s, tbt_s = targets.ttft_s, targets.tbt_s
    if ttft_s is not None and unloaded.ttft_s > ttft_s:
        ttft_s += unloaded.ttft_s
    return AdmissionTargets(ttft_s, None if tbt_s is not None and unloaded.tbt_s > tbt_s else tbt_s)


def over_target(
    qos: QosClass,
    missed: TargetKind,
    latency: PredictedLatency,
    applied: AdmissionTargets,
    tightening: Tightening | None,
    ends_in_s: Floats,
) -> Refused:
    """The refusal of a request that misses a target, with the time until it may meet it.

    `ends_in_s` is when the requests that decode there leave, in seconds from now, soonest first.
    """
    would = "would be at least" if latency.is_lower_bound else "would be"
    if missed == "ttft":
        assert applied.ttft_s is not None
        assert qos.ttft_s is not None
        message = f"time to first token {would} {latency.ttft_s:.3g} s, class {qos.name} allows {qos.ttft_s:.3g} s"
        wait_s = _until_shorter_s(latency, applied.ttft_s)
    else:
        assert applied.tbt_s is not None
        assert latency.tbt_s is not None
        assert qos.tbt_s is not None
        allowed = f"class {qos.name} allows {1000 * qos.tbt_s:.3g} ms"
        message = f"time between tokens {would} {1000 * latency.tbt_s:.3g} ms, {allowed}"
        wait_s = _until_lighter_s(latency.tbt_s, applied.tbt_s, ends_in_s)
    why = "" if tightening is None else f"; now {tightening.explain(qos.attainment)}"
    return Refused(qos, missed, message + why, latency, applied, wait_s)


def _until_shorter_s(latency: PredictedLatency, target_s: float) -> float | None:
    """Until the queue is short enough; None if the prompt alone takes longer than the target."""
    if latency.ttft_s - latency.queue_s > target_s:
        return None
    return latency.ttft_s - target_s


def _until_lighter_s(tbt_s: float, target_s: float, ends_in_s: Floats) -> float | None:
    """Until enough requests have left to meet the target, if each adds the same to a step; None if none is there."""
    num_leaving = math.ceil(len(ends_in_s) * (1 - target_s / tbt_s))
    return float(ends_in_s[num_leaving - 1]) if num_leaving > 0 else None
