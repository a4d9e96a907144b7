"""Routing one output: reserved or admitted, placed as often as its workers fail it, closed when it has ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from halfmoon.kv.kv_policy import kv_policy_of
from halfmoon.pb.prefill_pb2 import KVSource
from halfmoon.pb.types_pb2 import NO_POOLING
from halfmoon.policy.admission.degradation import Admitted
from halfmoon.policy.admission.qos_classes import QosClass
from halfmoon.policy.admission.refusal import PredictedLatency, Refused
from halfmoon.policy.forecast.ttft import MAX_SOURCES, best_sources
from halfmoon.policy.placement.hot_spots import RunningAnswer
from halfmoon.policy.values import NOTHING_CACHED, Placement, PlacementRequest
from services.gateway.cluster.member import Member
from services.gateway.cluster.prompt_keys import PromptKeys
from services.gateway.request import RequestOutput
from services.gateway.routing.handover_codec import HandoverCodec
from services.gateway.routing.prefix_use import note_prefix_use
from services.gateway.routing.reported_decision import report_decision
from services.gateway.routing.routing_context import RoutingContext, trace_admission
from services.gateway.routing.token_flow import NotifyingSink, TokenSink
from services.gateway.telemetry.decisions import Move


class RequestRouting:
    """Owns one output's standing with the admission controller."""

    def __init__(self, context: RoutingContext, output: RequestOutput) -> None:
        self.output = output  # as admitted
        self._requested = output
        self._context = context
        self._admission = context.admission
        self._membership = context.membership
        self._name = next(context.names)
        self._progress = output.progress
        self._admitted: Admitted | None = None
        self._is_reserved = False  # admitted, and not placed yet
        self._waited_s = 0.0  # until it was admitted
        self._has_lost = False  # an attempt ended because a worker was lost
        self._keys: PromptKeys | None = None  # of the prompt; shared with other outputs of it
        self._placed: PlacementRequest | None = None  # the latest

    def hash_blocks(self) -> None:
        """Computes the keys of the prompt's blocks, for `place`: milliseconds for a very long one, in any thread."""
        layouts = self._membership.kv_layouts
        if layouts and (self._keys is None or self._keys.layouts != layouts):
            keys = PromptKeys(self._membership.model_fingerprint, layouts, self.output.tenant_salt)
            keys.extend(self.output.prompt_token_ids)
            self._keys = keys

    def share_blocks(self, other: RequestRouting) -> None:
        """Takes the keys of its blocks from an output of the same prompt."""
        self._keys = other._keys

    def reserve(self, *, is_probe: bool = False) -> None:
        """Admits the output before its turn; `place` no longer refuses it then.

        Raises Refused (a probe is not held to the targets) and what placement raises.
        """
        qos, now_s = self.output.qos, self._context.clock()
        applied_qos = replace(qos, ttft_s=None, tbt_s=None) if is_probe else qos
        request = self._placement_request(())
        admitted = self._decide(request, applied_qos, now_s)
        self._admit(admitted)
        self._is_reserved = True
        view, tenant = self._membership.view(), self.output.tenant
        self._admission.inside.reserve(self._name, view, admitted, request.num_prompt_tokens, now_s, tenant)

    @property
    def predicted(self) -> PredictedLatency | None:
        """What was predicted when it was admitted."""
        admitted = self._admitted
        return None if admitted is None else admitted.latency(admitted.mean_tbt_s)

    def release(self) -> None:
        """Undoes `reserve`, if it was called."""
        if self._is_reserved:
            self._admission.inside.release(self._name, self._context.clock())
            self._admitted, self._is_reserved, self.output = None, False, self._requested

    def place(self, exclude: Sequence[str]) -> Placement:
        """Chooses the workers of the next attempt. Raises what placement raises, and the first time Refused."""
        request, view, now_s = self._placement_request(exclude), self._membership.view(), self._context.clock()
        self._placed = request
        if self._admitted is None:
            qos = replace(self.output.qos, ttft_s=None, tbt_s=None) if self._progress.is_resumed else self.output.qos
            return self._begin(request, self._decide(request, qos, now_s), now_s)
        if self._is_reserved:
            self._admission.inside.activate(self._name, now_s)
        placement = self._admission.place_again(view, request, self._admitted.qos, now_s)
        if self._is_reserved:
            self._is_reserved = False
            return self._begin(request, replace(self._admitted, placement=placement), now_s)
        self._admission.inside.move(self._name, view, placement, now_s)
        self._context.telemetry.note_placed(placement, is_failover=request.is_failover)
        move = Move(now_s, placement.prefill.worker_id, placement.decode.worker_id)
        self._context.telemetry.decisions.note_move(self.output.request_id, move)
        return placement

    @property
    def token_ids(self) -> list[int]:
        """The prompt, and the answer so far."""
        return [*self.output.prompt_token_ids, *self._progress.output_token_ids]

    @property
    def num_tokens(self) -> int:
        """How many they are."""
        return len(self.output.prompt_token_ids) + len(self._progress.output_token_ids)

    @property
    def room_tokens(self) -> int:
        """Most tokens that the answer may still have."""
        return self.output.sampling.max_tokens - len(self._progress.output_token_ids)

    def move_target(self, source: Member, present: Placement | None) -> Placement | None:
        """Where the running answer would go on instead of at `source`: at `present` if it still takes answers."""
        view, now_s, same_kv = self._membership.view(), self._context.clock(), self._context.same_kv(source.worker_id)
        if present is not None and same_kv[rows := view.rows_of([present.decode.worker_id])].any():
            same_kv[:] = False
            same_kv[rows] = True
        found = self._admission.move_target(view, self._placement_request((source.worker_id,)), same_kv, now_s)
        return self.move_target(source, None) if found is None and present is not None else found

    def running_answer(self, worker: Member) -> RunningAnswer | None:
        """How far the answer is that decodes on this worker."""
        row = self._membership.view().row(worker.worker_id)
        if row is None:
            return None
        num_generated = len(self._progress.output_token_ids)
        return self._admission.running_answer(self._name, row, self.num_tokens, num_generated, self.room_tokens)

    def held_blocks(self, holder: int) -> int:
        """How many leading blocks of prompt and answer a holder is known to have."""
        held = self._cached_blocks()
        return int(held[holder]) if 0 <= holder < len(held) else 0

    def move(self, placement: Placement) -> bool:
        """Notes that the answer goes on at another decode worker. False if that one has just left the cluster."""
        view, now_s = self._membership.view(), self._context.clock()
        if view.row(placement.decode.worker_id) is None:
            return False
        self._admission.inside.move(self._name, view, placement, now_s)
        move = Move(now_s, placement.prefill.worker_id, placement.decode.worker_id)
        self._context.telemetry.decisions.note_move(self.output.request_id, move)
        return True

    def note_move(self, outcome: str, *, is_hot: bool) -> None:
        """Counts what became of a move that was begun; `is_hot`: off a busy worker, not one that leaves."""
        self._context.telemetry.pool_decisions["hot_spot" if is_hot else "move", outcome] += 1

    def codec(self, default: HandoverCodec) -> HandoverCodec:
        """The encoding of its KV in transfer: `default`, or a lossier one where admission degraded the output."""
        return default.lower if self._admitted and self._admitted.lower_kv_precision else default

    def sources(self, placement: Placement) -> list[KVSource]:
        """Workers from whose prefix caches the prefill worker of the latest placement may load what it lacks.

        Best first.
        """
        request, view = self._placed, self._membership.view()
        row = view.row(placement.prefill.worker_id)
        if row is None or request is None or not request.cached_blocks.any() or placement.segments is not None:
            return []
        threshold = self._admission.fetching_threshold
        holders = best_sources(view, row, request, threshold, placement.queue_s, MAX_SOURCES)
        return self._membership.worker_sources(holders, request.cached_blocks)

    def observing(self, sink: TokenSink) -> TokenSink:
        """`sink`, which reports the first token of each attempt to the admission controller."""
        return NotifyingSink(sink, lambda: self._admission.inside.begin_decode(self._name, self._context.clock()))

    def note_no_room(self) -> bool:
        """Reports that no worker had room for the output. Returns whether it may be tried again."""
        return self._admission.note_no_room(self._name, self._context.clock())

    def note_lost(self) -> None:
        """Notes that one of its workers was lost: the output goes on elsewhere, as a failover."""
        self._has_lost = True

    def close(self) -> None:
        """Ends the output's standing, however it ended. Idempotent."""
        if self._admitted is None:
            return
        progress = self._progress
        self._note_overheads()
        self._admission.leave(
            self._name,
            self._context.clock(),
            num_output=len(progress.output_token_ids),
            ttft_s=progress.ttft_s if progress.is_complete and not progress.is_resumed else None,
            tbt_s=progress.mean_tbt_s,
        )
        self._admitted = None
        self._context.telemetry.note_prediction(progress)

    def _note_overheads(self) -> None:
        """Reports what an output that needed one attempt spent outside queue, prefill and decode steps."""
        progress = self._progress
        if progress.num_retries or None in (progress.ttft_s, progress.queue_s, progress.prefill_s):
            return
        worker_s = (progress.queue_s or 0.0) + (progress.prefill_s or 0.0)
        before_token_s = (progress.ttft_s or 0.0) - self._waited_s - worker_s
        self._admission.note_overheads(before_token_s, progress.handover_s, self._name)

    def _placement_request(self, exclude: Sequence[str]) -> PlacementRequest:
        num_output = len(self._progress.output_token_ids)
        num_prompt = len(self.output.prompt_token_ids) + num_output
        sampling = self.output.sampling
        room = sampling.max_tokens - num_output
        least = room if sampling.ignore_eos else sampling.min_tokens - num_output
        return PlacementRequest(
            num_prompt,
            room,
            tuple(exclude),
            priority=self._priority(),
            least_tokens=max(least, 0),
            is_failover=self._has_lost or num_output > 0,
            qos_class=self.output.qos.name,
            may_share=self._may_share,
            most_seen=self._membership.most_seen(self.output.tenant_salt),
            cached_blocks=self._cached_blocks(),
        )

    @property
    def _may_share(self) -> bool:
        """Whether several workers may compute the prompt."""
        sampling = self.output.sampling
        is_about_prompt = sampling.HasField("num_prompt_logprobs") or sampling.pooling != NO_POOLING
        return not is_about_prompt and kv_policy_of(self.output.tenant_salt) is None

    def _priority(self) -> int:
        if self._admitted is not None:
            return self._admitted.priority
        output = self.output
        return self._admission.shares.priority(output.qos.priority, output.tenant, output.priority)

    def _decide(self, request: PlacementRequest, applied_qos: QosClass, now_s: float) -> Admitted:
        """Admits by `applied_qos`: its class, with the targets that count. Raises Refused."""
        qos = self.output.qos
        self._progress.qos_class = qos.name
        try:
            admitted = self._admission.decide(self._membership.view(), request, applied_qos, now_s, self.output.tenant)
            return replace(admitted, qos=qos)
        except Refused as refusal:
            report_decision(self._context, self.output, request, now_s, refusal)
            note_prefix_use(self._context, self.output, self._keys, request, now_s)
            trace_admission(self._progress.arrived_s, now_s, refusal)
            raise

    def _admit(self, admitted: Admitted) -> None:
        self._admitted = admitted
        num_before = len(self._progress.output_token_ids)  # of an answer that was adopted, and lost by its worker
        self.output = _as_admitted(self.output, admitted, num_before + admitted.max_tokens)

    def _begin(self, request: PlacementRequest, admitted: Admitted, now_s: float) -> Placement:
        """Sends the admitted output to its first workers."""
        progress, placement = self._progress, admitted.placement
        self._waited_s = now_s - progress.arrived_s
        trace_admission(progress.arrived_s, now_s)
        progress.predicted_ttft_s = self._waited_s + placement.ttft_s
        progress.predicted_queue_s = placement.queue_s
        progress.predicted_prefill_s = placement.prefill_s
        progress.predicted_transfer_s = placement.transfer_s
        progress.predicted_tbt_s = admitted.mean_tbt_s if admitted.max_tokens > 1 else None
        report_decision(self._context, self.output, request, now_s, placement)
        note_prefix_use(self._context, self.output, self._keys, request, now_s, placement)
        self._context.telemetry.note_placed(placement, is_failover=request.is_failover)
        self._context.telemetry.traffic.came(placement.work_s, now_s)
        self._admit(admitted)
        view, tenant = self._membership.view(), self.output.tenant
        self._admission.inside.enter(self._name, view, admitted, request.num_prompt_tokens, now_s, tenant)
        return placement

    def _cached_blocks(self) -> NDArray[np.int64]:
        """How many leading blocks each worker has, of the prompt and of the answer so far."""
        self.hash_blocks()
        if self._keys is None:
            return NOTHING_CACHED
        answer = self._progress.output_token_ids
        keys = self._keys.continued([*self.output.prompt_token_ids, *answer]) if answer else self._keys
        return keys.held(self._membership.index)


def _as_admitted(output: RequestOutput, admitted: Admitted, max_tokens: int) -> RequestOutput:
    output = replace(output, priority=admitted.priority)
    if max_tokens == output.sampling.max_tokens:
        return output
    sampling = type(output.sampling)()
    sampling.CopyFrom(output.sampling)
    sampling.max_tokens = max_tokens
    sampling.min_tokens = min(sampling.min_tokens, max_tokens)
    return replace(output, sampling=sampling)
