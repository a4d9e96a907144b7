"""What a request may have of the cluster: what it asks for, then less, by the steps that its class allows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from halfmoon.policy.admission.classes import Degradation, QosClass
from halfmoon.policy.admission.refusal import PredictedLatency
from halfmoon.policy.forecast.request_forecast import RequestForecast
from halfmoon.policy.models.output_lengths import OutputLengths
from halfmoon.policy.placement.place import Placement, PlacementRequest, decodes_more
from halfmoon.policy.view.cluster_view import ClusterView

PRECISION_FACTOR = 0.5  # of the bytes of KV that are fetched, at the lower precision
LIKELY = 0.8  # of answers end within the predicted length: who is taken to have left and has not makes others late


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

    def outlook(self, tbt_s: float) -> PredictedLatency:
        """By which it is judged, where its TBT is that. One token has no gap; prompts of others that are computed in
        the same steps are waited for, too."""
        placement = self.placement
        tbt = tbt_s if self.max_tokens > 1 else None
        by_others_s = max(placement.queue_s, placement.ttft_s - placement.overhead_s - placement.work_s)
        return PredictedLatency(placement.ttft_s, tbt, by_others_s, ranked_by=placement.ranked_by)


class DegradationSteps:
    """Owns nothing: the forecast places, the lengths say how long an answer becomes. Whether one is taken is the
    gatekeeper's to judge."""

    def __init__(self, forecast: RequestForecast, lengths: OutputLengths) -> None:
        self._forecast = forecast
        self._lengths = lengths

    def of(
        self,
        view: ClusterView,
        request: PlacementRequest,
        qos: QosClass,
        now_s: float,
        depths: NDArray[np.int64],
    ) -> Iterator[Admitted]:
        """What the request may have: what it asks for, then less with each of its class's steps. A step that changes
        nothing of what is predicted offers nothing; it is placed anew where another worker may serve it better.

        Raises what `place` raises.
        """
        placement = self._forecast.place(view, request, now_s, depths)
        yield self._admitted(view, request, qos, placement, now_s)
        for step in qos.degradation:
            less = _degraded(request, qos, step)
            if less == request:
                continue
            if self._may_go_elsewhere(view, less, request, placement):
                same_prompt = less.fetch_factor == request.fetch_factor
                placement = self._forecast.place(
                    view, less, now_s, depths, placement.ranked_by if same_prompt else None
                )
            request = less
            yield self._admitted(view, request, qos, placement, now_s)

    def _may_go_elsewhere(
        self, view: ClusterView, less: PlacementRequest, request: PlacementRequest, placement: Placement
    ) -> bool:
        if less.fetch_factor != request.fetch_factor:
            return placement.ranked_by is None or placement.ranked_by.may_fetch
        num_prompt = request.num_prompt_tokens
        return decodes_more(view, num_prompt + request.max_tokens, num_prompt + less.max_tokens)

    def _admitted(
        self, view: ClusterView, asked: PlacementRequest, qos: QosClass, placement: Placement, now_s: float
    ) -> Admitted:
        num_output = self._lengths.predict(qos.name, asked.num_prompt_tokens, asked.max_tokens, LIKELY)
        num_output = max(num_output, min(asked.least_tokens, asked.max_tokens))
        mean_tbt_s = self._forecast.mean_tbt_s(view, asked.num_prompt_tokens, placement, num_output, now_s)
        handover_s = self._forecast.handover_s(num_output)
        if handover_s:
            placement = replace(placement, tbt_s=placement.tbt_s + handover_s)
        lower = asked.fetch_factor < 1
        return Admitted(placement, qos, asked.max_tokens, lower, num_output, asked.priority, mean_tbt_s)


def _degraded(request: PlacementRequest, qos: QosClass, step: Degradation) -> PlacementRequest:
    """The same where the step asks for nothing less of the cluster."""
    if step == "cap_max_tokens" and request.max_tokens > qos.capped_tokens:
        return replace(request, max_tokens=qos.capped_tokens)
    return replace(request, fetch_factor=PRECISION_FACTOR) if step == "lower_kv_precision" else request
