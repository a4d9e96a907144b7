"""The gateway's judgement as one core: class, placement, degradation, refusal; and what it learns from each request."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from halfmoon.policy.admission import AdmissionMode, Outlook, Refused, missed_target, over_target
from halfmoon.policy.candidates import Candidate, ranked_candidates
from halfmoon.policy.classes import ClassTable, Degradation, QosClass
from halfmoon.policy.cluster_view import ClusterView
from halfmoon.policy.decode_forecast import DecodeForecast, DecodeLoads
from halfmoon.policy.feedback import Feedback, TargetKind, Targets, Tightening
from halfmoon.policy.latency import Floats
from halfmoon.policy.output_lengths import OutputLengths
from halfmoon.policy.overheads import Overhead
from halfmoon.policy.placement import NOTHING_CACHED, Placement, PlacementRequest, PlacementRules, place, predict_tbt
from halfmoon.policy.prefill_courses import PrefillCourses
from halfmoon.policy.prefill_forecast import PrefillForecast
from halfmoon.policy.reservations import Reservations
from halfmoon.policy.shedding import Shedding
from halfmoon.policy.ttft import predict_ttft

_USUAL_WEIGHT = 0.02  # of the latest request in the usual TTFT
_PROBE_S = 10.0  # an idle cluster refuses everybody for so long; then one request shows whether it is right to
_PRECISION_FACTOR = 0.5  # of the bytes of KV that are fetched, at the lower precision


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


@dataclass(frozen=True, slots=True)
class _Running:
    """What an admitted request occupies."""

    qos: QosClass
    num_prompt_tokens: int
    num_output: float
    reserved_tokens: int
    priority: int
    entered_s: float


class Gatekeeper:
    """Owns what admission knows of the requests inside: forecast, lengths, shares, feedback. Has no clock.

    The gateway and the simulator tell it of each request: `decide`, `enter`, `begin_decode`, `leave`. Another `mode`
    counts from the next `decide` on.
    """

    def __init__(self, mode: AdmissionMode, rules: PlacementRules, rng: random.Random) -> None:
        self.classes = ClassTable()
        self.lengths = OutputLengths()
        self.mode = mode
        self._rules = rules
        self._rng = rng
        self._forecast = DecodeForecast()
        self._prefills = PrefillForecast()
        self._courses = PrefillCourses(self._forecast)
        self._before_token = Overhead()
        self._handover = Overhead()
        self._reservations = Reservations()
        self._feedback = Feedback()
        self._usual_ttft_s: float | None = None  # mean of what was predicted for the latest requests
        self._running: dict[str, _Running] = {}
        self._idle_refusal_s: float | None = None  # the first one since somebody ran, or was let in to see
        self._shedding = Shedding()

    def decide(
        self,
        view: ClusterView,
        request: PlacementRequest,
        qos: QosClass,
        now_s: float,
        depths: NDArray[np.int64] = NOTHING_CACHED,
    ) -> Admitted:
        """Where the request goes. Raises Refused where its class forbids it, and what `place` raises."""
        plain = self._place(view, request, qos, now_s, depths, ())
        if self.mode == "off":
            return plain
        targets = self._feedback.targets(qos, now_s)
        self._check_not_shed(qos, _outlook(plain, plain.placement), targets, now_s)
        self._note_ttft(plain.placement.ttft_s)
        for given_up in range(len(qos.degradation) + 1):
            steps = qos.degradation[:given_up]
            found = self._place(view, request, qos, now_s, depths, steps) if steps else plain
            judged = self._as_judged(view, request, found.placement, now_s)
            outlook = _outlook(found, judged)
            missed = missed_target(outlook, targets)
            if missed is None and self._has_share(view, request, found, now_s):
                return found
        if missed is not None and self._is_probe(now_s):
            return plain
        if missed is None:
            message = f"class {qos.name} has used its share of the cluster, and others need theirs"
            refusal = Refused(qos, "reservation", message, outlook, targets, 0.0)
        else:
            refusal = self._over_target(qos, missed, outlook, targets, view.row(judged.decode.worker_id), now_s)
        self._shed_below(qos, refusal, now_s)
        raise refusal

    def refuse_unread(self, view: ClusterView, priority: int, *, has_gaps: bool, qos: QosClass, now_s: float) -> None:
        """Raises Refused where `decide` would admit no prompt at all: the queues alone are too long, or the decode
        workers too full. So nobody has to read the prompt; who is not refused here is for `decide`.

        `has_gaps`: more than one token is asked for, without doubt.
        """
        if self.mode == "off" or view.missing:
            return
        targets = self._feedback.targets(qos, now_s)
        least, row = self._least(view, priority, targets, now_s)
        if not has_gaps or ("cap_max_tokens" in qos.degradation and qos.capped_tokens == 1):
            least = least._replace(tbt_s=None)
        self._check_not_shed(qos, least, targets, now_s)
        missed = missed_target(least, targets)
        if missed is not None and not self._is_probe(now_s):
            self._note_ttft(least.ttft_s)
            refusal = self._over_target(qos, missed, least, targets, row, now_s)
            self._shed_below(qos, refusal, now_s)
            raise refusal

    def _least(self, view: ClusterView, priority: int, targets: Targets, now_s: float) -> tuple[Outlook, int]:
        """What no prompt undercuts, and the decode worker that is the least busy: predictions of one token's prompt,
        whose decode worker may join others at any moment that leaves the TTFT within its target."""
        num_rows = view.num_rows
        ttft = predict_ttft(view, 1, NOTHING_CACHED, now_s, None, waits=_Waits(self._prefills, priority, now_s))
        prefills = np.flatnonzero(view.can_prefill[:num_rows] | view.can_do_both[:num_rows])
        first = prefills[np.argmin(ttft.seconds[prefills])]
        worker, least_s = view.worker(int(first)), float(ttft.seconds[first])
        alone = Placement(worker, worker, least_s, queue_s=float(ttft.queue_s[first]))
        alone = self._courses.refined(view, alone, 1, priority, now_s)  # short ones overtake others
        least_s, overhead_s = min(least_s, alone.ttft_s), self._before_token.seconds
        if self.mode == "load":
            loads = self._mean_load(view, now_s)
        elif targets.ttft_s is None:
            loads = DecodeLoads(np.zeros(num_rows), np.zeros(num_rows))
        else:
            until_s = now_s + targets.ttft_s - overhead_s
            loads = self._forecast.least_loads(now_s + least_s, until_s, now_s, num_rows)
        decodes = np.flatnonzero(view.can_decode[:num_rows] | view.can_do_both[:num_rows])
        tbt_s = predict_tbt(view, loads, 1)[decodes]
        lightest = int(np.argmin(tbt_s))
        outlook = Outlook(least_s + overhead_s, float(tbt_s[lightest]), alone.queue_s, is_least=True)
        return outlook, int(decodes[lightest])

    def applied(self, qos: QosClass) -> Targets:
        """The class's targets as feedback has them now."""
        tightened = self._feedback.tightenings(qos)
        ttft, tbt = tightened.get("ttft"), tightened.get("tbt")
        return Targets(ttft.applied_s if ttft else qos.ttft_s, tbt.applied_s if tbt else qos.tbt_s)

    def tightenings(self, qos: QosClass) -> dict[TargetKind, Tightening]:
        """Those of the class's targets that feedback has tightened, and why."""
        return self._feedback.tightenings(qos)

    def _shed_below(self, qos: QosClass, refusal: Refused, now_s: float) -> None:
        """Nobody waits outside for a class whose requests would be refused without anybody else here."""
        if "shed_lowest_class" in qos.degradation and refusal.is_by_others:
            self._shedding.shed(qos.priority, self.classes.priorities, now_s)

    def _over_target(
        self, qos: QosClass, missed: TargetKind, outlook: Outlook, targets: Targets, row: int | None, now_s: float
    ) -> Refused:
        assert row is not None
        ends_in_s = self._forecast.next_ends(None if self.mode == "load" else row, now_s) - now_s
        tightening = self._feedback.tightenings(qos).get(missed)
        return over_target(qos, missed, outlook, targets, tightening, ends_in_s)

    def _is_probe(self, now_s: float) -> bool:
        """Whether a refused request is let in because nothing ran for long: what is predicted too high for all would
        else never be measured again."""
        if self._running:
            return False
        if self._idle_refusal_s is None:
            self._idle_refusal_s = now_s
        return now_s - self._idle_refusal_s >= _PROBE_S

    def place_again(
        self, view: ClusterView, request: PlacementRequest, now_s: float, depths: NDArray[np.int64] = NOTHING_CACHED
    ) -> Placement:
        """Another placement for an admitted request. Raises what `place` raises."""
        loads_at = _LoadsAt(self._forecast, view.num_rows, now_s)
        waits = _Waits(self._prefills, request.priority, now_s)
        found = place(view, request, self._rules, now_s, self._rng, depths, loads_at, waits)
        found = self._courses.refined(view, found, request.num_prompt_tokens, request.priority, now_s)
        overhead_s = self._before_token.seconds
        return replace(found, ttft_s=found.ttft_s + overhead_s, overhead_s=overhead_s) if overhead_s else found

    def candidates(
        self,
        view: ClusterView,
        request: PlacementRequest,
        now_s: float,
        depths: NDArray[np.int64],
        limit: int,
        placement: Placement | None = None,
    ) -> list[Candidate]:
        """What `decide` chose among, for people: see `ranked_candidates`. Predicted again only where it gave no
        placement."""
        num_tokens, ttft = request.num_prompt_tokens, None if placement is None else placement.ranked_by
        if ttft is None:
            waits, threshold = _Waits(self._prefills, request.priority, now_s), self._rules.fetching_threshold
            ttft = predict_ttft(view, num_tokens, depths, now_s, threshold, request.fetch_factor, waits)
        return ranked_candidates(view, num_tokens, ttft, limit, placement)

    def enter(
        self, request_id: str, view: ClusterView, admitted: Admitted, num_prompt_tokens: int, now_s: float
    ) -> None:
        """The request goes to its workers."""
        reserved = num_prompt_tokens + round(admitted.num_output)
        self._reservations.take(admitted.qos.name, reserved)
        running = _Running(admitted.qos, num_prompt_tokens, admitted.num_output, reserved, admitted.priority, now_s)
        self._running[request_id] = running
        self._idle_refusal_s = None
        self.move(request_id, view, admitted.placement, now_s)

    def move(self, request_id: str, view: ClusterView, placement: Placement, now_s: float) -> None:
        """The request goes to these workers, from now on and nowhere else."""
        running, row = self._running[request_id], view.row(placement.decode.worker_id)
        prefill, prefill_row = placement.prefill, view.row(placement.prefill.worker_id)
        assert row is not None
        assert prefill_row is not None
        step_s = prefill.prefill_model.seconds(prefill.step_tokens) or math.inf
        self._prefills.leave(request_id, now_s)
        self._prefills.join(request_id, prefill_row, placement.work_s, step_s, running.priority, now_s)
        self._courses.leave(request_id, now_s)
        num_prompt, num_output = running.num_prompt_tokens, running.num_output
        self._courses.join(request_id, view, placement, num_prompt, num_output, running.priority, now_s)
        joins_s = now_s + placement.ttft_s
        leaves_s = joins_s + running.num_output * placement.tbt_s
        self._forecast.leave(request_id)
        self._forecast.join(request_id, row, joins_s, leaves_s, running.num_prompt_tokens, running.num_output)

    def begin_decode(self, request_id: str, now_s: float) -> None:
        """Its first token is there."""
        self._prefills.leave(request_id, now_s)
        self._courses.computed(request_id, now_s)
        self._forecast.begin(request_id, now_s)

    def note_overheads(self, before_token_s: float, handover_s: float | None) -> None:
        """What a request took until its first token beside queue and prefill, and until its second one beside a step;
        None where that is not known."""
        self._before_token.add(before_token_s)
        if handover_s is not None:
            self._handover.add(handover_s)

    def leave(
        self, request_id: str, now_s: float, *, num_output: int, ttft_s: float | None, tbt_s: float | None
    ) -> None:
        """The request ended; `ttft_s` is None for one that did not end by itself, which teaches nothing."""
        running = self._running.pop(request_id)
        self._prefills.leave(request_id, now_s)
        self._courses.leave(request_id, now_s)
        self._forecast.leave(request_id)
        self._reservations.give_back(running.qos.name, running.reserved_tokens)
        if ttft_s is not None:
            self.lengths.add(running.qos.name, running.num_prompt_tokens, num_output)
            self._feedback.add(running.qos, ttft_s, tbt_s, running.entered_s, now_s)

    def _place(
        self,
        view: ClusterView,
        request: PlacementRequest,
        qos: QosClass,
        now_s: float,
        depths: NDArray[np.int64],
        steps: tuple[Degradation, ...],
    ) -> Admitted:
        capped = min(request.max_tokens, qos.capped_tokens) if "cap_max_tokens" in steps else request.max_tokens
        lower = "lower_kv_precision" in steps
        wanted = request
        if steps:
            wanted = replace(request, max_tokens=capped, fetch_factor=_PRECISION_FACTOR if lower else 1.0)
        placement = self.place_again(view, wanted, now_s, depths)
        num_output = self.lengths.predict(qos.name, request.num_prompt_tokens, capped)
        num_output = max(num_output, min(request.least_tokens, capped))
        handover_s = self._handover.seconds / max(num_output - 1, 1)
        mean_tbt_s = self._mean_tbt_s(view, request, placement, num_output, now_s) + handover_s
        if handover_s:
            placement = replace(placement, tbt_s=placement.tbt_s + handover_s)
        return Admitted(placement, qos, capped, lower, num_output, request.priority, mean_tbt_s)

    def _mean_tbt_s(
        self, view: ClusterView, request: PlacementRequest, placement: Placement, num_output: float, now_s: float
    ) -> float:
        """Over the whole answer, while others leave and join; `Placement.tbt_s` is when it begins."""
        row = view.row(placement.decode.worker_id)
        assert row is not None
        begins_s = now_s + placement.ttft_s
        load = self._forecast.mean_load(row, begins_s, begins_s + num_output * placement.tbt_s, now_s)
        own_tokens = request.num_prompt_tokens + num_output / 2
        return placement.decode.step_model.seconds(load.batch + 1, load.context_tokens + own_tokens)

    def _as_judged(self, view: ClusterView, request: PlacementRequest, placement: Placement, now_s: float) -> Placement:
        """The placement with the TBT that its mode judges by.

        - load: that of a worker with an equal part of all that decodes now.
        - predicted: when this prefill ends. One that takes longer than usual is also judged when a usual one would end:
          arrivals to come are in no forecast, so a far end always looks empty, and long prompts would take the place
          of short ones.
        """
        if self.mode == "predicted":
            return self._judged_no_later_than_usual(view, request, placement, now_s)
        batch, context = self._mean_load(view, now_s)
        step = placement.decode.step_model
        return replace(placement, tbt_s=step.seconds(batch[0] + 1, context[0] + request.num_prompt_tokens))

    def _mean_load(self, view: ClusterView, now_s: float) -> DecodeLoads:
        """An equal part of all that decodes now, for every row."""
        batch, context = self._forecast.loads(now_s, now_s, view.num_rows)
        everywhere = np.ones(view.num_rows) / view.num_decoding
        return DecodeLoads(batch.sum() * everywhere, context.sum() * everywhere)

    def _judged_no_later_than_usual(
        self, view: ClusterView, request: PlacementRequest, placement: Placement, now_s: float
    ) -> Placement:
        if self._usual_ttft_s is None or placement.ttft_s <= self._usual_ttft_s:
            return placement
        row = view.row(placement.decode.worker_id)
        assert row is not None
        batch, context = self._forecast.loads(now_s + self._usual_ttft_s, now_s, view.num_rows)
        usual_s = placement.decode.step_model.seconds(batch[row] + 1, context[row] + request.num_prompt_tokens)
        return replace(placement, tbt_s=max(placement.tbt_s, usual_s))

    def _note_ttft(self, ttft_s: float) -> None:
        """What is usual follows every request that asks, admitted or not."""
        before_s = ttft_s if self._usual_ttft_s is None else self._usual_ttft_s
        self._usual_ttft_s = before_s + _USUAL_WEIGHT * (ttft_s - before_s)

    def _check_not_shed(self, qos: QosClass, outlook: Outlook, targets: Targets, now_s: float) -> None:
        left_s = self._shedding.left_s(qos.priority, now_s)
        if left_s > 0:
            message = f"class {qos.name} waits while classes before it cannot be served"
            raise Refused(qos, "shed", message, outlook, targets, left_s)

    def _has_share(self, view: ClusterView, request: PlacementRequest, found: Admitted, now_s: float) -> bool:
        num_tokens = request.num_prompt_tokens + round(found.num_output)
        capacity = view.decode_tokens
        return self._reservations.may_use(found.qos, num_tokens, capacity, self.classes.classes, now_s)


def _outlook(found: Admitted, judged: Placement) -> Outlook:
    """One token has no gap."""
    return Outlook(judged.ttft_s, judged.tbt_s if found.max_tokens > 1 else None, judged.queue_s)


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


@dataclass(frozen=True, slots=True)
class _LoadsAt:
    """Decode loads at a moment, seen from now."""

    forecast: DecodeForecast
    num_rows: int
    now_s: float

    def __call__(self, at_s: float) -> DecodeLoads:
        return self.forecast.loads(at_s, self.now_s, self.num_rows)
