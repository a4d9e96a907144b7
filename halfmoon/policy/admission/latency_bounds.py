"""What no prompt undercuts at this moment, by what is known of it: who misses a target by that need not be read."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from halfmoon.policy.admission.feedback import AdmissionTargets
from halfmoon.policy.admission.refusal import AdmissionMode, PredictedLatency
from halfmoon.policy.forecast.decode_forecast import DecodeLoads
from halfmoon.policy.forecast.prefill_queue_model import Prefill
from halfmoon.policy.forecast.request_forecast import RequestForecast
from halfmoon.policy.placement.place import NOTHING_CACHED, PlacementRequest
from halfmoon.policy.placement.ranking import predict_tbt
from halfmoon.policy.placement.ttft import TtftPrediction, prefill_seconds
from halfmoon.policy.view.cluster_view import ClusterView

_ROUNDING_S = 1e-9  # two sums of the same


class PromptLowerBound(NamedTuple):
    """What is known of a prompt that is not read to its end; of no prompt more than this is known: one token.

    The leading blocks that are held are known exactly, or `num_tokens` is 1. They are whole ones of `num_tokens`, and
    leave one at least. Then no longer prompt is computed sooner: what it has more is computed, too.
    """

    num_tokens: int = 1  # it has no fewer
    depths: NDArray[np.int64] = NOTHING_CACHED  # `BlockIndex.match`
    fetch_factor: float = 1.0  # the least one that its class allows

    @property
    def is_any(self) -> bool:
        """Whether it says nothing."""
        return self.num_tokens == 1


ANY_PROMPT = PromptLowerBound()


def latency_lower_bound(
    forecast: RequestForecast,
    view: ClusterView,
    prompt: PromptLowerBound,
    priority: int,
    targets: AdmissionTargets,
    mode: AdmissionMode,
    now_s: float,
) -> tuple[PredictedLatency, int]:
    """The least TTFT and TBT, and the row of the decode worker that is the least busy.

    A prompt may go to any worker: chance or a prefix may have it there. So the TTFT is the least of all workers', and
    the answer may join others at any moment that leaves the TTFT within its target.
    """
    num_rows = view.num_rows
    request = PlacementRequest(prompt.num_tokens, 1, fetch_factor=prompt.fetch_factor, priority=priority)
    ttft = forecast.ttft(view, request, now_s, prompt.depths)
    least_s, alone_s = _least_ttft(forecast, view, request, prompt.depths, ttft, targets.ttft_s, now_s)
    if mode == "load":
        loads = forecast.mean_load(view, now_s)
    elif targets.ttft_s is None:
        loads = DecodeLoads(np.zeros(num_rows), np.zeros(num_rows))
    else:
        loads = forecast.decodes.least_loads(now_s + least_s, now_s + targets.ttft_s, now_s, num_rows)
    decodes = np.flatnonzero(view.can_decode[:num_rows] | view.can_do_both[:num_rows])
    tbt_s = predict_tbt(view, loads, prompt.num_tokens)[decodes]
    lightest = int(np.argmin(tbt_s))
    outlook = PredictedLatency(least_s, float(tbt_s[lightest]), least_s - alone_s, is_least=True, ranked_by=ttft)
    return outlook, int(decodes[lightest])


def _least_ttft(
    forecast: RequestForecast,
    view: ClusterView,
    request: PlacementRequest,
    depths: NDArray[np.int64],
    ttft: TtftPrediction,
    target_s: float | None,
    now_s: float,
) -> tuple[float, float]:
    """Seconds, and what they would be with nobody else there.

    With a worker that may meet the target nobody is refused for it, so none is looked at more closely than that needs:
    then it is only what the prompt takes alone. Nor is one where nobody else can be sooner.
    """
    num_rows = view.num_rows
    known_tokens = depths.max() * view.column("block_tokens")  # should it come by all that anybody has
    rows = np.flatnonzero(view.can_prefill[:num_rows] | view.can_do_both[:num_rows])
    overhead_s = forecast.overhead_s
    least_s, alone_s = math.inf, overhead_s + float((ttft.seconds - ttft.queue_s)[rows].min())
    if target_s is None:
        return alone_s, alone_s
    alone = prefill_seconds(view, known_tokens, float(request.num_prompt_tokens))
    floors_s = overhead_s + np.minimum(ttft.seconds, forecast.steps_left_s(view, now_s) + alone)[rows]
    order = np.argsort(floors_s)
    for row, floor_s in zip(rows[order].tolist(), floors_s[order].tolist(), strict=True):
        if least_s <= target_s or (floor_s > target_s and least_s <= floor_s + _ROUNDING_S):
            break
        known = int(known_tokens[row])
        work = Prefill(request.num_prompt_tokens - known, known, request.priority, -math.inf)
        exactly_s = forecast.earliest_s(view, row, work, now_s)
        least_s = min(least_s, overhead_s + min(float(ttft.seconds[row]), exactly_s))
    return (alone_s if least_s <= target_s else least_s), alone_s
