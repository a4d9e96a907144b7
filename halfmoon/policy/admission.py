"""Admission: a request that would miss its class's targets is refused before anything is computed for it.

Mooncake (section 7): early rejection by the load of now, or by the decode load predicted for when the prefill ends.
"""

from __future__ import annotations

import math
from typing import Literal, Protocol

from halfmoon.errors import NoCapacity
from halfmoon.policy.decode_forecast import DecodeForecast
from halfmoon.policy.feedback import Targets
from halfmoon.policy.placement import Placement

AdmissionMode = Literal["off", "load", "predicted"]
RefusalReason = Literal["ttft", "tbt", "reservation", "shed"]

_SHORT_WAIT_S = 1.0
_LONG_WAIT_S = 60.0


class Refused(NoCapacity):
    """The request would miss its class's targets. Nothing was computed, no worker knows of it."""

    def __init__(
        self, qos_class: str, reason: RefusalReason, message: str, placement: Placement, wait_s: float
    ) -> None:
        retry_after_ms = math.ceil(1000 * min(max(wait_s, _SHORT_WAIT_S), _LONG_WAIT_S))
        super().__init__(message, retry_after_ms=retry_after_ms)
        self.qos_class = qos_class
        self.reason = reason
        self.ttft_s = placement.ttft_s
        self.tbt_s = placement.tbt_s


class Predicted(Protocol):
    """What a placement, or the ledger, says of a request."""

    @property
    def ttft_s(self) -> float: ...

    @property
    def tbt_s(self) -> float: ...


def missed_target(placement: Predicted, targets: Targets) -> Literal["ttft", "tbt"] | None:
    """Which target the placement's predictions miss; None where they meet both."""
    if targets.ttft_s is not None and placement.ttft_s > targets.ttft_s:
        return "ttft"
    if targets.tbt_s is not None and placement.tbt_s > targets.tbt_s:
        return "tbt"
    return None


def over_target(
    qos_class: str,
    reason: Literal["ttft", "tbt"],
    placement: Placement,
    targets: Targets,
    forecast: DecodeForecast,
    decode_row: int,
    now_s: float,
) -> Refused:
    """The refusal of a request over a target, with when it might be met: the queue shrinks, others leave."""
    if reason == "ttft":
        assert targets.ttft_s is not None
        message = (
            f"time to first token would be {placement.ttft_s:.3g} s, class {qos_class} allows {targets.ttft_s:.3g} s"
        )
        return Refused(qos_class, reason, message, placement, placement.ttft_s - targets.ttft_s)
    assert targets.tbt_s is not None
    message = (
        f"time between tokens would be {1000 * placement.tbt_s:.3g} ms, "
        f"class {qos_class} allows {1000 * targets.tbt_s:.3g} ms"
    )
    wait_s = _until_lighter_s(placement.tbt_s, targets.tbt_s, forecast, decode_row, now_s)
    return Refused(qos_class, reason, message, placement, wait_s)


def _until_lighter_s(tbt_s: float, target_s: float, forecast: DecodeForecast, row: int, now_s: float) -> float:
    """Until so many requests have left that steps take the target, each bearing an equal part of them."""
    ends_s = forecast.next_ends(row, now_s)
    num_leaving = math.ceil(len(ends_s) * (1 - target_s / tbt_s))
    return float(ends_s[num_leaving - 1]) - now_s if num_leaving > 0 else _SHORT_WAIT_S
