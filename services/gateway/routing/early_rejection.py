"""Between the HTTP requests and the policies: who is judged, and how wrong the judgement was."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from halfmoon.errors import HalfmoonError
from halfmoon.policy.admission.admission_controller import AdmissionController
from halfmoon.policy.admission.classes import Caller, QosClass
from halfmoon.policy.admission.latency_bounds import ANY_PROMPT, PromptLowerBound
from halfmoon.policy.admission.refusal import AdmissionMode, Refused
from halfmoon.policy.models.refinement import PredictionErrors
from halfmoon.policy.placement.place import PlacementRules
from services.gateway.cluster.membership import Membership
from services.gateway.cluster.prefix_replication import StoreCopies
from services.gateway.openai.served_model import PromptPrefix
from services.gateway.routing.attempt import RelayRequest
from services.gateway.routing.progress import Progress
from services.gateway.routing.prompt_prefix import held_blocks
from services.gateway.routing.request_routing import RequestRouting, priority_in, shown_candidates, trace_admission
from services.gateway.telemetry.decisions import Decision
from services.gateway.telemetry.recent_telemetry import RecentTelemetry


@dataclass(frozen=True, slots=True)
class UnreadRequest:
    """What is known of a request before its prompt is tokenized."""

    request_id: str
    qos: QosClass
    priority: int  # as the client has it
    has_gaps: bool  # more than one token is asked for, without doubt


class EarlyRejection:
    """Owns the gatekeeper, and how wrong its predictions of whole requests were."""

    def __init__(
        self,
        membership: Membership,
        mode: AdmissionMode,
        rules: PlacementRules,
        clock: Callable[[], float],
        observations: RecentTelemetry,
        copies: StoreCopies,
    ) -> None:
        self.gatekeeper = AdmissionController(mode, rules, random.Random())
        self.errors = {"ttft": PredictionErrors(), "tbt": PredictionErrors()}
        self._membership = membership
        self._clock = clock
        self._observations = observations
        self.copies = copies
        self._names = map(str, itertools.count())

    def reject_early(self, unread: UnreadRequest, progress: Progress) -> None:
        """Raises Refused where no prompt could be admitted now, whatever it is: before it is tokenized."""
        qos, now_s = unread.qos, self._clock()
        progress.qos_class = qos.name
        priority, view = priority_in(qos, unread.priority), self._membership.view()
        with self._noting(unread, progress, ANY_PROMPT, now_s):
            self.gatekeeper.reject_early(view, priority, has_gaps=unread.has_gaps, qos=qos, now_s=now_s)

    def reject_by_prefix(
        self, unread: UnreadRequest, begin: Callable[[], PromptPrefix | None], tenant_salt: bytes, progress: Progress
    ) -> None:
        """Raises Refused where no prompt that begins like this one could be admitted now.

        How it begins is looked at only where it would be refused if nothing of it were cached.
        """
        gate, view, qos, now_s = self.gatekeeper, self._membership.view(), unread.qos, self._clock()
        if not gate.has_enforced_targets(qos):
            return
        beginning, priority = begin(), priority_in(qos, unread.priority)
        if beginning is None:
            return
        prompt = PromptLowerBound(beginning.least_tokens())
        refusal_of = partial(
            gate.early_refusal, view, priority=priority, has_gaps=unread.has_gaps, qos=qos, now_s=now_s
        )
        refusal = refusal_of(prompt)
        cached_blocks = None if refusal is None else held_blocks(beginning, self._membership, tenant_salt)
        if cached_blocks is None:
            return
        if cached_blocks.any():
            prompt = PromptLowerBound(beginning.least_tokens(), cached_blocks)
            refusal = refusal_of(prompt)
        if refusal is not None:
            with self._noting(unread, progress, prompt, now_s):
                gate.reject(refusal, qos, now_s)

    @contextmanager
    def _noting(
        self, unread: UnreadRequest, progress: Progress, prompt: PromptLowerBound, now_s: float
    ) -> Iterator[None]:
        """A refusal with its reasons, for those who look on."""
        try:
            yield
        except Refused as refusal:
            trace_admission(progress, now_s, refusal)
            progress.note_refused(refusal)
            decision = Decision(
                request_id=unread.request_id,
                at_s=now_s,
                waited_s=now_s - progress.arrived_s,
                qos_class=unread.qos.name,
                num_prompt_tokens=None,
                candidates=shown_candidates(self._membership.view(), prompt.num_tokens, refusal.ranked_by),
                prefill_worker=None,
                decode_worker=None,
                ttft_s=refusal.ttft_s,
                tbt_s=refusal.tbt_s,
                targets=refusal.targets,
                applied=refusal.applied,
                refusal=refusal.reason,
            )
            self._observations.decisions.note(decision)
            raise

    def hold_together(self, cases: Sequence[RequestRouting]) -> None:
        """Admits all of these, the outputs of one HTTP request, or none. Raises Refused, and what `place` raises."""
        try:
            self._hold_each(cases)
        except Refused as refusal:
            is_by_targets = refusal.reason in ("ttft", "tbt")
            if not is_by_targets or not self.gatekeeper.is_probe(self._clock()):
                raise
            self._hold_each(cases, is_probe=True)

    def _hold_each(self, cases: Sequence[RequestRouting], *, is_probe: bool = False) -> None:
        try:
            for case in cases:
                case.hold(is_probe=is_probe)
        except HalfmoonError:
            for case in cases:
                case.withdraw()
            raise

    @contextmanager
    def case(self, request: RelayRequest, progress: Progress) -> Iterator[RequestRouting]:
        """One request as long as it is here."""
        name = next(self._names)
        made = RequestRouting(
            name, request, progress, self.gatekeeper, self._membership, self._clock, self._observations, self.copies
        )
        try:
            yield made
        finally:
            made.close()
            if progress.is_complete:
                self._note_errors(progress)

    def _note_errors(self, progress: Progress) -> None:
        """Of requests that needed one attempt: predictions are of the first."""
        pairs = {
            "ttft": (progress.predicted_ttft_s, progress.ttft_s),
            "tbt": (progress.predicted_tbt_s, progress.mean_tbt_s),
        }
        for kind, (predicted_s, measured_s) in pairs.items():
            if predicted_s and measured_s and not progress.num_retries:
                self.errors[kind].add(predicted_s, measured_s)


def caller_of(headers: Mapping[str, str], model: str) -> Caller:
    """Whose request it is, as classes tell callers apart."""
    scheme, _, api_key = headers.get("Authorization", "").partition(" ")
    named = {name.lower(): value for name, value in headers.items()}
    return Caller(named, api_key.strip() if scheme.lower() == "bearer" else "", model)
