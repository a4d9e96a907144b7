"""The gateway's judgement as one core: class, placement, degradation, refusal; and what it learns from each request."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from halfmoon.policy.admission.classes import ClassTable, QosClass
from halfmoon.policy.admission.degradation import PRECISION_FACTOR, Admitted, DegradationSteps
from halfmoon.policy.admission.feedback import AdmissionTargets, Alone, Feedback, TargetKind, Tightening
from halfmoon.policy.admission.latency_bounds import ANY_PROMPT, PromptLowerBound, latency_lower_bound
from halfmoon.policy.admission.refusal import AdmissionMode, PredictedLatency, Refused, missed_target, over_target
from halfmoon.policy.admission.reservations import Reservations
from halfmoon.policy.admission.shedding import Shedding
from halfmoon.policy.forecast.request_forecast import RequestForecast, RunningRequest
from halfmoon.policy.models.output_lengths import OutputLengths
from halfmoon.policy.placement.place import NOTHING_CACHED, Placement, PlacementRequest, PlacementRules
from halfmoon.policy.view.cluster_view import ClusterView

_USUAL_WEIGHT = 0.02  # of the latest request in the usual TTFT
_PROBE_S = 10.0  # an idle cluster refuses everybody for so long; then one request shows whether it is right to
_TELLING_TOKENS = 20  # of fewer the mean gap is mostly the hand-over, which a stricter target does not shorten


class _Least(NamedTuple):
    """What no such prompt undercuts."""

    outlook: PredictedLatency
    targets: AdmissionTargets
    row: int  # of the least busy decode worker


@dataclass(frozen=True, slots=True)
class _Inside:
    """What an admitted request occupies, and has to do."""

    qos: QosClass
    work: RunningRequest
    reserved_tokens: int
    alone: Alone
    entered_s: float


class AdmissionController:
    """Owns what admission knows of the requests inside: forecast, lengths, shares, feedback. Has no clock.

    The gateway and the simulator tell it of each request: `decide`, `enter`, `begin_decode`, `leave`. Another `mode`
    counts from the next `decide` on.
    """

    def __init__(self, mode: AdmissionMode, rules: PlacementRules, rng: random.Random) -> None:
        self.classes = ClassTable()
        self.lengths = OutputLengths()
        self.mode = mode
        self._forecast = RequestForecast(rules, rng)
        self._offers = DegradationSteps(self._forecast, self.lengths)
        self._reservations = Reservations()
        self._feedback = Feedback()
        self._usual_ttft_s: float | None = None  # mean of what was predicted for the latest requests
        self._inside: dict[str, _Inside] = {}
        self._held: set[str] = set()  # of them, whose turn has not come: nobody is told to wait until they leave
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
        offers = self._offers.of(view, replace(request, targets=self.applied(qos)), qos, now_s, depths)
        plain = next(offers)
        if self.mode == "off":
            return plain
        targets = self._feedback.targets(qos, now_s)
        self._check_not_shed(qos, plain.outlook(plain.placement.tbt_s), targets, now_s)
        self._note_ttft(plain.placement.ttft_s)
        for found in itertools.chain((plain,), offers):
            outlook = found.outlook(self._judged_tbt_s(view, request, found.placement, now_s))
            held_to = self._held_to(qos, targets, found, request.num_prompt_tokens)
            missed = missed_target(outlook, held_to)
            if missed is None and self._has_share(view, request, found, now_s):
                return found
        if missed is not None and self.is_probe(now_s):
            return plain
        if missed is None:
            message = f"class {qos.name} has used its share of the cluster, and others need theirs"
            refusal = Refused(qos, "reservation", message, outlook, targets, 0.0)
        else:
            refusal = self._over_target(
                qos, missed, outlook, held_to, view.row(found.placement.decode.worker_id), now_s
            )
            if qos.early_rejection == "overload" and not refusal.is_by_others:
                return plain
        self._shed_below(qos, refusal, now_s)
        raise refusal

    def reject_early(self, view: ClusterView, priority: int, *, has_gaps: bool, qos: QosClass, now_s: float) -> None:
        """Raises Refused where `decide` would admit no prompt at all: the queues alone are too long, or the decode
        workers too full. So nobody has to read the prompt; who is not refused here is for `decide`.

        `has_gaps`: more than one token is asked for, without doubt.
        """
        if self.mode == "off" or view.missing:
            return
        least = self._least(view, ANY_PROMPT, priority, has_gaps, qos, now_s)
        self._check_not_shed(qos, least.outlook, least.targets, now_s)
        refusal = self._least_refusal(least, qos, now_s)
        if refusal is not None:
            self.refuse_least(refusal, qos, now_s)

    def holds_to_targets(self, qos: QosClass) -> bool:
        """Whether there are predictions by which requests of the class are refused."""
        return self.mode != "off" and not (qos.ttft_s is qos.tbt_s is None)

    def least_refusal(
        self, view: ClusterView, prompt: PromptLowerBound, priority: int, *, has_gaps: bool, qos: QosClass, now_s: float
    ) -> Refused | None:
        """The same of all prompts of which so much is known, for `refuse_least`.

        Whether such a prompt is too long by itself, or others are in its way, only its end can tell: where that puts
        classes outside it is for `decide`.
        """
        if view.missing or not self.holds_to_targets(qos):
            return None
        refusal = self._least_refusal(self._least(view, prompt, priority, has_gaps, qos, now_s), qos, now_s)
        if refusal is None or "shed_lowest_class" not in qos.degradation:
            return refusal
        return None if refusal.is_by_others or refusal.reason == "tbt" else refusal

    def refuse_least(self, refusal: Refused, qos: QosClass, now_s: float) -> None:
        """Raises it, unless the request is let in to see whether that is right."""
        if not self.is_probe(now_s):
            self._note_ttft(refusal.ttft_s)
            self._shed_below(qos, refusal, now_s)
            raise refusal

    def _least(
        self, view: ClusterView, prompt: PromptLowerBound, priority: int, has_gaps: bool, qos: QosClass, now_s: float
    ) -> _Least:
        targets = self._feedback.targets(qos, now_s)
        if "lower_kv_precision" in qos.degradation:
            prompt = prompt._replace(fetch_factor=PRECISION_FACTOR)
        outlook, row = latency_lower_bound(self._forecast, view, prompt, priority, targets, self.mode, now_s)
        if not has_gaps or ("cap_max_tokens" in qos.degradation and qos.capped_tokens == 1):
            outlook = outlook._replace(tbt_s=None)
        if qos.early_rejection == "overload":  # what the prompt itself takes is not known here
            outlook = outlook._replace(ttft_s=outlook.queue_s, tbt_s=None)
        return _Least(outlook, targets, row)

    def _least_refusal(self, least: _Least, qos: QosClass, now_s: float) -> Refused | None:
        missed = missed_target(least.outlook, least.targets)
        return missed and self._over_target(qos, missed, least.outlook, least.targets, least.row, now_s)

    def place_again(
        self,
        view: ClusterView,
        request: PlacementRequest,
        qos: QosClass,
        now_s: float,
        depths: NDArray[np.int64] = NOTHING_CACHED,
    ) -> Placement:
        """Another placement for an admitted request. Raises what `place` raises."""
        return self._forecast.place(view, replace(request, targets=self.applied(qos)), now_s, depths)

    def applied(self, qos: QosClass) -> AdmissionTargets:
        """The class's targets as feedback has them now."""
        tightened = self._feedback.tightenings(qos)
        ttft, tbt = tightened.get("ttft"), tightened.get("tbt")
        return AdmissionTargets(ttft.applied_s if ttft else qos.ttft_s, tbt.applied_s if tbt else qos.tbt_s)

    def tightenings(self, qos: QosClass) -> dict[TargetKind, Tightening]:
        """Those of the class's targets that feedback has tightened, and why."""
        return self._feedback.tightenings(qos)

    def enter(
        self, request_id: str, view: ClusterView, admitted: Admitted, num_prompt_tokens: int, now_s: float
    ) -> None:
        """The request, held or not, goes to its workers."""
        self._let_in(request_id, admitted, num_prompt_tokens, now_s)
        self.move(request_id, view, admitted.placement, now_s)

    def hold(
        self, request_id: str, view: ClusterView, admitted: Admitted, num_prompt_tokens: int, now_s: float
    ) -> None:
        """The request will go there, once others of the same client can, too: those are judged beside it."""
        work = self._let_in(request_id, admitted, num_prompt_tokens, now_s)
        self._held.add(request_id)
        self._forecast.hold(request_id, view, work, admitted.placement, now_s)

    def call_up(self, request_id: str, now_s: float) -> None:
        """A held request is placed next, and is not beside itself."""
        self._forecast.leave(request_id, now_s)

    def withdraw(self, request_id: str, now_s: float) -> None:
        """A held request goes nowhere: it was never here."""
        self._let_out(request_id, now_s)

    def _let_in(self, request_id: str, admitted: Admitted, num_prompt_tokens: int, now_s: float) -> RunningRequest:
        held = self._inside.get(request_id)
        self._held.discard(request_id)
        if held is not None:
            self._reservations.give_back(held.qos.name, held.reserved_tokens)
        reserved = num_prompt_tokens + round(admitted.num_output)
        self._reservations.take(admitted.qos.name, reserved)
        tbt_s = max(admitted.mean_tbt_s, admitted.placement.tbt_s)
        work = RunningRequest(num_prompt_tokens, admitted.num_output, tbt_s, admitted.priority)
        alone = self._forecast.alone(admitted.placement, num_prompt_tokens, admitted.num_output)
        self._inside[request_id] = _Inside(admitted.qos, work, reserved, alone, now_s)
        return work

    def _let_out(self, request_id: str, now_s: float) -> _Inside:
        inside = self._inside.pop(request_id)
        self._held.discard(request_id)
        self._forecast.leave(request_id, now_s)
        self._reservations.give_back(inside.qos.name, inside.reserved_tokens)
        return inside

    def move(self, request_id: str, view: ClusterView, placement: Placement, now_s: float) -> None:
        """The request goes to these workers, from now on and nowhere else."""
        self._forecast.move(request_id, view, self._inside[request_id].work, placement, now_s)

    def begin_decode(self, request_id: str, now_s: float) -> None:
        """Its first token is there."""
        self._forecast.begin_decode(request_id, now_s)

    def note_overheads(self, before_token_s: float, handover_s: float | None) -> None:
        """What a request took until its first token beside queue and prefill, and until its second one beside a step;
        None where that is not known."""
        self._forecast.note_overheads(before_token_s, handover_s)

    def leave(
        self, request_id: str, now_s: float, *, num_output: int, ttft_s: float | None, tbt_s: float | None
    ) -> None:
        """The request ended; `ttft_s` is None for one that did not end by itself, which teaches nothing."""
        inside = self._let_out(request_id, now_s)
        self._idle_refusal_s = None
        if ttft_s is not None:
            self.lengths.add(inside.qos.name, inside.work.num_prompt_tokens, num_output)
            telling_s = tbt_s if num_output >= _TELLING_TOKENS else None
            self._feedback.add(inside.qos, ttft_s, telling_s, inside.alone, inside.entered_s, now_s)

    def _held_to(
        self, qos: QosClass, targets: AdmissionTargets, admitted: Admitted, num_prompt_tokens: int
    ) -> AdmissionTargets:
        """What the predictions must not exceed.

        Where only overload is refused, a target that the request would miss on an idle cluster, too, is not held
        against it; its first token may still wait for others no longer than the target.
        """
        if qos.early_rejection == "strict":
            return targets
        alone = self._forecast.alone(admitted.placement, num_prompt_tokens, admitted.num_output)
        ttft_s, tbt_s = targets.ttft_s, targets.tbt_s
        if ttft_s is not None and alone.ttft_s > ttft_s:
            ttft_s += alone.ttft_s
        return AdmissionTargets(ttft_s, None if tbt_s is not None and alone.tbt_s > tbt_s else tbt_s)

    def _judged_tbt_s(self, view: ClusterView, request: PlacementRequest, placement: Placement, now_s: float) -> float:
        """The TBT of the placement by which its mode judges.

        - load: that of a worker with an equal part of all that decodes now.
        - predicted: when this prefill ends. One that takes longer than usual is also judged when a usual one would end:
          arrivals to come are in no forecast, so a far end always looks empty, and long prompts would take the place
          of short ones.
        """
        num_prompt = request.num_prompt_tokens
        if self.mode == "load":
            return self._forecast.tbt_of_equal_part(view, placement, num_prompt, now_s)
        if self._usual_ttft_s is None or placement.ttft_s <= self._usual_ttft_s:
            return placement.tbt_s
        usual_s = self._forecast.tbt_at(view, placement, num_prompt, now_s + self._usual_ttft_s, now_s)
        return max(placement.tbt_s, usual_s)

    def _note_ttft(self, ttft_s: float) -> None:
        """What is usual follows every request that asks, admitted or not."""
        before_s = ttft_s if self._usual_ttft_s is None else self._usual_ttft_s
        self._usual_ttft_s = before_s + _USUAL_WEIGHT * (ttft_s - before_s)

    def _over_target(
        self,
        qos: QosClass,
        missed: TargetKind,
        outlook: PredictedLatency,
        targets: AdmissionTargets,
        row: int | None,
        now_s: float,
    ) -> Refused:
        assert row is not None
        of_row = None if self.mode == "load" else row
        ends_in_s = self._forecast.decodes.next_ends(of_row, now_s, self._held) - now_s
        tightening = self._feedback.tightenings(qos).get(missed)
        return over_target(qos, missed, outlook, targets, tightening, ends_in_s)

    def is_probe(self, now_s: float) -> bool:
        """Whether a refused request is let in because nothing ran for long: what is predicted too high for all would
        else never be measured again."""
        if self._inside:
            return False
        if self._idle_refusal_s is None:
            self._idle_refusal_s = now_s
        return now_s - self._idle_refusal_s >= _PROBE_S

    def _check_not_shed(
        self, qos: QosClass, outlook: PredictedLatency, targets: AdmissionTargets, now_s: float
    ) -> None:
        left_s = self._shedding.left_s(qos.priority, now_s)
        if left_s > 0:
            message = f"class {qos.name} waits while classes before it cannot be served"
            raise Refused(qos, "shed", message, outlook, targets, left_s)

    def _shed_below(self, qos: QosClass, refusal: Refused, now_s: float) -> None:
        """Nobody waits outside for a class whose requests would be refused without anybody else here."""
        if "shed_lowest_class" in qos.degradation and refusal.is_by_others:
            self._shedding.shed(qos.priority, self.classes.priorities, now_s)

    def _has_share(self, view: ClusterView, request: PlacementRequest, found: Admitted, now_s: float) -> bool:
        num_tokens = request.num_prompt_tokens + round(found.num_output)
        capacity, in_use = view.decode_tokens, view.decoding_tokens
        return self._reservations.may_use(found.qos, num_tokens, capacity, self.classes.classes, now_s, in_use)
