"""What became of a replayed workload: each request's outcome, and the figures of all of them. Pure.

Every request has one of four ends:

    in time   answered, within the targets for TTFT and for TBT
    late      answered, and a target was missed: the work was wasted
    refused   turned away before anything was computed (429), by reason
    failed    anything else

Mooncake (section 7.3) counts requests that are rejected or whose prefill was wasted: here, all but those in time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

End = Literal["answered", "refused", "failed"]


@dataclass(frozen=True, slots=True)
class ReplayTargets:
    """The SLO, in the trace's seconds; infinite: no target."""

    ttft_s: float = math.inf
    tbt_s: float = math.inf  # mean of a request's


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request, in the trace's seconds."""

    end: End
    reason: str = ""  # why it was refused or failed
    ttft_s: float = math.nan
    tbt_s: float = math.nan  # mean time between its tokens; 0 for a single token
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    sent_late_s: float = 0.0  # after it was due: the replayer's own delay
    text: str = ""  # of the answer to a chat's turn, for those that follow, or of an error

    def meets(self, targets: ReplayTargets) -> bool:
        """Whether it was answered in time."""
        return self.end == "answered" and self.ttft_s <= targets.ttft_s and self.tbt_s <= targets.tbt_s


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and percentiles, in seconds; NaN without data."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one replay, with times in the trace's seconds."""

    num_requests: int
    num_in_time: int
    num_refused_or_wasted: int  # all others, as Mooncake counts
    num_late: int
    num_late_ttft: int  # late requests that missed the TTFT target
    num_refused: int
    refused_by: dict[str, int]
    num_failed: int
    failed_by: dict[str, int]
    attainment: float  # of all requests
    goodput_per_s: float  # requests in time, over the time in which requests arrived
    ttft_s: Spread  # of answered requests
    tbt_s: Spread
    num_output_tokens: int  # of answered requests
    cached_share: float  # of their prompt tokens
    sent_late_p99_s: float

    def as_json(self) -> dict[str, Any]:
        """JSON values; NaN as null."""
        return {key: _jsonable(value) for key, value in asdict(self).items()}


def summarized(outcomes: Sequence[Outcome], targets: ReplayTargets, duration_s: float) -> Summary:
    """The figures of a replay whose requests arrived within `duration_s`."""
    answered = [outcome for outcome in outcomes if outcome.end == "answered"]
    in_time = sum(outcome.meets(targets) for outcome in answered)
    refused = Counter(outcome.reason for outcome in outcomes if outcome.end == "refused")
    failed = Counter(outcome.reason for outcome in outcomes if outcome.end == "failed")
    prompt_tokens = sum(outcome.num_prompt_tokens for outcome in answered)
    return Summary(
        num_requests=len(outcomes),
        num_in_time=in_time,
        num_refused_or_wasted=len(outcomes) - in_time,
        num_late=len(answered) - in_time,
        num_late_ttft=sum(outcome.ttft_s > targets.ttft_s for outcome in answered),
        num_refused=refused.total(),
        refused_by=dict(refused),
        num_failed=failed.total(),
        failed_by=dict(failed),
        attainment=in_time / len(outcomes) if outcomes else math.nan,
        goodput_per_s=in_time / duration_s if duration_s > 0 else math.nan,
        ttft_s=_spread([outcome.ttft_s for outcome in answered]),
        tbt_s=_spread([outcome.tbt_s for outcome in answered if outcome.num_tokens > 1]),
        num_output_tokens=sum(outcome.num_tokens for outcome in answered),
        cached_share=sum(outcome.num_cached_tokens for outcome in answered) / prompt_tokens
        if prompt_tokens
        else math.nan,
        sent_late_p99_s=_spread([outcome.sent_late_s for outcome in outcomes]).p99,
    )


def _spread(values: Sequence[float]) -> Spread:
    if not values:
        return Spread(math.nan, math.nan, math.nan, math.nan)
    p50, p90, p99 = np.percentile(values, [50, 90, 99])
    return Spread(float(np.mean(values)), float(p50), float(p90), float(p99))


def _jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _jsonable(one) for key, one in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
