"""One request's case: from its admission, through its placements, to what it taught."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from halfmoon.kv.keys import block_keys, root_key
from halfmoon.kv.kv_layout import KVLayout
from halfmoon.pb.prefill_pb2 import FP8, INT4, INT8, RAW, KVCodec
from halfmoon.policy.admission.admission_controller import AdmissionController
from halfmoon.policy.admission.classes import QosClass
from halfmoon.policy.admission.degradation import Admitted
from halfmoon.policy.admission.refusal import Refused
from halfmoon.policy.placement.candidates import Candidate, ranked_candidates
from halfmoon.policy.values import NOTHING_CACHED, AdmissionTargets, Placement, PlacementRequest, TtftPrediction
from halfmoon.policy.view.block_index import short_keys
from halfmoon.policy.view.cluster_view import ClusterView
from halfmoon.policy.view.key_table import Keys
from halfmoon.rpc.spans import current_span
from services.gateway.cluster.membership import Membership
from services.gateway.cluster.prefix_replication import PromptBlocks, StoreCopies
from services.gateway.routing.attempt import RelayRequest
from services.gateway.routing.progress import Progress
from services.gateway.routing.token_flow import TokenSink
from services.gateway.telemetry.decisions import Decision, Move
from services.gateway.telemetry.recent_telemetry import RecentTelemetry

_LOWER: dict[KVCodec.ValueType, KVCodec.ValueType] = {RAW: INT8, FP8: INT4, INT8: INT4, INT4: INT4}
_SHOWN_CANDIDATES = 6  # of the workers that a prompt could have gone to
_PRIORITIES_PER_CLASS = 1_000  # that a client may choose from: a class goes before all of the next one


class RequestRouting:
    """Owns one request's standing with the gatekeeper."""

    def __init__(
        self,
        name: str,
        request: RelayRequest,
        progress: Progress,
        gatekeeper: AdmissionController,
        membership: Membership,
        clock: Callable[[], float],
        observations: RecentTelemetry,
        copies: StoreCopies,
    ) -> None:
        self.request = request  # as admitted
        self._asked = request
        self._name = name
        self._progress = progress
        self._gatekeeper = gatekeeper
        self._membership = membership
        self._clock = clock
        self._observations = observations
        self._copies = copies
        self._admitted: Admitted | None = None
        self._is_held = False  # admitted, and not under way
        self._waited_s = 0.0  # until it was admitted
        self._keys: tuple[KVLayout, Keys] | None = None
        self._block_keys: list[bytes] = []  # what `_keys` are short for

    def name_blocks(self) -> None:
        """Hashes the prompt's blocks, for `place`: milliseconds for a very long one, in any thread."""
        layout = self._membership.kv_layout
        if layout is not None and (self._keys is None or self._keys[0] != layout):
            root = root_key(self._membership.model_fingerprint, layout, self.request.tenant_salt)
            keys = block_keys(root, self.request.prompt_token_ids, layout.block_tokens)
            self._keys, self._block_keys = (layout, short_keys(keys)), keys

    def share_blocks(self, other: RequestRouting) -> None:
        """Takes the names of its blocks from one of the same prompt."""
        self._keys, self._block_keys = other._keys, other._block_keys

    def hold(self, *, is_probe: bool = False) -> None:
        """Admits it before its turn has come: `place` refuses it no more. Raises Refused, which a probe is not by
        targets, and what `place` raises."""
        qos, now_s = self.request.qos, self._clock()
        judged = replace(qos, ttft_s=None, tbt_s=None) if is_probe else qos
        wanted = self._wanted(())
        self._admit(self._decided(wanted, judged, now_s))
        self._is_held = True
        assert self._admitted is not None
        self._gatekeeper.reserve(self._name, self._membership.view(), self._admitted, wanted.num_prompt_tokens, now_s)

    def withdraw(self) -> None:
        """Takes `hold` back, if there was any."""
        if self._is_held:
            self._gatekeeper.release(self._name, self._clock())
            self._admitted, self._is_held, self.request = None, False, self._asked

    def place(self, exclude: Sequence[str]) -> Placement:
        """Where to try next. Raises Refused the first time, if the class forbids it, and what `place` raises."""
        wanted, view, now_s = self._wanted(exclude), self._membership.view(), self._clock()
        if self._admitted is None:
            return self._begin(wanted, self._decided(wanted, self.request.qos, now_s), now_s)
        if self._is_held:
            self._gatekeeper.activate(self._name, now_s)
        placement = self._gatekeeper.place_again(view, wanted, self._admitted.qos, now_s)
        if self._is_held:
            self._is_held = False
            return self._begin(wanted, replace(self._admitted, placement=placement), now_s)
        self._gatekeeper.move(self._name, view, placement, now_s)
        move = Move(now_s, placement.prefill.worker_id, placement.decode.worker_id)
        self._observations.decisions.note_move(self.request.request_id, move)
        return placement

    def _wanted(self, exclude: Sequence[str]) -> PlacementRequest:
        num_output = len(self._progress.output_token_ids)
        num_prompt = len(self.request.prompt_token_ids) + num_output
        sampling = self.request.sampling
        room = sampling.max_tokens - num_output
        least = room if sampling.ignore_eos else sampling.min_tokens - num_output
        return PlacementRequest(
            num_prompt,
            room,
            tuple(exclude),
            priority=self._priority(),
            least_tokens=max(least, 0),
            cached_blocks=self._cached_blocks(),
        )

    def codec(self, usual: KVCodec.ValueType) -> KVCodec.ValueType:
        """How its KV travels."""
        return _LOWER[usual] if self._admitted and self._admitted.lower_kv_precision else usual

    def noting(self, sink: TokenSink) -> TokenSink:
        """`sink`, and the gatekeeper hears of the first token."""
        return _FirstToken(sink, lambda: self._gatekeeper.begin_decode(self._name, self._clock()))

    def close(self) -> None:
        """It is over, in whatever way; again, that is nothing."""
        if self._admitted is not None:
            progress = self._progress
            self._note_overheads()
            ttft_s = progress.ttft_s if progress.is_complete else None
            num_output = len(progress.output_token_ids)
            self._gatekeeper.leave(
                self._name, self._clock(), num_output=num_output, ttft_s=ttft_s, tbt_s=progress.mean_tbt_s
            )
            self._admitted = None

    def _note_overheads(self) -> None:
        """Of a request that needed one attempt."""
        progress = self._progress
        if progress.num_retries or None in (progress.ttft_s, progress.queue_s, progress.prefill_s):
            return
        worker_s = (progress.queue_s or 0.0) + (progress.prefill_s or 0.0)
        before_token_s = (progress.ttft_s or 0.0) - self._waited_s - worker_s
        self._gatekeeper.note_overheads(before_token_s, progress.handover_s)

    def _decided(self, wanted: PlacementRequest, judged: QosClass, now_s: float) -> Admitted:
        """`judged` is its class, with the targets that count."""
        view, progress, qos = self._membership.view(), self._progress, self.request.qos
        progress.qos_class = qos.name
        try:
            return replace(self._gatekeeper.decide(view, wanted, judged, now_s), qos=qos)
        except Refused as refusal:
            self._note(wanted, now_s, refusal)
            trace_admission(progress, now_s, refusal)
            progress.note_refused(refusal)
            raise

    def _admit(self, admitted: Admitted) -> None:
        self._admitted = admitted
        self.request = _as_admitted(self.request, admitted)

    def _begin(self, wanted: PlacementRequest, admitted: Admitted, now_s: float) -> Placement:
        """It goes to its workers."""
        view, progress = self._membership.view(), self._progress
        self._waited_s = now_s - progress.arrived_s
        trace_admission(progress, now_s)
        progress.predicted_ttft_s = self._waited_s + admitted.placement.ttft_s
        progress.predicted_queue_s = admitted.placement.queue_s
        progress.predicted_prefill_s = admitted.placement.prefill_s
        progress.predicted_tbt_s = admitted.mean_tbt_s if admitted.max_tokens > 1 else None
        self._note(wanted, now_s, admitted.placement)
        self._admit(admitted)
        self._gatekeeper.enter(self._name, view, admitted, wanted.num_prompt_tokens, now_s)
        if self._keys is not None:
            chain = PromptBlocks(self._block_keys, self._keys[0], self.request.tenant_salt)
            self._copies.consider(admitted.placement.prefill, wanted.cached_blocks, chain, now_s)
        return admitted.placement

    def _note(self, wanted: PlacementRequest, now_s: float, outcome: Placement | Refused) -> None:
        """The decision with its reasons, for those who look on."""
        request, placement = self.request, None if isinstance(outcome, Refused) else outcome
        view = self._membership.view()
        num_tokens = wanted.num_prompt_tokens
        decision = Decision(
            request_id=request.request_id,
            at_s=now_s,
            waited_s=now_s - self._progress.arrived_s,
            qos_class=request.qos.name,
            num_prompt_tokens=num_tokens,
            candidates=shown_candidates(view, num_tokens, outcome.ranked_by, placement),
            prefill_worker=placement.prefill.worker_id if placement else None,
            decode_worker=placement.decode.worker_id if placement else None,
            ttft_s=outcome.ttft_s,
            tbt_s=outcome.tbt_s,
            targets=AdmissionTargets(request.qos.ttft_s, request.qos.tbt_s),
            applied=self._gatekeeper.applied(request.qos),
            refusal=outcome.reason if isinstance(outcome, Refused) else None,
        )
        self._observations.decisions.note(decision)
        if self._keys is not None:
            layout, keys = self._keys
            self._observations.prefixes.note(keys, wanted.cached_blocks, layout.block_tokens, now_s)

    def _priority(self) -> int:
        """As workers order requests: by class first, then by what the client asked for."""
        if self._admitted is not None:
            return self._admitted.priority
        return priority_in(self.request.qos, self.request.priority)

    def _cached_blocks(self) -> NDArray[np.int64]:
        """How many leading blocks of the prompt each worker has."""
        self.name_blocks()
        return NOTHING_CACHED if self._keys is None else self._membership.index.match(self._keys[1])


