"""Degradation: a class may reduce a request step by step before it is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from halfmoon.policy.admission.qos_classes import Degradation, QosClass
from halfmoon.policy.admission.refusal import PredictedLatency
from halfmoon.policy.placement.place import some_decode_only_fewer
from halfmoon.policy.values import SEEN_WHOLE, MostSeen, Placement, PlacementRequest
from halfmoon.policy.view.cluster_view import ClusterView

PRECISION_FACTOR = 0.5  # bytes of handed-over KV at the lower precision, relative to the usual one
LIKELY = 0.8  # quantile of the predicted output length: a request assumed gone too early makes others miss their TBT


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request that may go to its workers, as it is to be served."""

    placement: Placement
    qos: QosClass
    max_tokens: int
    lower_kv_precision: bool
    num_output: float  # predicted
    priority: int = 0  # smaller goes first
    mean_tbt_s: float = 0.0  # predicted, over the whole answer
    most_seen: MostSeen = SEEN_WHOLE

    def latency(self, tbt_s: float) -> PredictedLatency:
        """The predictions it is judged by, with this TBT; an answer of one token has none.

        Prompts computed in the same steps count as queue.
        """
        placement = self.placement
        tbt = tbt_s if self.max_tokens > 1 else None
        by_others_s = max(placement.queue_s, placement.ttft_s - placement.overhead_s - placement.work_s)
        return PredictedLatency(placement.ttft_s, tbt, by_others_s, ranked_by=placement.ranked_by)


def degraded_requests(request: PlacementRequest, qos: QosClass) -> Iterator[PlacementRequest]:
    """The request reduced by each step of its class, on top of the steps before. Steps without effect are left out."""
    for step in qos.degradation:
        less = _degraded(request, qos, step)
        if less != request:
            request = less
            yield less


def may_place_elsewhere(
    view: ClusterView, less: PlacementRequest, request: PlacementRequest, placement: Placement
) -> bool:
    """Whether another worker may serve `less` better than `placement`, which was made for `request`."""
    if less.kv_factor != request.kv_factor:
        return placement.handover_s > 0
    num_prompt = request.num_prompt_tokens
    return some_decode_only_fewer(view, num_prompt + request.max_tokens, num_prompt + less.max_tokens)


def _degraded(request: PlacementRequest, qos: QosClass, step: Degradation) -> PlacementRequest:
    """The request after one step; the same if the step changes nothing that placement depends on."""
    if step == "cap_max_tokens" and request.max_tokens > qos.capped_tokens:
        return replace(request, max_tokens=qos.capped_tokens)
    return replace(request, kv_factor=PRECISION_FACTOR) if step == "lower_kv_precision" else request
