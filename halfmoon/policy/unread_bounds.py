"""What no prompt undercuts at this moment, whatever it is: who misses a target by that need not be read."""

from __future__ import annotations

import numpy as np

from halfmoon.policy.admission import AdmissionMode, Outlook
from halfmoon.policy.cluster_view import ClusterView
from halfmoon.policy.decode_forecast import DecodeLoads
from halfmoon.policy.feedback import Targets
from halfmoon.policy.placement import NOTHING_CACHED, Placement, PlacementRequest, predict_tbt
from halfmoon.policy.request_forecast import RequestForecast


def least_outlook(
    forecast: RequestForecast, view: ClusterView, priority: int, targets: Targets, mode: AdmissionMode, now_s: float
) -> tuple[Outlook, int]:
    """The least TTFT and TBT, and the row of the decode worker that is the least busy: predictions of a prompt of one
    token, whose decode worker may join others at any moment that leaves the TTFT within its target."""
    num_rows = view.num_rows
    ttft = forecast.ttft(view, PlacementRequest(1, 1, priority=priority), now_s, NOTHING_CACHED)
    prefills = np.flatnonzero(view.can_prefill[:num_rows] | view.can_do_both[:num_rows])
    first = prefills[np.argmin(ttft.seconds[prefills])]
    worker, least_s = view.worker(int(first)), float(ttft.seconds[first])
    alone = Placement(worker, worker, least_s, queue_s=float(ttft.queue_s[first]))
    alone = forecast.exactly(view, alone, 1, priority, now_s)  # short ones overtake others
    least_s = min(least_s + forecast.overhead_s, alone.ttft_s)
    if mode == "load":
        loads = forecast.mean_load(view, now_s)
    elif targets.ttft_s is None:
        loads = DecodeLoads(np.zeros(num_rows), np.zeros(num_rows))
    else:
        loads = forecast.decodes.least_loads(now_s + least_s, now_s + targets.ttft_s, now_s, num_rows)
    decodes = np.flatnonzero(view.can_decode[:num_rows] | view.can_do_both[:num_rows])
    tbt_s = predict_tbt(view, loads, 1)[decodes]
    lightest = int(np.argmin(tbt_s))
    outlook = Outlook(least_s, float(tbt_s[lightest]), alone.queue_s, is_least=True, ranked_by=ttft)
    return outlook, int(decodes[lightest])
