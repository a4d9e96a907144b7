"""What a placement asks of a forecast."""

from __future__ import annotations

from typing import Protocol

from halfmoon.policy.forecast.handover import HandoverPrediction
from halfmoon.policy.values import DecodeLoad, DecodeLoads, Neighbours, Placement, PlacementRequest, TtftPrediction
from halfmoon.policy.view.cluster_view import ClusterView


class Forecast(Protocol):
    """Predictions that a placement asks for, seen from `now_s`."""

    def ttft(self, view: ClusterView, request: PlacementRequest, now_s: float) -> TtftPrediction:
        """Estimates the TTFT on every worker."""

    def refine_prefill(
        self, view: ClusterView, request: PlacementRequest, placement: Placement, now_s: float
    ) -> Placement:
        """The placement with the times of its prefill predicted more closely than `ttft` does."""

    def decode_loads(self, view: ClusterView, at_s: float, now_s: float) -> DecodeLoads:
        """The decode load of every worker at `at_s`."""

    def neighbours(self, view: ClusterView, row: int, until_s: float, now_s: float) -> Neighbours:
        """The requests that decode on `row` before `until_s`, and the prompts that they share its steps with."""

    def handover_s(self, placement: Placement, num_output: float) -> float:
        """What the hand-over adds to the mean TBT of an answer."""

    def decode_load(self, row: int, at_s: float, now_s: float) -> DecodeLoad:
        """The decode load of one worker at `at_s`."""

    def load_beside(
        self, view: ClusterView, request: PlacementRequest, row: int, load: DecodeLoad, at_s: float, now_s: float
    ) -> DecodeLoad:
        """`load` of one worker at `at_s`, without what would be paused for the request."""

    def handover(
        self, view: ClusterView, request: PlacementRequest, prefill: Placement, at_s: float
    ) -> HandoverPrediction:
        """The hand-over from the placement's prefill worker to every worker, for a first token due at `at_s`."""

    def refine_decode(
        self, view: ClusterView, request: PlacementRequest, placement: Placement, now_s: float
    ) -> Placement:
        """The placement with what prompts, colocated workers and pauses add to its TBT."""
