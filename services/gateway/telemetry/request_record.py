"""The record of one request: its ledger row, its metrics, its line in the log and the end of its span."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime

from aiohttp import web

from halfmoon.errors import HalfmoonError, InvalidRequest, NoCapacity, NotFound, Unavailable
from halfmoon.ledger.ledger import Ledger
from halfmoon.ledger.models import RequestRow, RequestStatus
from halfmoon.policy.admission.refusal import Refused
from halfmoon.rpc.telemetry.spans import Tracer
from services.gateway.detached_request import DetachedRequest
from services.gateway.http.api_keys import tenant_of
from services.gateway.http.error_responses import kind_of, shortened
from services.gateway.http.rate_limits import RateLimited, RateLimits
from services.gateway.http.request_ids import request_id_of
from services.gateway.request import GatewayRequest
from services.gateway.telemetry.label_digests import LabelDigests
from services.gateway.telemetry.metrics import GatewayMetrics
from services.gateway.telemetry.recent_telemetry import BAD_REQUEST, RATE_LIMIT, RecentTelemetry
from services.gateway.telemetry.request_span import begin_span, end_span

log = logging.getLogger(__name__)

_MAX_ERROR_CHARS = 1_000  # in the ledger and in the log
_REJECTIONS = (InvalidRequest, NotFound, NoCapacity, Unavailable)


class RequestRecorder:
    """Records every request to generate, once. Owns nothing."""

    def __init__(
        self,
        model_name: str,
        ledger: Ledger,
        metrics: GatewayMetrics,
        telemetry: RecentTelemetry,
        tracer: Tracer,
        limits: RateLimits,
        labels: LabelDigests,
    ) -> None:
        self._model_name = model_name
        self._ledger = ledger
        self._metrics = metrics
        self._telemetry = telemetry
        self._tracer = tracer
        self._limits = limits
        self._labels = labels

    def begin(self, http_request: web.Request, endpoint: str) -> GatewayRequest:
        """The request that has just arrived, with its span."""
        request_id, now_s = request_id_of(http_request), time.monotonic()
        span = begin_span(self._tracer, http_request, endpoint, request_id, self._model_name, now_s)
        return GatewayRequest(request_id, endpoint, datetime.now(UTC), now_s, span, tenant_of(http_request))

    def begin_detached(self, detached: DetachedRequest) -> GatewayRequest:
        """A request that no connection waits for, with its span."""
        now_s = time.monotonic()
        request_id, endpoint, model = detached.request_id, detached.endpoint, self._model_name
        span = begin_span(self._tracer, None, endpoint, request_id, model, now_s)
        request = GatewayRequest(request_id, endpoint, datetime.now(UTC), now_s, span, detached.tenant)
        request.qos, request.is_metered = detached.qos, detached.is_metered
        return request

    def in_flight(self) -> AbstractContextManager[object]:
        """Counts a request as running inside the block."""
        return self._metrics.in_flight.track_inprogress()

    def fail(self, request: GatewayRequest, error: HalfmoonError) -> None:
        """Records a request that an error ended before its response began."""
        if isinstance(error, Refused):
            request.refusal = error
            self._metrics.refusals.labels(error.qos_class, error.reason).inc()
        if isinstance(error, RateLimited):
            self._metrics.tenants.count_limited(request.tenant.name, error.limit)
        is_rejected = isinstance(error, _REJECTIONS) and request.ttft_s is None
        status: RequestStatus = "rejected" if is_rejected else "error"
        self.end(request, status, kind_of(error).status, error.message, reason=_reason(error))

    def end(
        self,
        request: GatewayRequest,
        status: RequestStatus = "ok",
        http_status: int = 200,
        error: str | None = None,
        *,
        reason: str = BAD_REQUEST,
    ) -> None:
        """Records a request that ended; `reason` says in a word why it was rejected, if it was.

        A repeat of a request that is in the ledger only gets a line in the log: it has cost nothing.
        """
        if request.is_recorded:
            self.leave(request, "request.replayed")
            return
        shared_s, now_s = request.shared_gaps_s, time.monotonic()
        error = None if error is None else shortened(error, _MAX_ERROR_CHARS)
        row = request_row(request, request.model or self._model_name, status, http_status, error, request.gaps_s, now_s)
        end_span(request.span, row, reason)
        num_used = 0 if status == "rejected" else row.prompt_tokens + row.output_tokens
        if request.is_metered:
            self._limits.correct_tokens(request.tenant, num_used - request.num_expected_tokens)
        self._ledger.record(row)
        self._count(row, shared_s)
        self._metrics.vllm_requests.observe(request, row)
        self._telemetry.note_ended(request, row, shared_s, reason, now_s)
        fields = {**row.as_dict(), "created_at": request.created_at.isoformat()}
        log.info("request.ended", extra={**fields, "labels": self._labels.of(request.generation.labels)})

    def postpone(self, request: GatewayRequest) -> None:
        """Notes a request that will be run again: it has cost nothing so far."""
        if request.is_metered:
            self._limits.correct_tokens(request.tenant, -request.num_expected_tokens)
        request.span.end(time.monotonic())
        log.debug("request.waits", extra={"request_id": request.request_id})

    def leave(self, request: GatewayRequest, event: str = "request.left") -> None:
        """Notes a request that another connection will record, or has recorded."""
        request.span.end(time.monotonic())
        log.info(event, extra={"request_id": request.request_id})

    def _count(self, row: RequestRow, gaps_s: Sequence[float]) -> None:
        metrics = self._metrics
        metrics.requests.labels(row.endpoint, row.status, str(row.http_status)).inc()
        metrics.tenants.count(row)
        metrics.retries.inc(row.num_retries)
        metrics.output_tokens.inc(row.output_tokens)
        metrics.draft_tokens.inc(row.num_drafts or 0)
        metrics.right_draft_tokens.inc(row.num_right_drafts or 0)
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


def request_row(
    request: GatewayRequest,
    model: str,
    status: RequestStatus,
    http_status: int,
    error: str | None,
    gaps_s: Sequence[float],
    now_s: float,
) -> RequestRow:
    """The ledger row. Worker, queue and predictions are those of the first output; of a refused request the
    predictions are those that it was refused by."""
    usage, refusal = request.usage(), request.refusal
    passed = request.passed
    first = request.outputs[0] if request.by_prompt and passed is None else None
    progress = None if first is None else first.progress
    qos_class: str | None
    predicted: tuple[float | None, float | None]
    if passed is not None:
        qos_class, predicted = request.qos.name, (passed.predicted_ttft_s, passed.predicted_tbt_s)
    elif progress is not None and refusal is None:
        qos_class, predicted = progress.qos_class, (progress.predicted_ttft_s, progress.predicted_tbt_s)
    else:
        qos_class = request.qos.name if request.needs_workers else None
        predicted = (refusal.ttft_s, refusal.tbt_s) if refusal is not None else (None, None)
    return RequestRow(
        request_id=request.request_id,
        created_at=request.created_at,
        model=model,
        endpoint=request.endpoint,
        status=status,
        http_status=http_status,
        error=error,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        output_tokens=usage.completion_tokens,
        finish_reason=first and first.text.finish_reason,
        prefill_worker=progress and progress.prefill_worker,
        decode_worker=progress and progress.decode_worker,
        queue_s=progress and progress.queue_s,
        ttft_s=request.ttft_s,
        mean_tbt_s=sum(gaps_s) / len(gaps_s) if gaps_s else None,
        max_tbt_s=max(gaps_s, default=None),
        e2e_s=now_s - request.arrived_s,
        num_retries=request.num_retries,
        qos_class=qos_class,
        predicted_ttft_s=predicted[0],
        predicted_tbt_s=predicted[1],
        num_outputs=len(request.outputs),
        prefill_s=progress and progress.prefill_s,
        predicted_queue_s=progress and progress.predicted_queue_s,
        predicted_prefill_s=progress and progress.predicted_prefill_s,
        refused_unread=refusal is not None and refusal.is_early,
        tenant=request.tenant.name or None,
        peer=passed and passed.peer,
        num_drafts=usage.num_drafts,
        num_right_drafts=usage.num_right_drafts,
    )


def _reason(error: HalfmoonError) -> str:
    """Why a request was rejected, in a word."""
    if isinstance(error, Refused):
        return error.reason
    if isinstance(error, RateLimited):
        return RATE_LIMIT
    if isinstance(error, NoCapacity):
        return "no room"
    return "no worker" if isinstance(error, Unavailable) else BAD_REQUEST
