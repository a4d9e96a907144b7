"""The TBT by which admission judges a placement."""

from __future__ import annotations

from halfmoon.policy.admission.refusal import AdmissionMode
from halfmoon.policy.forecast.request_forecast import RequestForecast
from halfmoon.policy.values import Placement, PlacementRequest
from halfmoon.policy.view.cluster_view import ClusterView

_USUAL_WEIGHT = 0.02  # of the latest request in the usual TTFT


class AdmissionTbt:
    """Owns the usual TTFT: the mean prediction for the latest requests."""

    def __init__(self, forecast: RequestForecast) -> None:
        self._forecast = forecast
        self._usual_ttft_s: float | None = None

    def note_ttft(self, ttft_s: float) -> None:
        """Updates the usual TTFT, by every request that asks, admitted or not."""
        before_s = ttft_s if self._usual_ttft_s is None else self._usual_ttft_s
        self._usual_ttft_s = before_s + _USUAL_WEIGHT * (ttft_s - before_s)

    def of(
        self, view: ClusterView, request: PlacementRequest, placement: Placement, mode: AdmissionMode, now_s: float
    ) -> float:
        """The TBT that the mode judges the placement by, in seconds.

        - load: on a worker with an even share of the present decode load.
        - predicted: at the end of this prefill. A prefill longer than usual is also judged at the end of a usual one:
          the forecast contains no future arrivals, so a distant moment always looks idle, and long prompts would take
          the place of short ones.
        """
        if mode == "load":
            return self._forecast.tbt_at_mean_load(view, request, placement, now_s)
        if self._usual_ttft_s is None or placement.ttft_s <= self._usual_ttft_s:
            return placement.tbt_s
        usual_s = self._forecast.tbt_at(view, request, placement, now_s + self._usual_ttft_s, now_s)
        return max(placement.tbt_s, usual_s)
