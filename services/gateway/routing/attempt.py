"""One attempt at an output on one placement, from the Prefill call to the last token or the first failure."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence
from contextlib import nullcontext

from halfmoon.errors import Cancelled, DeadlineExceeded, HalfmoonError, Unavailable
from halfmoon.pb.prefill_pb2 import FirstToken, HandedOver, KVSource, PrefillRequest
from halfmoon.pb.types_pb2 import NOT_FINISHED, Generation, Token
from halfmoon.policy.models.chunk_length import chunk_target_s
from halfmoon.policy.models.latency import PrefillSample
from halfmoon.policy.placement.hot_spots import RunningAnswer
from halfmoon.policy.values import Placement
from halfmoon.rpc.peer import LONG_LIVED_S
from halfmoon.rpc.telemetry.spans import NO_SPAN, current_span, operation
from services.gateway.cluster.cluster import Cluster
from services.gateway.cluster.token_router import (
    Event,
    FirstTokenArrived,
    Moving,
    PrefillEnded,
    Route,
    Stopping,
    TokenArrived,
    WorkerLeaves,
    WorkerLost,
)
from services.gateway.cluster.worker import Worker
from services.gateway.request import RequestOutput
from services.gateway.routing.decode_move import DecodeMove, DecodeMoves
from services.gateway.routing.handover_codec import HandoverCodec
from services.gateway.routing.prefill_helpers import PrefillHelpers
from services.gateway.routing.token_flow import TokenFlow, TokenSink
from services.gateway.routing.token_order import TokenOrder, accepted

log = logging.getLogger(__name__)

_PREFILL_LINGER_S = 5.0  # the last token may overtake the end of its Prefill call


class DecodeWorkerLost(Unavailable):
    """The decode worker was lost; the prefill worker is not to blame."""


class Moved(HalfmoonError):
    """The attempt ends because the answer goes on at another worker, as it was prepared."""

    def __init__(self, moving: Moving) -> None:
        super().__init__(f"the answer goes on at {moving.placement.decode.worker_id}")
        self.moving = moving


class Attempt:
    """Owns one attempt: its Prefill call, its route in the token router, and the duty to end it on both workers."""

    def __init__(
        self,
        cluster: Cluster,
        output: RequestOutput,
        placement: Placement,
        codec: HandoverCodec,
        sources: Sequence[KVSource],
        moves: DecodeMoves,
    ) -> None:
        """sources: workers from which the prefill worker may load what it lacks, best first."""
        self._moves = moves
        self._move: DecodeMove | None = None
        self._cluster = cluster
        self._output = output
        self._progress = progress = output.progress
        self._prefill = cluster.worker(placement.prefill.worker_id)
        self._decode = self._holder = cluster.worker(placement.decode.worker_id)
        self._wire_id = f"{output.request_id}.{secrets.token_hex(4)}"  # two attempts never share an id on a worker
        self._message = PrefillRequest(
            generation=Generation(
                request_id=self._wire_id,
                model_fingerprint=cluster.membership.model_fingerprint,
                prompt_token_ids=output.prompt_token_ids,
                output_token_ids=progress.output_token_ids,
                sampling=output.sampling,
                priority=output.priority,
                class_priority=output.qos.priority,
                max_pause_s=output.qos.max_pause_s,
                tbt_target_s=chunk_target_s(output.qos.tbt_target_s, placement.decode.role),
                gateway_id=cluster.gateway_id,
                tenant_salt=output.tenant_salt,
                tenant=output.tenant.name,
                tenant_kv_quota_bytes=output.tenant.kv_bytes or 0,
                repeatable=output.repeat.next_attempt(progress.cached_tokens) if output.repeat else None,
            ),
            decode_address=placement.decode_address,
            role_epoch=self._prefill.member.role_epoch,
            decode_role_epoch=self._decode.member.role_epoch,
            kv_codec=codec.codec,
            chooses_codec=codec.is_choice,
            is_degraded=codec.is_degraded,
            sources=sources,
        )
        self._num_prefill_tokens = len(output.prompt_token_ids) + len(progress.output_token_ids)
        self._helpers = None
        if placement.segments is not None:
            self._helpers = PrefillHelpers(cluster, self._message, placement, placement.segments)
        self._order = TokenOrder(len(progress.output_token_ids))
        self._flow = TokenFlow(self._handle)
        self._handed_over = False
        self._span = NO_SPAN
        progress.prefill_worker = placement.prefill.worker_id
        progress.decode_worker = placement.decode.worker_id

    async def run(self, sink: TokenSink) -> None:
        """Returns after the last token, or when the sink has enough. Raises the error that ended the attempt.

        NoCapacity and Unavailable: another attempt may succeed, with the tokens that `progress` has by then.
        """
        membership = self._cluster.membership
        prefill, decode = self._prefill.member, self._decode.member
        flow = self._flow
        workers = {"halfmoon.prefill_worker": prefill.worker_id, "halfmoon.decode_worker": decode.worker_id}
        route = Route(frozenset((prefill.worker_id, decode.worker_id)), flow.put)
        with (
            operation(current_span().child("attempt", attributes=workers)) as self._span,
            self._cluster.router.route(self._wire_id, route),
            nullcontext() if self._output.repeat is None else self._output.repeat.request.routed(flow.put),
            self._moves.hot_spots.watching(self),
        ):
            now_s = self._cluster.clock()
            membership.note_placed(self._wire_id, prefill, decode, self._num_prefill_tokens, now_s)
            call = self._cluster.spawn(_call_prefill(self._prefill, self._message, route, self._cluster))
            complete: bool | None = None
            try:
                if self._helpers is not None:
                    self._helpers.start()
                complete = await flow.run(sink)
            finally:
                if self._move is not None:
                    self._move.cancel()
                self._end_helpers()
                membership.note_ended(self._wire_id, prefill, decode, self._cluster.clock())
                self._end(call, complete)

    def _end(self, call: asyncio.Task[None], complete: bool | None) -> None:
        """Cancels the request on its workers, unless it is complete and has left them by itself.

        A repeatable one that has given enough is kept there, and so is one that is left to a repeat.
        """
        if complete:
            asyncio.get_running_loop().call_later(_PREFILL_LINGER_S, call.cancel)
        else:
            call.cancel()
        repeat = self._output.repeat
        if repeat is not None and complete is not None:
            self._cluster.ends.settle(self._holder, self._wire_id)
        elif not complete and (repeat is None or not repeat.is_left(self._cluster.router)):
            self._cluster.ends.cancel(self._decode, self._wire_id)

    def _handle(self, event: Event) -> list[Token]:
        match event:
            case TokenArrived(token, at_s):
                self._handed_over = True
                due = accepted(self._order, self._output, token, at_s)
                if self._move is not None:
                    self._move.note_token()
                return due
            case FirstTokenArrived(first, at_s):
                self._note_prefilled(first, at_s)
                self._end_helpers()
                self._span.event("first token", at_s)
                self._progress.note_prefill(first)
                if first.token.finish_reason != NOT_FINISHED:
                    self._holder = self._prefill
                return accepted(self._order, self._output, first.token, at_s)
            case HandedOver() as handed_over:
                self._handed_over = True
                self._progress.note_handed_over(handed_over)
                self._consider_move()
            case WorkerLeaves():
                self._consider_move()
            case Moving() as moving:
                raise Moved(moving)
            case PrefillEnded(None) if self._order.has_begun:
                self._handed_over = True
            case PrefillEnded(None):
                raise HalfmoonError("the prefill worker ended its call without a token")
            case PrefillEnded(Cancelled(message=message)) if self._needs_prefill:
                raise Unavailable(message)  # the worker did: our own cancellation does not come here
            case PrefillEnded(DeadlineExceeded(message=message)) if self._needs_prefill:
                raise Unavailable(message)  # its link to the decode worker stalled: another one may do
            case PrefillEnded(HalfmoonError() as error) if self._needs_prefill:
                raise error
            case WorkerLost(worker_id, error):
                if worker_id == self._decode.member.worker_id:
                    if not self._order.has_last:
                        raise DecodeWorkerLost(error.message)
                elif self._needs_prefill and not self._prefill.member.load.draining:
                    raise Unavailable(error.message)  # a drained worker has ended its call, which may be unread yet
            case Stopping(error):
                raise error
        return []

    def _end_helpers(self) -> None:
        """Lets the helpers go: the prefill worker has all of the prompt's KV, or the attempt is over."""
        if self._helpers is not None:
            self._helpers.end()

    def _consider_move(self) -> None:
        """Prepares to go on elsewhere if the decode worker will no longer decode, and the answer is there."""
        if self._decode.member.is_leaving and self._may_move:
            self._move = self._moves.begin(self._decode, self._flow.put)

    @property
    def _may_move(self) -> bool:
        is_prepared = self._move is not None and not self._move.is_over
        return self._handed_over and not is_prepared

    def running_answer(self) -> RunningAnswer | None:
        """See `Movable`."""
        if not self._may_move or not self._order.has_begun:
            return None
        return self._moves.routing.running_answer(self._decode.member)

    def move_to(self, placement: Placement) -> None:
        """See `Movable`."""
        if self._may_move:
            self._move = self._moves.begin(self._decode, self._flow.put, placement)

    @property
    def _needs_prefill(self) -> bool:
        """Whether the prefill worker still has to hand over, or to send the first token, which decode does not."""
        return not self._handed_over or not self._order.has_begun

    def _note_prefilled(self, first: FirstToken, at_s: float) -> None:
        num_new = self._num_prefill_tokens - first.num_cached_tokens
        sample = PrefillSample(num_new, first.num_cached_tokens, first.compute_s)
        self._cluster.membership.note_prefilled(
            self._wire_id,
            self._prefill.member,
            sample,
            at_s,
            was_restored=first.num_loaded_tokens > 0 or self._helpers is not None,
        )


async def _call_prefill(worker: Worker, message: PrefillRequest, route: Route, cluster: Cluster) -> None:
    """Puts the Prefill call's events, including its end, on the route."""
    error: HalfmoonError | None = None
    try:
        async with worker.peer.stream(worker.prefill.Prefill, message, deadline_s=LONG_LIVED_S) as events:
            async for event in events:
                if event.HasField("first_token"):
                    route.put(FirstTokenArrived(event.first_token, cluster.clock()))
                elif event.HasField("handed_over"):
                    route.put(event.handed_over)
    except HalfmoonError as failure:
        error = failure
    except Exception as failure:  # a task beside the requests must not take the gateway down
        log.error("prefill.failed", exc_info=failure)
        error = HalfmoonError("internal error: see the gateway's log")
    route.put(PrefillEnded(error))
