"""Previews other targets: what admission would have done to past requests, by the ledger's predictions.

The load is taken as it was. In truth, admitting fewer requests would have shortened the queues, and admitting more
would have lengthened them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from halfmoon.policy.admission.refusal import PredictedLatency, missed_target
from halfmoon.policy.values import AdmissionTargets


class PastRequest(NamedTuple):
    """One request of the class, from the ledger. None: not predicted, or not measured."""

    was_refused: bool  # by admission
    predicted_ttft_s: float
    predicted_tbt_s: float | None
    ttft_s: float | None = None
    tbt_s: float | None = None
    is_lower_bound: bool = False  # rejected early: the predictions are lower bounds for any prompt

    def meets(self, targets: AdmissionTargets) -> bool:
        """Whether the measured times are within the targets. A single token has no TBT."""
        if self.ttft_s is None:
            return False
        in_time = targets.ttft_s is None or self.ttft_s <= targets.ttft_s
        return in_time and (targets.tbt_s is None or self.tbt_s is None or self.tbt_s <= targets.tbt_s)


class TargetPreview(NamedTuple):
    """Counts of requests."""

    num_requests: int
    num_refused: int  # under the targets in force then
    num_would_be_refused: int
    num_served: int  # served then, and served under the new targets
    num_meeting: int  # of those: measured times within the new targets
    num_newly_admitted: int  # refused then, admitted under the new targets: nothing was measured
    num_undecided: int  # rejected early then, perhaps admitted now: the lengths of their prompts are unknown


def preview_targets(past: Iterable[PastRequest], present: AdmissionTargets, edited: AdmissionTargets) -> TargetPreview:
    """Applies the targets to `past`. A refusal that the present targets do not explain (a reservation, shedding) stays.

    Of a request that was rejected early, only lower bounds are known: stricter targets refuse it, too.
    """
    num_requests = num_refused = num_would = num_served = num_meeting = num_new = num_undecided = 0
    for request in past:
        predicted = PredictedLatency(request.predicted_ttft_s, request.predicted_tbt_s)
        for_another_reason = request.was_refused and missed_target(predicted, present) is None
        would_be = for_another_reason or missed_target(predicted, edited) is not None
        num_requests += 1
        num_refused += request.was_refused
        num_would += would_be
        num_new += request.was_refused and not would_be and not request.is_lower_bound
        num_undecided += request.was_refused and not would_be and request.is_lower_bound
        if not request.was_refused and not would_be:
            num_served += 1
            num_meeting += request.meets(edited)
    return TargetPreview(num_requests, num_refused, num_would, num_served, num_meeting, num_new, num_undecided)
