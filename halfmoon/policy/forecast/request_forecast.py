"""What the requests inside will do, and so what a new one can expect: its TTFT, its prefill, decode loads, its TBT."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from halfmoon.policy.forecast.decode_forecast import DecodeForecast
from halfmoon.policy.forecast.handover import HandoverPrediction, HandoverQueue, predict_handover
from halfmoon.policy.forecast.prefill_forecast import PrefillForecast
from halfmoon.policy.forecast.prefill_queue_models import PrefillQueueModels
from halfmoon.policy.forecast.prefill_step import PromptWork
from halfmoon.policy.forecast.room import Rooms, beside, paused_s, room_s
from halfmoon.policy.forecast.ttft import predict_ttft
from halfmoon.policy.models.latency import Floats
from halfmoon.policy.models.overheads import Overhead
from halfmoon.policy.values import (
    SEEN_WHOLE,
    DecodeLoad,
    DecodeLoads,
    MostSeen,
    Neighbours,
    Placement,
    PlacementRequest,
    TtftPrediction,
    UnloadedLatency,
)
from halfmoon.policy.view.cluster_view import ClusterView

_MANY_GAPS = 1_000  # in an answer whose length does not matter


@dataclass(frozen=True, slots=True)
class RunningRequest:
    """The work of an admitted request."""

    num_prompt_tokens: int
    num_output: float  # predicted
    tbt_s: float  # predicted over the whole answer: determines when it leaves
    priority: int  # smaller goes first
    tbt_target_s: float = math.inf  # of its class
    class_priority: int = 0
    max_pause_s: float = 0.0
    most_seen: MostSeen = SEEN_WHOLE

    @property
    def context(self) -> tuple[float, float]:
        """Tokens that its first decode step sees of it, and how many more its last one."""
        growth = min(self.num_output, max(self.most_seen.answer - self.num_prompt_tokens, 0.0))
        return min(self.num_prompt_tokens, self.most_seen.answer), growth


class RequestForecast:
    """Owns the predicted prefill and decode times of each request inside, and the learned overheads. Has no clock.

    Answers questions and chooses nothing. Knows nothing of classes and placement modes.
    """

    def __init__(self, fetching_threshold: float | None) -> None:
        """`fetching_threshold` is `PlacementRules.fetching_threshold`."""
        self.decodes = DecodeForecast()
        self._fetching_threshold = fetching_threshold
        self._prefills = PrefillForecast()
        self._queue_models = PrefillQueueModels(self.decodes)
        self._handovers = HandoverQueue()
        self._before_token = Overhead()
        self._handover = Overhead()
        self._num_shares: dict[str, int] = {}  # of prompts that several workers compute

    @property
    def overhead_s(self) -> float:
        """Part of a TTFT that is neither queue nor prefill."""
        return self._before_token.seconds

    # The questions of a placement, in the order in which `place` asks them.

    def ttft(self, view: ClusterView, request: PlacementRequest, now_s: float) -> TtftPrediction:
        """Estimates the TTFT on every worker from the sums of work ahead on each."""

        def waits(reported_s: Floats, takes_s: Floats) -> Floats:
            """Work that a worker reports beyond this gateway's comes from other gateways, and counts as ahead."""
            others_s = np.maximum(reported_s - self._prefills.totals(len(takes_s), now_s), 0.0)
            return others_s + self._prefills.waits(takes_s, request.priority, now_s)

        return predict_ttft(view, request, self._fetching_threshold, now_s, waits)

    def refine_prefill(
        self, view: ClusterView, request: PlacementRequest, placement: Placement, now_s: float
    ) -> Placement:
        """The placement with its prefill predicted from the steps of the worker, and with the overhead."""
        num_tokens, priority, most_seen = request.num_prompt_tokens, request.priority, request.most_seen.prompt
        refined = self._queue_models.refine(view, placement, num_tokens, priority, now_s, most_seen)
        overhead_s = self.overhead_s
        return replace(refined, ttft_s=refined.ttft_s + overhead_s, overhead_s=overhead_s) if overhead_s else refined

    def decode_loads(self, view: ClusterView, at_s: float, now_s: float) -> DecodeLoads:
        """The decode load of every row at `at_s`."""
        return self.decodes.loads(at_s, now_s, view.num_rows)

    def handover(
        self, view: ClusterView, request: PlacementRequest, prefill: Placement, at_s: float
    ) -> HandoverPrediction:
        """Predicts the hand-over from the placement's prefill worker, where the first token is due at `at_s`."""
        return predict_handover(view, request, prefill, self._handovers.ahead_bytes(view.num_rows, at_s))

    def decode_load(self, row: int, at_s: float, now_s: float) -> DecodeLoad:
        """The decode load of one row at `at_s`."""
        return self.decodes.load(row, at_s, now_s)

    def load_beside(
        self, view: ClusterView, request: PlacementRequest, row: int, load: DecodeLoad, at_s: float, now_s: float
    ) -> DecodeLoad:
        """`load` of one row at `at_s`, without the answers that would be paused for the request."""
        if request.class_priority is None or not self.decodes.num_pausable:
            return load
        return self.loads_beside(view, request, at_s, at_s, now_s).of(row)

    def refine_decode(
        self, view: ClusterView, request: PlacementRequest, placement: Placement, now_s: float
    ) -> Placement:
        """The placement with what prompts in the same steps, colocated workers and pauses add to its TBT, and what
        waiting for room adds to the TTFT of a request that may be paused.
        """
        tbt_s = self._queue_models.tbt_s(view, placement, placement.tbt_s, _MANY_GAPS, now_s)
        if request.max_pause_s > 0 and request.class_priority is not None:
            row = _decode_row(view, placement)
            before = self.decodes.before(row, request.class_priority, now_s)
            wait_s = room_s(before, _rooms(view).of(row), request.context_tokens(1), now_s) - placement.queue_s
            if wait_s > 0:
                placement = replace(placement, ttft_s=placement.ttft_s + wait_s, queue_s=placement.queue_s + wait_s)
            tbt_s = self._with_pauses(view, request, placement, tbt_s, request.num_gaps, now_s)
        return replace(placement, tbt_s=tbt_s) if tbt_s != placement.tbt_s else placement

    def neighbours(self, view: ClusterView, row: int, until_s: float, now_s: float) -> Neighbours:
        """The requests that decode on `row` before `until_s`, and the prompts that they share its steps with."""
        found = self.decodes.neighbours(row, until_s, now_s)
        return found._replace(prompts_s=self._queue_models.prompts_s(view, row, found.mean_life_s, now_s))

    # The questions of admission.

    def earliest_s(self, view: ClusterView, row: int, work: PromptWork, now_s: float) -> float:
        """Lower bound on `refine_prefill` on that worker, in seconds from now, for any prompt with at least this work.

        Infinite where `refine_prefill` changes nothing.
        """
        return self._queue_models.earliest_s(view, row, work, now_s)

    def steps_left_s(self, view: ClusterView, num_tokens: Floats, now_s: float) -> Floats:
        """Lower bound [num_rows] on the wait that `earliest_s` contains for any prompt with at least `num_tokens` to
        compute there.
        """
        return self._queue_models.steps_left_s(view, num_tokens, now_s)

    def handover_s(self, placement: Placement, num_output: float) -> float:
        """What the hand-over adds to the mean TBT of an answer: as predicted, and what usually comes on top."""
        return (placement.handover_s + self._handover.seconds) / max(num_output - 1, 1)

    def mean_tbt_s(
        self, view: ClusterView, request: PlacementRequest, placement: Placement, num_output: float, now_s: float
    ) -> float:
        """The mean TBT over the whole answer, while others leave and join; `Placement.tbt_s` is for its beginning."""
        begins_s = now_s + placement.ttft_s
        ends_s = begins_s + num_output * placement.tbt_s
        load = self.decodes.mean_load(_decode_row(view, placement), begins_s, ends_s, now_s)
        context_tokens = load.context_tokens + request.context_tokens(num_output / 2)
        step_s = placement.decode.step_model.seconds(load.batch + 1, context_tokens)
        num_gaps = max(num_output - 1, 1)
        tbt_s = self._queue_models.tbt_s(view, placement, step_s, num_gaps, now_s)
        tbt_s = self._with_pauses(view, request, placement, tbt_s, num_gaps, now_s)
        return tbt_s + self.handover_s(placement, num_output)

    def _with_pauses(
        self,
        view: ClusterView,
        request: PlacementRequest,
        placement: Placement,
        tbt_s: float,
        num_gaps: float,
        now_s: float,
    ) -> float:
        """The mean TBT with the pauses for higher classes."""
        if request.class_priority is None or request.max_pause_s <= 0:
            return tbt_s
        row = _decode_row(view, placement)
        before, room = self.decodes.before(row, request.class_priority, now_s), _rooms(view).of(row)
        num_tokens, begins_s = request.context_tokens(num_gaps / 2), now_s + placement.ttft_s
        return tbt_s + paused_s(before, room, num_tokens, begins_s, num_gaps * tbt_s, request.max_pause_s) / num_gaps

    def unloaded_latency(self, placement: Placement, context_tokens: float, num_output: float) -> UnloadedLatency:
        """The latency of a request on these workers if they were idle; its steps see `context_tokens` in the mean."""
        step_s = placement.decode.step_model.seconds(1, context_tokens)
        return UnloadedLatency(placement.work_s + placement.overhead_s, step_s + self.handover_s(placement, num_output))

    def loads_beside(
        self, view: ClusterView, request: PlacementRequest, from_s: float, until_s: float, now_s: float
    ) -> DecodeLoads:
        """Lower bound on the decode loads beside the request at any moment of a period: the requests that are there at
        `from_s` and stay, without the answers that would be paused for it.
        """
        num_rows, class_priority = view.num_rows, request.class_priority
        loads = self.decodes.loads_lower_bound(from_s, until_s, now_s, num_rows)
        if class_priority is None or not self.decodes.num_pausable:
            return loads
        giving_way = self.decodes.giving_way(class_priority, from_s, until_s, now_s, num_rows)
        return beside(loads, giving_way, _rooms(view), request.context_tokens())

    def tbt_at(
        self, view: ClusterView, request: PlacementRequest, placement: Placement, at_s: float, now_s: float
    ) -> float:
        """The TBT on the decode worker of the placement if the answer began at `at_s`."""
        row = _decode_row(view, placement)
        load = self.load_beside(view, request, row, self.decodes.load(row, at_s, now_s), at_s, now_s)
        return self._tbt_s(view, placement, request.context_tokens(), load, now_s)

    def tbt_at_mean_load(
        self, view: ClusterView, request: PlacementRequest, placement: Placement, now_s: float
    ) -> float:
        """The TBT on the decode worker of the placement if the present decode load were spread evenly."""
        load = self.mean_load(view, request, now_s).of(0)
        return self._tbt_s(view, placement, request.context_tokens(), load, now_s)

    def mean_load(self, view: ClusterView, request: PlacementRequest, now_s: float) -> DecodeLoads:
        """The present decode load spread evenly over the workers that decode, for every row."""
        batch, context = self.loads_beside(view, request, now_s, now_s, now_s)
        share = np.ones(view.num_rows) / view.num_decoding
        return DecodeLoads(batch.sum() * share, context.sum() * share)

    def _tbt_s(
        self, view: ClusterView, placement: Placement, context_tokens: float, load: DecodeLoad, now_s: float
    ) -> float:
        step_s = placement.decode.step_model.seconds(load.batch + 1, load.context_tokens + context_tokens)
        return self._queue_models.tbt_s(view, placement, step_s, _MANY_GAPS, now_s)

    # The life of a request.

    def reserve(
        self, request_id: str, view: ClusterView, running: RunningRequest, placement: Placement, now_s: float
    ) -> None:
        """Counts an admitted request whose turn has not come: its decode from now on, its prompt not at all."""
        leaves_s = now_s + placement.ttft_s + running.num_output * running.tbt_s
        row = _decode_row(view, placement)
        level = running.class_priority, running.max_pause_s
        self.decodes.join(request_id, row, now_s, leaves_s, *running.context, running.tbt_target_s, *level)

    def move(
        self, request_id: str, view: ClusterView, running: RunningRequest, placement: Placement, now_s: float
    ) -> None:
        """Sends the request to these workers, and takes it off any others."""
        row = _decode_row(view, placement)
        num_prompt, num_output, priority = running.num_prompt_tokens, running.num_output, running.priority
        target_s, shares = running.tbt_target_s, placement.shares(num_prompt)
        self._leave_prefills(request_id, now_s)
        for name, share in zip(_names(request_id, len(shares)), shares, strict=True):
            prefill_row = view.row(share.prefill.worker_id)
            assert prefill_row is not None
            step_s = share.prefill.prefill_model.seconds(share.prefill.step_tokens) or math.inf
            self._prefills.join(name, prefill_row, placement.work_s, step_s, priority, now_s)
            lengths = num_prompt, num_output
            self._queue_models.join(name, view, share, *lengths, priority, now_s, target_s, running.most_seen)
        if len(shares) > 1:
            self._num_shares[request_id] = len(shares)
        joins_s = now_s + placement.ttft_s
        self._handovers.join(request_id, row, placement.handover_bytes, joins_s)
        self.decodes.leave(request_id)  # reserved or placed before
        leaves_s = joins_s + num_output * running.tbt_s
        level = running.class_priority, running.max_pause_s
        self.decodes.join(request_id, row, joins_s, leaves_s, *running.context, target_s, *level)
        self.decodes.pause_for(request_id, _rooms(view).of(row))

    def begin_decode(self, request_id: str, now_s: float) -> None:
        """Notes the first token of a request."""
        for name in _names(request_id, self._num_shares.pop(request_id, 1)):
            self._prefills.leave(name, now_s)
            self._queue_models.computed(name, now_s)
        self._handovers.leave(request_id)
        self.decodes.begin(request_id, now_s)

    def leave(self, request_id: str, now_s: float) -> None:
        """Removes a request that has ended."""
        self._leave_prefills(request_id, now_s)
        self._handovers.leave(request_id)
        self.decodes.leave(request_id)

    def _leave_prefills(self, request_id: str, now_s: float) -> None:
        for name in _names(request_id, self._num_shares.pop(request_id, 1)):
            self._prefills.leave(name, now_s)
            self._queue_models.leave(name, now_s)

    def note_overheads(self, before_token_s: float, handover_s: float | None) -> None:
        """Learns the measured overheads of one request.

        `before_token_s` is its TTFT less queue and prefill, `handover_s` its first gaps less decode steps and less what
        was predicted of the hand-over; None if unknown.
        """
        self._before_token.add(before_token_s)
        if handover_s is not None:
            self._handover.add(handover_s)


def _names(request_id: str, num_shares: int) -> list[str]:
    """The names of a prompt at the workers that compute it."""
    return [request_id, *(f"{request_id}/{number}" for number in range(1, num_shares))]


def _rooms(view: ClusterView) -> Rooms:
    return Rooms(view.column("max_running"), view.column("total_tokens"))


def _decode_row(view: ClusterView, placement: Placement) -> int:
    row = view.row(placement.decode.worker_id)
    assert row is not None
    return row
