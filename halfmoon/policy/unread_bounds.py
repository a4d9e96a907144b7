"""What no prompt undercuts at this moment, whatever it is: who misses a target by that need not be read."""

from __future__ import annotations

import math

import numpy as np

from halfmoon.policy.admission import AdmissionMode, Outlook
from halfmoon.policy.cluster_view import ClusterView
from halfmoon.policy.decode_forecast import DecodeLoads
from halfmoon.policy.feedback import Targets
from halfmoon.policy.placement import NOTHING_CACHED, PlacementRequest
from halfmoon.policy.ranking import predict_tbt
from halfmoon.policy.request_forecast import RequestForecast
from halfmoon.policy.ttft import TtftPrediction


def least_outlook(
    forecast: RequestForecast, view: ClusterView, priority: int, targets: Targets, mode: AdmissionMode, now_s: float
) -> tuple[Outlook, int]:
    """The least TTFT and TBT, and the row of the decode worker that is the least busy.

    A prompt may go to any worker: chance or a prefix may have it there. So the TTFT is the least of all workers', and
    the answer may join others at any moment that leaves the TTFT within its target.
    """
    num_rows = view.num_rows
    ttft = forecast.ttft(view, PlacementRequest(1, 1, priority=priority), now_s, NOTHING_CACHED)
    least_s, alone_s = _least_ttft(forecast, view, ttft, priority, targets.ttft_s, now_s)
    if mode == "load":
        loads = forecast.mean_load(view, now_s)
    elif targets.ttft_s is None:
        loads = DecodeLoads(np.zeros(num_rows), np.zeros(num_rows))
    else:
        loads = forecast.decodes.least_loads(now_s + least_s, now_s + targets.ttft_s, now_s, num_rows)
    decodes = np.flatnonzero(view.can_decode[:num_rows] | view.can_do_both[:num_rows])
    tbt_s = predict_tbt(view, loads, 1)[decodes]
    lightest = int(np.argmin(tbt_s))
    outlook = Outlook(least_s, float(tbt_s[lightest]), least_s - alone_s, is_least=True, ranked_by=ttft)
    return outlook, int(decodes[lightest])


def _least_ttft(
    forecast: RequestForecast,
    view: ClusterView,
    ttft: TtftPrediction,
    priority: int,
    target_s: float | None,
    now_s: float,
) -> tuple[float, float]:
    """Seconds, and what they would be with nobody else there.

    With a worker that may meet the target nobody is refused for it, so none is looked at more closely than that needs:
    then it is only what the prompt takes alone.
    """
    num_rows = view.num_rows
    rows = np.flatnonzero(view.can_prefill[:num_rows] | view.can_do_both[:num_rows])
    overhead_s = forecast.overhead_s
    least_s, alone_s = math.inf, overhead_s + float((ttft.seconds - ttft.queue_s)[rows].min())
    if target_s is None:
        return alone_s, alone_s
    for row in rows[np.argsort(ttft.seconds[rows])].tolist():
        exactly_s = forecast.earliest_s(view, row, priority, now_s)  # short ones overtake others
        least_s = min(least_s, overhead_s + min(float(ttft.seconds[row]), exactly_s))
        if least_s <= target_s:
            return alone_s, alone_s
    return least_s, alone_s