class _FirstToken:
    """A sink that tells of the first tokens."""

    def __init__(self, sink: TokenSink, on_first: Callable[[], None]) -> None:
        self._sink = sink
        self._on_first = on_first
        self.push = sink.push

    async def begin(self) -> None:
        """Tells, in every attempt: each computes the prompt again."""
        self._on_first()
        await self._sink.begin()


def shown_candidates(
    view: ClusterView, num_prompt_tokens: int, ranked_by: TtftPrediction | None, placement: Placement | None = None
) -> Sequence[Candidate]:
    """Those that a decision is shown with."""
    return ranked_candidates(view, num_prompt_tokens, ranked_by, _SHOWN_CANDIDATES, placement) if ranked_by else ()


def trace_admission(progress: Progress, now_s: float, refusal: Refused | None = None) -> None:
    """A span from the request's arrival to what was decided."""
    span = current_span().child("admission", progress.arrived_s)
    span.end(now_s, error=None if refusal is None else refusal.message)


def priority_in(qos: QosClass, wanted: int) -> int:
    """What the client asked for, within its class."""
    half = _PRIORITIES_PER_CLASS // 2
    return qos.priority * _PRIORITIES_PER_CLASS + max(-half, min(wanted, half - 1))


def _as_admitted(request: RelayRequest, admitted: Admitted) -> RelayRequest:
    request = replace(request, priority=admitted.priority)
    if admitted.max_tokens == request.sampling.max_tokens:
        return request
    sampling = type(request.sampling)()
    sampling.CopyFrom(request.sampling)
    sampling.max_tokens = admitted.max_tokens
    sampling.min_tokens = min(sampling.min_tokens, admitted.max_tokens)
    return replace(request, sampling=sampling)
