"""Lower bounds on TTFT and TBT from what is known of a prompt. A request that misses a target even by these is rejected
before its prompt is tokenized."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from halfmoon.policy.admission.qos_classes import QosClass
from halfmoon.policy.admission.refusal import AdmissionMode, PredictedLatency
from halfmoon.policy.forecast.prefill_step import PromptWork
from halfmoon.policy.forecast.request_forecast import RequestForecast
from halfmoon.policy.forecast.ttft import prefill_seconds
from halfmoon.policy.placement.ranking import predict_tbt
from halfmoon.policy.values import (
    NOTHING_CACHED,
    SEEN_WHOLE,
    AdmissionTargets,
    DecodeLoads,
    MostSeen,
    PlacementRequest,
    TtftPrediction,
)
from halfmoon.policy.view.capabilities import Bools
from halfmoon.policy.view.cluster_view import ClusterView

_ROUNDING_S = 1e-9  # two sums of the same terms may differ by as much


class PromptLowerBound(NamedTuple):
    """What is known of a prompt that has not been read to its end; of an unread one, that it has a token.

    Either `num_tokens` is 1, or `cached_blocks` is exact: whole blocks of the first `num_tokens`, which leave at least
    one token to compute. No longer prompt is then computed sooner, since whatever it has more is computed, too.
    """

    num_tokens: int = 1  # at least
    cached_blocks: NDArray[np.int64] = NOTHING_CACHED  # `BlockIndex.match`
    most_seen: MostSeen = SEEN_WHOLE


ANY_PROMPT = PromptLowerBound()


def latency_lower_bound(
    forecast: RequestForecast,
    view: ClusterView,
    prompt: PromptLowerBound,
    priority: int,
    qos: QosClass,
    targets: AdmissionTargets,
    mode: AdmissionMode,
    now_s: float,
    *,
    may_keep: bool = False,
) -> tuple[PredictedLatency, int]:
    """The least TTFT and TBT, and the row of the least loaded decode worker.

    Chance or a cached prefix may take a prompt to any worker, so the TTFT is the least over all workers. The answer
    may begin at any moment that leaves the TTFT within its target, so the TBT is the least over all such moments.
    `may_keep`: decode workers may compute prompts (`placement/conditional.py`).
    """
    num_rows = view.num_rows
    request = PlacementRequest(
        prompt.num_tokens,
        1,
        priority=priority,
        class_priority=qos.priority,
        most_seen=prompt.most_seen,
        cached_blocks=prompt.cached_blocks,
    )
    ttft = forecast.ttft(view, request, now_s)
    computing = view.can_prefill[:num_rows] | view.can_do_both[:num_rows]
    if may_keep:
        computing |= view.capabilities.may_keep
    ttft_s, unloaded_s = _ttft_lower_bound(forecast, view, request, ttft, computing, targets.ttft_s, now_s)
    if mode == "load":
        loads = forecast.mean_load(view, request, now_s)
    elif targets.ttft_s is None:
        loads = DecodeLoads(np.zeros(num_rows), np.zeros(num_rows))
    else:
        loads = forecast.loads_beside(view, request, now_s + ttft_s, now_s + targets.ttft_s, now_s)
    decodes = np.flatnonzero(view.can_decode[:num_rows] | view.can_do_both[:num_rows])
    tbt_s = predict_tbt(view, loads, request.context_tokens())[decodes]
    lightest = int(np.argmin(tbt_s))
    latency = PredictedLatency(ttft_s, float(tbt_s[lightest]), ttft_s - unloaded_s, is_lower_bound=True, ranked_by=ttft)
    return latency, int(decodes[lightest])


def _ttft_lower_bound(
    forecast: RequestForecast,
    view: ClusterView,
    request: PlacementRequest,
    ttft: TtftPrediction,
    computing: Bools,
    target_s: float | None,
    now_s: float,
) -> tuple[float, float]:
    """Seconds, and what they would be on an idle cluster.

    If some worker may meet the target, no request is refused for its TTFT: the search ends there, and the bound is
    only the time on an idle worker. It also ends where no further worker can be faster.
    """
    cached_tokens = request.cached_blocks.max() * view.column("block_tokens")  # if all cached blocks were fetched
    rows = np.flatnonzero(computing)
    overhead_s = forecast.overhead_s
    least_s, unloaded_s = math.inf, overhead_s + float((ttft.seconds - ttft.queue_s)[rows].min())
    if target_s is None:
        return unloaded_s, unloaded_s
    prefill_s = prefill_seconds(view, cached_tokens, float(request.num_prompt_tokens), request.most_seen.prompt)
    steps_left_s = forecast.steps_left_s(view, request.num_prompt_tokens - cached_tokens, now_s)
    floors_s = overhead_s + np.minimum(ttft.seconds, steps_left_s + prefill_s)[rows]
    order = np.argsort(floors_s)
    for row, floor_s in zip(rows[order].tolist(), floors_s[order].tolist(), strict=True):
        if least_s <= target_s or (floor_s > target_s and least_s <= floor_s + _ROUNDING_S):
            break
        cached = int(cached_tokens[row])
        num_new, most_seen = request.num_prompt_tokens - cached, request.most_seen.prompt
        work = PromptWork(num_new, cached, request.priority, -math.inf, most_seen)
        refined_s = forecast.earliest_s(view, row, work, now_s)
        least_s = min(least_s, overhead_s + min(float(ttft.seconds[row]), refined_s))
    return (unloaded_s if least_s <= target_s else least_s), unloaded_s
