"""The generating endpoints: one HTTP request from its body to its last byte, and its row in the ledger."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any

from aiohttp import web

from halfmoon.errors import HalfmoonError, InvalidRequest, NoCapacity, NotFound, Unavailable
from halfmoon.ledger.ledger import Ledger
from halfmoon.ledger.models import RequestRow, RequestStatus
from halfmoon.policy.admission.classes import QosClass
from halfmoon.policy.admission.refusal import Refused
from halfmoon.rpc.spans import NO_SPAN, Span, Tracer, span_scope
from services.gateway.cluster.membership import Membership
from services.gateway.http.drain_gate import DrainGate
from services.gateway.http.error_responses import error_response, kind_of, shortened
from services.gateway.http.received_request import receive_body
from services.gateway.http.request_ids import request_id_of
from services.gateway.openai.endpoint_bodies import (
    AnyBody,
    generation_request_of,
    is_quickly_read,
    max_tokens_of,
    read_body,
)
from services.gateway.openai.generation_request import GenerationRequest, salt_of
from services.gateway.openai.served_model import ServedModel
from services.gateway.replies.chat_format import ChatFormat
from services.gateway.replies.completion_format import CompletionFormat
from services.gateway.replies.event_body import ClientGone
from services.gateway.replies.replies import ChoiceSink, StreamReply, TakesPieces, WholeReply
from services.gateway.replies.reply_format import ReplyFormat
from services.gateway.replies.responses_format import ResponsesFormat
from services.gateway.replies.text_stream import TextPiece
from services.gateway.routing.choices import Choices, choices_of
from services.gateway.routing.early_rejection import EarlyRejection, UnreadRequest, caller_of
from services.gateway.routing.fan_out import run_choices
from services.gateway.routing.progress import Progress
from services.gateway.routing.prompt_prefix import prompt_prefix_of
from services.gateway.routing.relay import Relay
from services.gateway.telemetry.metrics import GatewayMetrics
from services.gateway.telemetry.recent_telemetry import RecentTelemetry, refusal_of
from services.gateway.telemetry.request_span import begin_request, end_request

log = logging.getLogger(__name__)

_SLOW_PROMPT_BYTES = 4_096  # of a body whose prompt is tokenized off the event loop
_MAX_ERROR_CHARS = 1_000  # in the ledger and in the log
_CLIENT_CLOSED = 499  # nobody reads it but the ledger
_REJECTIONS = (InvalidRequest, NotFound, NoCapacity, Unavailable)


@dataclass(slots=True)
class _Call:
    """One HTTP request on its way through; owned by the handler."""

    endpoint: str
    request_id: str
    created_at: datetime
    arrived_s: float  # on the gateway's monotonic clock
    outlook: Progress  # what was predicted where it was refused, its prompt read or not
    choices: Choices = field(default_factory=Choices)
    labels: dict[str, Any] = field(default_factory=dict)
    refusal: str = "bad request"  # in a word, should it be refused
    is_refused: bool = False  # by admission, any of its outputs
    refused_unread: bool = False  # by admission, before its prompt was tokenized
    span: Span = NO_SPAN


class GenerationEndpoints:
    """Serves chat completions, completions and responses. Owns nothing; writes down every request once."""

    def __init__(
        self,
        model: ServedModel,
        membership: Membership,
        relay: Relay,
        judge: EarlyRejection,
        ledger: Ledger,
        metrics: GatewayMetrics,
        door: DrainGate,
        observations: RecentTelemetry,
        tracer: Tracer,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = model
        self._membership = membership
        self._relay = relay
        self._judge = judge
        self._ledger = ledger
        self._metrics = metrics
        self._door = door
        self._observations = observations
        self._tracer = tracer
        self._clock = clock

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        return await self._recorded(request, "chat.completions")

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions."""
        return await self._recorded(request, "completions")

    async def responses(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/responses."""
        return await self._recorded(request, "responses")

    async def _recorded(self, request: web.Request, endpoint: str) -> web.StreamResponse:
        """Runs one request; whatever comes of it is counted and written down."""
        now_s = self._clock()
        call = _Call(endpoint, request_id_of(request), datetime.now(UTC), now_s, Progress(now_s))
        call.span = begin_request(self._tracer, request, endpoint, call.request_id, self._model.name, now_s)
        try:
            with self._door.inside(), self._metrics.in_flight.track_inprogress(), span_scope(call.span):
                response = await self._serve(request, call)
        except HalfmoonError as error:
            call.refusal = refusal_of(error)
            rejected = isinstance(error, _REJECTIONS) and call.choices.ttft_s is None
            if isinstance(error, Refused):
                call.is_refused, call.refused_unread = True, error.is_early
                call.outlook.note_refused(error)
                self._metrics.refusals.labels(error.qos_class, error.reason).inc()
            self._write_down(call, "rejected" if rejected else "error", kind_of(error).status, error.message)
            return error_response(error)
        except (asyncio.CancelledError, ClientGone):
            self._write_down(call, "cancelled", _CLIENT_CLOSED, "the client went away")
            raise
        except web.HTTPException as error:  # the body is too large, or compressed in an unknown way
            self._write_down(call, "rejected", error.status, error.text)
            raise
        except Exception:
            self._write_down(call, "error", 500, "internal error")
            raise
        return response

    async def _serve(self, request: web.Request, call: _Call) -> web.StreamResponse:
        raw = await receive_body(request)
        context_tokens = self._membership.context_tokens(self._model.context_tokens)
        read = partial(read_body, call.endpoint, raw, self._model, context_tokens)
        body = read() if is_quickly_read(raw) else await asyncio.to_thread(read)
        qos = self._judge.gatekeeper.classes.of(caller_of(request.headers, body.model))
        self._refuse_unread(body, len(raw), context_tokens, call, qos)
        take_in = partial(generation_request_of, body, self._model, context_tokens)
        intake = await asyncio.to_thread(take_in) if len(raw) > _SLOW_PROMPT_BYTES else take_in()
        call.labels = intake.labels
        call.choices = choices_of(intake, call.request_id, self._model, call.arrived_s, qos)
        shape = self._shape(call, intake)
        if intake.stream:
            return await self._stream(intake, call, StreamReply(request, shape, call.choices))
        return await self._whole(intake, call, WholeReply(shape, call.choices))

    def _refuse_unread(self, body: AnyBody, num_bytes: int, context_tokens: int, call: _Call, qos: QosClass) -> None:
        """Raises Refused. A token is a byte at least, and a template hardly writes more than the body does around it:
        a short body leaves room for more than one token."""
        max_tokens = max_tokens_of(body)
        if max_tokens == 0:
            return  # an echo: no worker hears of it
        has_gaps = 2 * num_bytes < context_tokens if max_tokens is None else max_tokens > 1
        unread = UnreadRequest(call.request_id, qos, body.priority or 0, has_gaps)
        self._judge.reject_early(unread, call.outlook)
        salt = salt_of(body.cache_salt)
        self._judge.reject_by_prefix(unread, partial(prompt_prefix_of, body, self._model, salt), salt, call.outlook)

    def _shape(self, call: _Call, intake: GenerationRequest) -> ReplyFormat:
        created = int(call.created_at.timestamp())
        head = (call.request_id, self._model.name, created, self._model.tokenizer, intake.wanted)
        if call.endpoint == "responses":
            return ResponsesFormat(*head, intake.said)
        if call.endpoint == "chat.completions":
            return ChatFormat(*head, intake.prompts[0], intake.new_tool_parser)
        return CompletionFormat(*head, intake.prompts, intake.echoes, intake.num_choices)

    async def _whole(self, intake: GenerationRequest, call: _Call, reply: WholeReply) -> web.StreamResponse:
        await self._run(intake, call, reply)
        response = await reply.finish(intake.num_choices, intake.best_of)
        self._write_down(call, "ok", 200, None)
        return response

    async def _stream(self, intake: GenerationRequest, call: _Call, reply: StreamReply) -> web.StreamResponse:
        try:
            await self._run(intake, call, reply)
        except ClientGone:
            raise
        except Exception as failure:
            if not reply.has_begun:
                raise
            error = _shown(failure)
            response = await reply.fail(error)
            self._write_down(call, "error", kind_of(error).status, error.message)
            return response
        response = await reply.finish()
        self._write_down(call, "ok", 200, None)
        return response

    async def _run(self, intake: GenerationRequest, call: _Call, reply: TakesPieces) -> None:
        if intake.sampling.max_tokens == 0:  # an echo and nothing else
            await reply.begin()
            for choice in call.choices.all:
                reply.put(choice.index, TextPiece("", (), (), "length"))
            return
        await run_choices(self._relay, call.choices, lambda choice: ChoiceSink(choice, reply))

    def _write_down(self, call: _Call, status: RequestStatus, http_status: int, error: str | None) -> None:
        """One ledger row, the metrics, one line in the log, the end of the span."""
        error = None if error is None else shortened(error, _MAX_ERROR_CHARS)
        choices, usage, gaps_s = call.choices, call.choices.usage, call.choices.gaps_s
        first = choices.all[0] if choices.all else None
        outlook = first.progress if first and not call.is_refused else call.outlook
        row = RequestRow(
            request_id=call.request_id,
            created_at=call.created_at,
            model=self._model.name,
            endpoint=call.endpoint,
            status=status,
            http_status=http_status,
            error=error,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            output_tokens=usage.completion_tokens,
            finish_reason=first and first.text.finish_reason,
            prefill_worker=first and first.progress.prefill_worker,
            decode_worker=first and first.progress.decode_worker,
            queue_s=first and first.progress.queue_s,
            ttft_s=choices.ttft_s,
            mean_tbt_s=sum(gaps_s) / len(gaps_s) if gaps_s else None,
            max_tbt_s=max(gaps_s, default=None),
            e2e_s=self._clock() - call.arrived_s,
            num_retries=choices.num_retries,
            qos_class=outlook.qos_class,
            predicted_ttft_s=outlook.predicted_ttft_s,
            predicted_tbt_s=outlook.predicted_tbt_s,
            num_outputs=len(choices.all),
            prefill_s=first and first.progress.prefill_s,
            predicted_queue_s=first and first.progress.predicted_queue_s,
            predicted_prefill_s=first and first.progress.predicted_prefill_s,
            refused_unread=call.refused_unread,
        )
        end_request(call.span, row, call.refusal)
        self._ledger.record(row)
        self._count(row, gaps_s)
        self._observations.note_ended(row, choices, gaps_s, call.refusal, self._clock())
        fields = {**row.as_dict(), "created_at": call.created_at.isoformat()}
        log.info("request.ended", extra={**fields, "labels": shortened(json.dumps(call.labels))})

    def _count(self, row: RequestRow, gaps_s: Sequence[float]) -> None:
        metrics = self._metrics
        metrics.requests.labels(row.endpoint, row.status, str(row.http_status)).inc()
        metrics.retries.inc(row.num_retries)
        metrics.output_tokens.inc(row.output_tokens)
        if row.ttft_s is not None:
            metrics.prompt_tokens.inc(row.prompt_tokens)
            metrics.cached_tokens.inc(row.cached_tokens)
            metrics.ttft_seconds.observe(row.ttft_s)
        for gap_s in gaps_s:
            metrics.tbt_seconds.observe(gap_s)
        if row.mean_tbt_s is not None:
            metrics.tpot_seconds.observe(row.mean_tbt_s)
        if row.queue_s is not None:
            metrics.queue_seconds.observe(row.queue_s)
        if row.status == "ok":
            metrics.e2e_seconds.observe(row.e2e_s)


def _shown(failure: Exception) -> HalfmoonError:
    """The error as a client may see it; the text of an unknown one stays in the log."""
    if isinstance(failure, HalfmoonError):
        return failure
    log.error("request.failed", exc_info=failure)
    return HalfmoonError("internal error: see the gateway's log")
