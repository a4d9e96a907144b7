"""What is foreseen of the requests inside, and so of one that asks: its placement, its TTFT, its TBT."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from halfmoon.policy.admission.feedback import Alone
from halfmoon.policy.forecast.decode_forecast import DecodeForecast, DecodeLoad, DecodeLoads
from halfmoon.policy.forecast.prefill_forecast import PrefillForecast
from halfmoon.policy.forecast.prefill_queue_model import Prefill
from halfmoon.policy.forecast.prefill_queue_models import PrefillQueueModels
from halfmoon.policy.models.latency import Floats
from halfmoon.policy.models.overheads import Overhead
from halfmoon.policy.placement.place import NOTHING_CACHED, Placement, PlacementRequest, PlacementRules, place
from halfmoon.policy.placement.ttft import TtftPrediction, predict_ttft
from halfmoon.policy.view.cluster_view import ClusterView

_MANY = 1_000  # gaps of an answer whose end does not matter


@dataclass(frozen=True, slots=True)
class RunningRequest:
    """What a request that is inside has to do."""

    num_prompt_tokens: int
    num_output: float  # predicted
    tbt_s: float  # over the whole answer, predicted: how fast it will leave
    priority: int  # smaller goes first


class RequestForecast:
    """Owns when each request inside is computed and decoded, as predicted, and what requests take beside. Has no clock,
    and knows nothing of classes.
    """

    def __init__(self, rules: PlacementRules, rng: random.Random) -> None:
        self.decodes = DecodeForecast()
        self._rules = rules
        self._rng = rng
        self._prefills = PrefillForecast()
        self._courses = PrefillQueueModels(self.decodes)
        self._before_token = Overhead()
        self._handover = Overhead()

    @property
    def overhead_s(self) -> float:
        """Of a TTFT: beside queue and prefill."""
        return self._before_token.seconds

    def place(
        self,
        view: ClusterView,
        request: PlacementRequest,
        now_s: float,
        depths: NDArray[np.int64] = NOTHING_CACHED,
        ranked_by: TtftPrediction | None = None,
    ) -> Placement:
        """The placement, its prefill by the steps of the worker. `ranked_by` is the prediction of the same prompt, if
        somebody made it already. Raises what `place` raises."""
        ttft = ranked_by or self.ttft(view, request, now_s, depths)

        def loads_at(at_s: float) -> DecodeLoads:
            return self.decodes.loads(at_s, now_s, view.num_rows)

        def load_at(row: int, at_s: float) -> DecodeLoad:
            return self.decodes.load(row, at_s, now_s)

        def exactly(chosen: Placement) -> Placement:
            return self.exactly(view, chosen, request.num_prompt_tokens, request.priority, now_s)

        rules, rng = self._rules, self._rng
        found = place(
            view, request, rules, now_s, rng, ranked_by=ttft, loads_at=loads_at, exactly=exactly, load_at=load_at
        )
        tbt_s = self._courses.tbt_s(view, found, found.tbt_s, _MANY, now_s)
        return replace(found, tbt_s=tbt_s) if tbt_s != found.tbt_s else found

    def ttft(
        self, view: ClusterView, request: PlacementRequest, now_s: float, depths: NDArray[np.int64]
    ) -> TtftPrediction:
        """Of all workers, by sums of what is ahead on each."""
        waits = _Waits(self._prefills, request.priority, now_s)
        threshold, num_tokens = self._rules.fetching_threshold, request.num_prompt_tokens
        return predict_ttft(view, num_tokens, depths, now_s, threshold, request.fetch_factor, waits)

    def exactly(
        self, view: ClusterView, placement: Placement, num_prompt_tokens: int, priority: int, now_s: float
    ) -> Placement:
        """By the steps of the prefill worker, and with what a request takes beside."""
        found = self._courses.refined(view, placement, num_prompt_tokens, priority, now_s)
        overhead_s = self.overhead_s
        return replace(found, ttft_s=found.ttft_s + overhead_s, overhead_s=overhead_s) if overhead_s else found

    def earliest_s(self, view: ClusterView, row: int, least: Prefill, now_s: float) -> float:
        """Seconds from now that `exactly` undercuts on that worker for no prompt with as much work or more, but where
        it changes nothing."""
        return self._courses.earliest_s(view, row, least, now_s)

    def steps_left_s(self, view: ClusterView, now_s: float) -> Floats:
        """Of every row: `earliest_s` of a prompt is this and what it takes alone at least."""
        return self._courses.steps_left_s(view, now_s)

    def handover_s(self, num_output: float) -> float:
        """What the hand-over adds to the mean gap of an answer."""
        return self._handover.seconds / max(num_output - 1, 1)

    def mean_tbt_s(
        self, view: ClusterView, num_prompt_tokens: int, placement: Placement, num_output: float, now_s: float
    ) -> float:
        """Over the whole answer, while others leave and join; `Placement.tbt_s` is when it begins."""
        row = view.row(placement.decode.worker_id)
        assert row is not None
        begins_s = now_s + placement.ttft_s
        load = self.decodes.mean_load(row, begins_s, begins_s + num_output * placement.tbt_s, now_s)
        own_tokens = num_prompt_tokens + num_output / 2
        step_s = placement.decode.step_model.seconds(load.batch + 1, load.context_tokens + own_tokens)
        paced_s = self._courses.tbt_s(view, placement, step_s, max(num_output - 1, 1), now_s)
        return paced_s + self.handover_s(num_output)

    def alone(self, placement: Placement, num_prompt_tokens: int, num_output: float) -> Alone:
        """What the request would take there if nobody else were."""
        step_s = placement.decode.step_model.seconds(1, num_prompt_tokens + num_output / 2)
        return Alone(placement.work_s + placement.overhead_s, step_s + self.handover_s(num_output))

    def tbt_at(
        self, view: ClusterView, placement: Placement, num_prompt_tokens: int, at_s: float, now_s: float
    ) -> float:
        """On the decode worker of the placement, should the answer begin then."""
        row = view.row(placement.decode.worker_id)
        assert row is not None
        load = self.decodes.load(row, at_s, now_s)
        step_s = placement.decode.step_model.seconds(load.batch + 1, load.context_tokens + num_prompt_tokens)
        return self._courses.tbt_s(view, placement, step_s, _MANY, now_s)

    def tbt_of_equal_part(self, view: ClusterView, placement: Placement, num_prompt_tokens: int, now_s: float) -> float:
        """On the decode worker of the placement, had it an equal part of all that decodes now."""
        batch, context = self.mean_load(view, now_s)
        step_s = placement.decode.step_model.seconds(batch[0] + 1, context[0] + num_prompt_tokens)
        return self._courses.tbt_s(view, placement, step_s, _MANY, now_s)

    def mean_load(self, view: ClusterView, now_s: float) -> DecodeLoads:
        """An equal part of all that decodes now, for every row."""
        batch, context = self.decodes.loads(now_s, now_s, view.num_rows)
        everywhere = np.ones(view.num_rows) / view.num_decoding
        return DecodeLoads(batch.sum() * everywhere, context.sum() * everywhere)

    def move(
        self, request_id: str, view: ClusterView, running: RunningRequest, placement: Placement, now_s: float
    ) -> None:
        """The request goes to these workers, from now on and nowhere else."""
        prefill, row = placement.prefill, view.row(placement.decode.worker_id)
        prefill_row = view.row(prefill.worker_id)
        assert row is not None
        assert prefill_row is not None
        num_prompt, num_output, priority = running.num_prompt_tokens, running.num_output, running.priority
        step_s = prefill.prefill_model.seconds(prefill.step_tokens) or math.inf
        self._prefills.leave(request_id, now_s)
        self._prefills.join(request_id, prefill_row, placement.work_s, step_s, priority, now_s)
        self._courses.leave(request_id, now_s)
        self._courses.join(request_id, view, placement, num_prompt, num_output, priority, now_s)
        joins_s = now_s + placement.ttft_s
        self.decodes.leave(request_id)  # held or not
        leaves_s = joins_s + num_output * running.tbt_s
        self.decodes.join(request_id, row, joins_s, leaves_s, num_prompt, num_output)

    def hold(
        self, request_id: str, view: ClusterView, running: RunningRequest, placement: Placement, now_s: float
    ) -> None:
        """The request will decode there, it is not known from when on: it counts from now on, its prompt does not."""
        row = view.row(placement.decode.worker_id)
        assert row is not None
        leaves_s = now_s + placement.ttft_s + running.num_output * running.tbt_s
        self.decodes.join(request_id, row, now_s, leaves_s, running.num_prompt_tokens, running.num_output)

    def begin_decode(self, request_id: str, now_s: float) -> None:
        """Its first token is there."""
        self._prefills.leave(request_id, now_s)
        self.decodes.begin(request_id, now_s)
        self._courses.computed(request_id, now_s)

    def leave(self, request_id: str, now_s: float) -> None:
        """It is over."""
        self._prefills.leave(request_id, now_s)
        self._courses.leave(request_id, now_s)
        self.decodes.leave(request_id)

    def note_overheads(self, before_token_s: float, handover_s: float | None) -> None:
        """What a request took until its first token beside queue and prefill, and until its second one beside a step;
        None where that is not known."""
        self._before_token.add(before_token_s)
        if handover_s is not None:
            self._handover.add(handover_s)


@dataclass(frozen=True, slots=True)
class _Waits:
    """Queues as they are for one priority, seen from now."""

    prefills: PrefillForecast
    priority: int
    now_s: float

    def __call__(self, reported_s: Floats, takes_s: Floats) -> Floats:
        """What a worker has beyond ours is of other gateways, and ahead."""
        others_s = np.maximum(reported_s - self.prefills.totals(len(takes_s), self.now_s), 0.0)
        return others_s + self.prefills.waits(takes_s, self.priority, self.now_s)
