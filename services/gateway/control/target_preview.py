"""What other targets would have done to the requests that there were: admission, over the ledger's predictions.

The load is taken as it was: who lets fewer in would have had shorter queues, who lets more in longer ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from halfmoon.policy.admission.refusal import PredictedLatency, missed_target
from halfmoon.policy.values import AdmissionTargets


class PastRequest(NamedTuple):
    """One request of the class, as the ledger has it. None is what was not predicted, or not measured."""

    was_refused: bool  # by admission
    predicted_ttft_s: float
    predicted_tbt_s: float | None
    ttft_s: float | None = None
    tbt_s: float | None = None
    is_least: bool = False  # it was refused unread: no prompt would have had less than what was predicted

    def meets(self, targets: AdmissionTargets) -> bool:
        """Whether what was measured is within them; one token has no TBT."""
        if self.ttft_s is None:
            return False
        in_time = targets.ttft_s is None or self.ttft_s <= targets.ttft_s
        return in_time and (targets.tbt_s is None or self.tbt_s is None or self.tbt_s <= targets.tbt_s)


class TargetPreview(NamedTuple):
    """Counts of requests."""

    num_requests: int
    num_refused: int  # under the targets that are in force
    num_would_be_refused: int
    num_served: int  # that were served, and would still be
    num_meeting: int  # of those, within the new targets as measured
    num_newly_admitted: int  # refused then, admitted now: nothing was measured of them
    num_undecided: int  # refused unread, and maybe admitted now: their prompts' lengths are not known


def preview_targets(past: Iterable[PastRequest], present: AdmissionTargets, wanted: AdmissionTargets) -> TargetPreview:
    """Replays `past`. A refusal that the present targets do not explain (a reservation, shedding) stays one.

    Of one that was refused unread only a lower bound is known: targets below that refuse it, too.
    """
    num_requests = num_refused = num_would = num_served = num_meeting = num_new = num_undecided = 0
    for one in past:
        predicted = PredictedLatency(one.predicted_ttft_s, one.predicted_tbt_s)
        for_another_reason = one.was_refused and missed_target(predicted, present) is None
        would_be = for_another_reason or missed_target(predicted, wanted) is not None
        num_requests += 1
        num_refused += one.was_refused
        num_would += would_be
        num_new += one.was_refused and not would_be and not one.is_least
        num_undecided += one.was_refused and not would_be and one.is_least
        if not one.was_refused and not would_be:
            num_served += 1
            num_meeting += one.meets(wanted)
    return TargetPreview(num_requests, num_refused, num_would, num_served, num_meeting, num_new, num_undecided)
