"""Admission control: whether a request is served, as what, and where; and what is learned from each request."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import NamedTuple

from halfmoon.policy.admission.admission_tbt import AdmissionTbt
from halfmoon.policy.admission.degradation import (
    LIKELY,
    Admitted,
    degraded_requests,
    may_place_elsewhere,
)
from halfmoon.policy.admission.fair_shares import FairShares
from halfmoon.policy.admission.feedback import Feedback, TargetKind, Tightening
from halfmoon.policy.admission.idle_probe import IdleProbe
from halfmoon.policy.admission.latency_bounds import ANY_PROMPT, PromptLowerBound, latency_lower_bound
from halfmoon.policy.admission.qos_classes import ClassTable, QosClass
from halfmoon.policy.admission.refusal import (
    AdmissionMode,
    PredictedLatency,
    Refused,
    missed_target,
    over_target,
    overload_targets,
)
from halfmoon.policy.admission.requests_inside import RequestsInside
from halfmoon.policy.admission.shedding import Shedding
from halfmoon.policy.admission.tenants import ANYONE, Tenant
from halfmoon.policy.forecast.decode_forecast import OVERTIME
from halfmoon.policy.forecast.request_forecast import RequestForecast
from halfmoon.policy.models.output_lengths import OutputLengths
from halfmoon.policy.placement.hot_spots import RunningAnswer
from halfmoon.policy.placement.move import move_target
from halfmoon.policy.placement.place import PlacementRules, place
from halfmoon.policy.values import AdmissionTargets, Placement, PlacementRequest
from halfmoon.policy.view.capabilities import Bools
from halfmoon.policy.view.cluster_view import ClusterView

_MIN_TBT_TOKENS = 20  # in shorter answers the mean gap is mostly the hand-over, which a stricter target cannot shorten


class _EarlyJudgement(NamedTuple):
    """What a lower bound on the latency of a prompt means for its admission."""

    latency: PredictedLatency  # lower bounds
    targets: AdmissionTargets
    refusal: Refused | None


class AdmissionController:
    """Owns what admission has learned: lengths, feedback, shedding; and the requests `inside`. Has no clock.

    The gateway and the simulator report the life of each request: `decide`, `inside.enter`, `inside.begin_decode`,
    `leave`. A new `mode` applies from the next `decide` on.
    """

    def __init__(
        self, mode: AdmissionMode, rules: PlacementRules, rng: random.Random, *, is_alone: bool = True
    ) -> None:
        """`is_alone`: no other gateway sends requests to the same workers."""
        self.classes = ClassTable()
        self.lengths = OutputLengths()
        self.shares = FairShares(has_tags=is_alone)
        self.mode = mode
        self._rules = rules
        self._rng = rng
        self._forecast = RequestForecast(rules.fetching_threshold)
        self.inside = RequestsInside(self._forecast, self.shares)
        self._admission_tbt = AdmissionTbt(self._forecast)
        self._feedback = Feedback()
        self._shedding = Shedding()
        self._probe = IdleProbe()

    def decide(
        self, view: ClusterView, request: PlacementRequest, qos: QosClass, now_s: float, tenant: Tenant = ANYONE
    ) -> Admitted:
        """Places a request and judges what is predicted; degrades it step by step while that misses its targets.

        Raises Refused if even the last step misses, and what `place` raises.
        """
        request = self._of_class(request, qos)
        placement = place(view, request, self._rules, self._forecast, now_s, self._rng)
        undegraded = admitted = self._as_admitted(view, request, qos, placement, now_s)
        self._check_fair_share(tenant, request, admitted, now_s)
        if self.mode == "off":
            return undegraded
        targets = self._feedback.targets(qos, now_s)
        self._check_not_shed(qos, admitted.latency(admitted.placement.tbt_s), targets, now_s)
        self._admission_tbt.note_ttft(admitted.placement.ttft_s)
        steps = degraded_requests(request, qos)
        while True:
            tbt_s = self._admission_tbt.of(view, request, admitted.placement, self.mode, now_s)
            latency = admitted.latency(tbt_s)
            enforced = self._enforced_targets(qos, targets, admitted, request)
            missed = missed_target(latency, enforced)
            if missed is None and self._has_share(view, request, admitted, now_s):
                return admitted
            less = next(steps, None)
            if less is None:
                break
            less = replace(less, num_output=self._num_output(less, qos))
            if may_place_elsewhere(view, less, request, placement):
                placement = place(view, less, self._rules, self._forecast, now_s, self._rng, placement.ranked_by)
            request, admitted = less, self._as_admitted(view, less, qos, placement, now_s)
        if missed is None:
            message = f"class {qos.name} has used its share of the cluster, and others need theirs"
            refusal = Refused(qos, "reservation", message, latency, targets, 0.0)
        elif self.is_probe(now_s):
            return undegraded
        else:
            row = view.row(admitted.placement.decode.worker_id)
            refusal = self._over_target(qos, missed, latency, enforced, row, now_s)
            if qos.early_rejection == "overload" and not refusal.is_by_others:
                return undegraded
        self._shed_below(qos, refusal, now_s)
        raise refusal

    def _as_admitted(
        self, view: ClusterView, request: PlacementRequest, qos: QosClass, placement: Placement, now_s: float
    ) -> Admitted:
        max_tokens, num_output = request.max_tokens, request.num_output
        mean_tbt_s = self._forecast.mean_tbt_s(view, request, placement, num_output, now_s)
        handover_s = self._forecast.handover_s(placement, num_output)
        if handover_s:
            placement = replace(placement, tbt_s=placement.tbt_s + handover_s)
        is_lower, priority, seen = request.kv_factor < 1, request.priority, request.most_seen
        return Admitted(placement, qos, max_tokens, is_lower, num_output, priority, mean_tbt_s, seen)

    def _of_class(self, request: PlacementRequest, qos: QosClass) -> PlacementRequest:
        """The request with what its class says of it."""
        return replace(
            request,
            targets=self.applied(qos),
            tbt_target_s=qos.tbt_target_s,
            num_output=self._num_output(request, qos),
            class_priority=qos.priority,
            max_pause_s=qos.max_pause_s,
        )

    def _num_output(self, request: PlacementRequest, qos: QosClass) -> float:
        """The predicted length of its answer."""
        num_output = self.lengths.predict(qos.name, request.num_prompt_tokens, request.max_tokens, LIKELY)
        return max(num_output, min(request.least_tokens, request.max_tokens))

    def reject_early(self, view: ClusterView, priority: int, *, has_gaps: bool, qos: QosClass, now_s: float) -> None:
        """Raises Refused if `decide` would admit no prompt at all: queues too long, or decode workers too full.

        The prompt then need not be tokenized. `has_gaps`: the answer certainly has more than one token.
        """
        if self.mode == "off" or view.missing:
            return
        if not self.has_enforced_targets(qos) and not self._shedding.left_s(qos.priority, now_s):
            return  # nothing could refuse it
        latency, targets, refusal = self._judge_early(view, ANY_PROMPT, priority, has_gaps, qos, now_s)
        self._check_not_shed(qos, latency, targets, now_s)
        if refusal is not None:
            self.reject(refusal, qos, now_s)

    def has_enforced_targets(self, qos: QosClass) -> bool:
        """Whether predictions can cause requests of the class to be refused."""
        return self.mode != "off" and not (qos.ttft_s is qos.tbt_s is None)

    def early_refusal(
        self, view: ClusterView, prompt: PromptLowerBound, priority: int, *, has_gaps: bool, qos: QosClass, now_s: float
    ) -> Refused | None:
        """The refusal, for `reject`, of all prompts that match what is known; None if one of them may be admitted.

        For a class that sheds others, only prompts that are too long by themselves are refused early: whether others
        are in the way can only be told from the whole prompt, in `decide`.
        """
        if view.missing or not self.has_enforced_targets(qos):
            return None
        refusal = self._judge_early(view, prompt, priority, has_gaps, qos, now_s).refusal
        if refusal is None or "shed_lowest_class" not in qos.degradation:
            return refusal
        return None if refusal.is_by_others or refusal.reason == "tbt" else refusal

    def reject(self, refusal: Refused, qos: QosClass, now_s: float) -> None:
        """Raises an early refusal, unless the request is admitted as a probe."""
        if not self.is_probe(now_s):
            self._admission_tbt.note_ttft(refusal.ttft_s)
            self._shed_below(qos, refusal, now_s)
            raise refusal

    def _judge_early(
        self, view: ClusterView, prompt: PromptLowerBound, priority: int, has_gaps: bool, qos: QosClass, now_s: float
    ) -> _EarlyJudgement:
        targets = self._feedback.targets(qos, now_s)
        latency, row = latency_lower_bound(
            self._forecast,
            view,
            prompt,
            priority,
            qos,
            targets,
            self.mode,
            now_s,
            may_keep=self._rules.keeping_mode() != "off",
        )
        if not has_gaps or ("cap_max_tokens" in qos.degradation and qos.capped_tokens == 1):
            latency = latency._replace(tbt_s=None)
        if self._rules.may_share:
            work_s = latency.ttft_s - latency.queue_s
            latency = latency._replace(ttft_s=latency.queue_s + work_s / self._rules.max_prefill_degree)
        if qos.early_rejection == "overload":  # the prompt's own work is unknown here
            latency = latency._replace(ttft_s=latency.queue_s, tbt_s=None)
        missed = missed_target(latency, targets)
        refusal = missed and self._over_target(qos, missed, latency, targets, row, now_s)
        return _EarlyJudgement(latency, targets, refusal)

    def place_again(self, view: ClusterView, request: PlacementRequest, qos: QosClass, now_s: float) -> Placement:
        """Places an admitted request once more. Raises what `place` raises."""
        request = self._of_class(request, qos)
        return place(view, request, self._rules, self._forecast, now_s, self._rng)

    @property
    def fetching_threshold(self) -> float | None:
        """See `PlacementRules.fetching_threshold`."""
        return self._rules.fetching_threshold

    def applied(self, qos: QosClass) -> AdmissionTargets:
        """The targets of the class as tightened by feedback now."""
        tightened = self._feedback.tightenings(qos)
        ttft, tbt = tightened.get("ttft"), tightened.get("tbt")
        return AdmissionTargets(ttft.applied_s if ttft else qos.ttft_s, tbt.applied_s if tbt else qos.tbt_s)

    def tightenings(self, qos: QosClass) -> dict[TargetKind, Tightening]:
        """The targets of the class that feedback has tightened, and why."""
        return self._feedback.tightenings(qos)

    def move_target(
        self, view: ClusterView, request: PlacementRequest, same_kv: Bools, now_s: float
    ) -> Placement | None:
        """Where a running answer would go on; see `move_target` of `policy.placement.move`."""
        loads = self._forecast.decode_loads(view, now_s, now_s)
        return move_target(view, request, loads, same_kv, self._rng)

    def running_answer(
        self, request_id: str, row: int, num_tokens: int, num_generated: int, most_left: int
    ) -> RunningAnswer | None:
        """An answer that decodes on `row`, with what is predicted of its rest; None if it is not inside.

        One that is longer than predicted goes on for a quarter of its length so far.
        """
        inside = self.inside.get(request_id)
        if inside is None:
            return None
        num_left = inside.work.num_output - num_generated
        num_left = min(num_left if num_left > 0 else OVERTIME * num_generated, most_left)
        return RunningAnswer(request_id, row, num_tokens, num_left, most_left)

    def note_overheads(self, before_token_s: float, handover_s: float | None, request_id: str = "") -> None:
        """Learns the measured overheads of one request, still inside: `RequestForecast.note_overheads`."""
        inside = self.inside.get(request_id)
        if handover_s is not None and inside is not None:
            handover_s -= inside.handover_s
        self._forecast.note_overheads(before_token_s, handover_s)

    def leave(
        self, request_id: str, now_s: float, *, num_output: int, ttft_s: float | None, tbt_s: float | None
    ) -> None:
        """Removes a request that has ended. Learns from it, unless `ttft_s` is None, which marks an aborted one."""
        inside = self.inside.leave(request_id, now_s, num_output)
        self._probe.reset()
        if ttft_s is not None:
            self.lengths.add(inside.qos.name, inside.work.num_prompt_tokens, num_output)
            admission_tbt_s = tbt_s if num_output >= _MIN_TBT_TOKENS else None
            self._feedback.add(inside.qos, ttft_s, admission_tbt_s, inside.unloaded, inside.entered_s, now_s)

    def _enforced_targets(
        self, qos: QosClass, targets: AdmissionTargets, admitted: Admitted, request: PlacementRequest
    ) -> AdmissionTargets:
        if qos.early_rejection == "strict":
            return targets
        placement, num_output = admitted.placement, admitted.num_output
        context_tokens = request.context_tokens(num_output / 2)
        return overload_targets(targets, self._forecast.unloaded_latency(placement, context_tokens, num_output))

    def _over_target(
        self,
        qos: QosClass,
        missed: TargetKind,
        latency: PredictedLatency,
        targets: AdmissionTargets,
        row: int | None,
        now_s: float,
    ) -> Refused:
        assert row is not None
        of_row = None if self.mode == "load" else row
        ends_in_s = self._forecast.decodes.next_ends(of_row, now_s, self.inside.waiting) - now_s
        tightening = self._feedback.tightenings(qos).get(missed)
        return over_target(qos, missed, latency, targets, tightening, ends_in_s)

    def is_probe(self, now_s: float) -> bool:
        """Whether to admit a refused request because nothing has run for long: `IdleProbe`."""
        return not self.inside and self._probe.is_due(now_s)

    def note_no_room(self, request_id: str, now_s: float) -> bool:
        """Notes that an admitted request found no room on its workers. Returns whether it may be tried again."""
        return self.shares.note_full(request_id, now_s)

    def _check_fair_share(self, tenant: Tenant, request: PlacementRequest, admitted: Admitted, now_s: float) -> None:
        qos, num_tokens = admitted.qos, request.num_prompt_tokens + round(admitted.num_output)
        if not self.shares.may_enter(qos.priority, tenant, num_tokens, now_s):
            message = f"tenant {tenant.name} has its fair share of the cluster, and others wait for theirs"
            latency = admitted.latency(admitted.placement.tbt_s)
            raise Refused(qos, "fair share", message, latency, self.applied(qos), 0.0)

    def _check_not_shed(
        self, qos: QosClass, latency: PredictedLatency, targets: AdmissionTargets, now_s: float
    ) -> None:
        left_s = self._shedding.left_s(qos.priority, now_s)
        if left_s > 0:
            message = f"class {qos.name} waits while classes before it cannot be served"
            raise Refused(qos, "shed", message, latency, targets, left_s)

    def _shed_below(self, qos: QosClass, refusal: Refused, now_s: float) -> None:
        """Sheds a lower class, unless the request would miss its target on an idle cluster anyway."""
        if "shed_lowest_class" in qos.degradation and refusal.is_by_others:
            self._shedding.shed(qos.priority, self.classes.priorities, now_s)

    def _has_share(self, view: ClusterView, request: PlacementRequest, admitted: Admitted, now_s: float) -> bool:
        num_tokens = request.num_prompt_tokens + round(admitted.num_output)
        capacity, in_use = view.decode_tokens, view.decoding_tokens
        return self.inside.reservations.may_use(admitted.qos, num_tokens, capacity, self.classes.classes, now_s, in_use)
