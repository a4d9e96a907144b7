"""The span of one HTTP request, from its arrival to its last byte, by OpenTelemetry's GenAI conventions.

Attributes that the conventions do not name are `halfmoon.*`. The conventions are in development:
https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/
"""

from __future__ import annotations

from aiohttp import web

from halfmoon.ledger.models import RequestRow
from halfmoon.rpc.telemetry.spans import Span, Tracer

_OPERATIONS = {
    "chat.completions": "chat",
    "completions": "text_completion",
    "responses": "chat",
    "messages": "chat",
    "embeddings": "embeddings",
}


def begin_span(
    tracer: Tracer, request: web.Request | None, endpoint: str, request_id: str, model: str, arrived_s: float
) -> Span:
    """Opens the span of a request, in the client's trace if its headers name one (W3C traceparent).

    Without `request` nobody waits for it.
    """
    operation = _OPERATIONS[endpoint]
    attributes = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "halfmoon",
        "gen_ai.request.model": model,
        "halfmoon.request_id": request_id,
    }
    if request is not None:
        attributes |= {"http.request.method": request.method, "url.path": request.path}
    headers = {} if request is None else request.headers
    return tracer.request(f"{operation} {model}", headers, arrived_s, attributes)


def end_span(span: Span, row: RequestRow, reason: str) -> None:
    """Ends the span, with the figures of the request's row; `reason` says in a word why it was rejected, if it was."""
    if not span.is_recording:
        return
    attributes: dict[str, str | int | float | list[str]] = {
        "http.response.status_code": row.http_status,
        "gen_ai.response.id": row.request_id,
        "gen_ai.response.model": row.model,
        "gen_ai.usage.input_tokens": row.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": row.cached_tokens,
        "gen_ai.usage.output_tokens": row.output_tokens,
        "halfmoon.status": row.status,
        "halfmoon.num_retries": row.num_retries,
    }
    if row.num_drafts:
        attributes |= {"halfmoon.num_drafts": row.num_drafts, "halfmoon.num_right_drafts": row.num_right_drafts or 0}
    if row.finish_reason is not None:
        attributes["gen_ai.response.finish_reasons"] = [row.finish_reason]
    if row.status != "ok":
        attributes["error.type"] = reason if row.status == "rejected" else row.status
    known = {
        "gen_ai.response.time_to_first_chunk": row.ttft_s,
        "halfmoon.class": row.qos_class,
        "halfmoon.predicted_ttft_s": row.predicted_ttft_s,
        "halfmoon.predicted_tbt_s": row.predicted_tbt_s,
        "halfmoon.mean_tbt_s": row.mean_tbt_s,
    }
    attributes |= {name: value for name, value in known.items() if value is not None}
    span.end(error=None if row.status == "ok" else row.error or row.status, attributes=attributes)
