"""A forecast that predicts nothing: workers stay as they reported."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from halfmoon.policy.forecast.handover import HandoverPrediction, predict_handover
from halfmoon.policy.forecast.ttft import predict_ttft
from halfmoon.policy.placement.place import PlacementRules
from halfmoon.policy.values import (
    NO_NEIGHBOURS,
    DecodeLoad,
    DecodeLoads,
    Neighbours,
    Placement,
    PlacementRequest,
    TtftPrediction,
)
from halfmoon.policy.view.cluster_view import ClusterView


class ReportedState:
    """Answers a placement from the cluster view alone; `loads_at` replaces the decode loads."""

    def __init__(
        self,
        view: ClusterView,
        rules: PlacementRules = PlacementRules(),  # noqa: B008  frozen
        loads_at: Callable[[float], DecodeLoads] | None = None,
    ) -> None:
        self._view = view
        self._threshold = rules.fetching_threshold
        self._loads_at = loads_at
        self.handover_gap_s = 0.0

    def ttft(self, view: ClusterView, request: PlacementRequest, now_s: float) -> TtftPrediction:
        return predict_ttft(view, request, self._threshold, now_s)

    def refine_prefill(
        self, view: ClusterView, request: PlacementRequest, placement: Placement, now_s: float
    ) -> Placement:
        return placement

    def decode_loads(self, view: ClusterView, at_s: float, now_s: float) -> DecodeLoads:
        if self._loads_at is not None:
            return self._loads_at(at_s)
        return DecodeLoads(view.column("num_requests"), view.column("context_in_use_tokens"))

    def decode_load(self, row: int, at_s: float, now_s: float) -> DecodeLoad:
        return self.decode_loads(self._view, at_s, now_s).of(row)

    def handover(
        self, view: ClusterView, request: PlacementRequest, prefill: Placement, at_s: float
    ) -> HandoverPrediction:
        return predict_handover(view, request, prefill, np.zeros(view.num_rows))

    def neighbours(self, view: ClusterView, row: int, until_s: float, now_s: float) -> Neighbours:
        load = self.decode_load(row, until_s, now_s)
        return Neighbours(load, math.inf, 10.0, 0.0) if load.batch else NO_NEIGHBOURS

    def handover_s(self, placement: Placement, num_output: float) -> float:
        return self.handover_gap_s

    def load_beside(
        self, view: ClusterView, request: PlacementRequest, row: int, load: DecodeLoad, at_s: float, now_s: float
    ) -> DecodeLoad:
        return load

    def refine_decode(
        self, view: ClusterView, request: PlacementRequest, placement: Placement, now_s: float
    ) -> Placement:
        return placement
