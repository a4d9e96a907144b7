"""The error tree in the shape of the OpenAI API: `{"error": {"message", "type", "param", "code"}}`.

Under /v1/messages it has that of Anthropic's.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from aiohttp import web

from halfmoon.errors import (
    Cancelled,
    DeadlineExceeded,
    HalfmoonError,
    InvalidRequest,
    NoCapacity,
    NotFound,
    Unavailable,
    UnknownModel,
)
from halfmoon.ledger.edits.stored_classes import LaterRelease, VersionConflict
from halfmoon.policy.admission.refusal import Refused
from halfmoon.policy.placement.place import ContextLengthExceeded
from services.gateway.cluster.token_router import TakenOver
from services.gateway.cluster.worker_changes import ChangeRefused
from services.gateway.http.api_keys import WrongKey
from services.gateway.http.browser_guard import ForeignHost, ForeignOrigin, NotJson
from services.gateway.http.rate_limits import RateLimited
from services.gateway.http.request_ids import ReusedKey

_MAX_CHARS = 200


class PreviousNotFound(NotFound):
    """The response that a request goes on from is not there."""


class HttpKind(NamedTuple):
    """Status, type and code of one class of errors."""

    status: int
    type: str
    code: str | None


_KINDS: dict[type[HalfmoonError], HttpKind] = {
    ContextLengthExceeded: HttpKind(400, "invalid_request_error", "context_length_exceeded"),
    WrongKey: HttpKind(401, "authentication_error", "invalid_api_key"),
    ForeignHost: HttpKind(421, "invalid_request_error", "host_not_allowed"),
    ForeignOrigin: HttpKind(403, "invalid_request_error", "origin_not_allowed"),
    NotJson: HttpKind(415, "invalid_request_error", "unsupported_media_type"),
    ReusedKey: HttpKind(422, "invalid_request_error", "idempotency_key_reused"),
    TakenOver: HttpKind(409, "invalid_request_error", "repeated_elsewhere"),
    InvalidRequest: HttpKind(400, "invalid_request_error", None),
    UnknownModel: HttpKind(404, "invalid_request_error", "model_not_found"),
    PreviousNotFound: HttpKind(404, "invalid_request_error", "previous_response_not_found"),
    NotFound: HttpKind(404, "invalid_request_error", "not_found"),
    Refused: HttpKind(429, "rate_limit_error", "slo_would_be_missed"),
    ChangeRefused: HttpKind(409, "invalid_request_error", "worker_change_refused"),
    VersionConflict: HttpKind(409, "invalid_request_error", "version_conflict"),
    LaterRelease: HttpKind(409, "invalid_request_error", "of_a_later_release"),
    NoCapacity: HttpKind(429, "rate_limit_error", "no_capacity"),
    Unavailable: HttpKind(503, "service_unavailable_error", "unavailable"),
    Cancelled: HttpKind(503, "service_unavailable_error", "cancelled"),
    DeadlineExceeded: HttpKind(504, "timeout_error", "deadline_exceeded"),
    HalfmoonError: HttpKind(500, "server_error", "internal_error"),
}


_HTTP_CODES = {
    404: "not_found",
    405: "method_not_allowed",
    408: "body_too_slow",
    413: "body_too_large",
    415: "unsupported_encoding",
    417: "unknown_expectation",
}


_ANTHROPIC_PATH = "/v1/messages"
_ANTHROPIC_TYPES = {
    "invalid_request_error": "invalid_request_error",
    "authentication_error": "authentication_error",
    "rate_limit_error": "rate_limit_error",
    "rate_limit_exceeded": "rate_limit_error",
    "service_unavailable_error": "overloaded_error",
    "timeout_error": "timeout_error",
    "body_too_large": "request_too_large",
    "not_found": "not_found_error",
    "model_not_found": "not_found_error",
    "origin_not_allowed": "permission_error",
}
"""By OpenAI's code, or else type."""


def kind_of(error: HalfmoonError) -> HttpKind:
    """Status, type and code of an error: those of its nearest ancestor in the table."""
    if isinstance(error, RateLimited):
        return HttpKind(429, error.limit, "rate_limit_exceeded")
    return next(_KINDS[cls] for cls in type(error).__mro__ if cls in _KINDS)


def error_body(error: HalfmoonError) -> dict[str, Any]:
    """The JSON of an error, for a response or for an event of a stream."""
    kind = kind_of(error)
    body: dict[str, Any] = {"message": error.message, "type": kind.type, "param": error.param, "code": kind.code}
    if isinstance(error, Refused):
        body |= {"reason": error.reason, "qos_class": error.qos_class, **_figures(error)}
    return {"error": body}


def _figures(refusal: Refused) -> dict[str, float | None]:
    """The predictions, the class's targets, and those targets as feedback has tightened them."""
    return {
        "predicted_ttft_s": refusal.ttft_s,
        "predicted_tbt_s": refusal.tbt_s,
        "target_ttft_s": refusal.targets.ttft_s,
        "target_tbt_s": refusal.targets.tbt_s,
        "applied_ttft_s": refusal.applied.ttft_s,
        "applied_tbt_s": refusal.applied.tbt_s,
    }


def anthropic_error(body: dict[str, Any]) -> dict[str, Any]:
    """An error in OpenAI's shape, in Anthropic's. Other fields than the message stay beside it."""
    fields = dict(body["error"])
    kind = _ANTHROPIC_TYPES.get(fields["code"] or "") or _ANTHROPIC_TYPES.get(fields["type"], "api_error")
    return {"type": "error", "error": {**fields, "type": kind}}


def _shaped(body: dict[str, Any], request: web.Request | None) -> dict[str, Any]:
    path = "" if request is None else request.path
    return anthropic_error(body) if path == _ANTHROPIC_PATH or path.startswith(f"{_ANTHROPIC_PATH}/") else body


def error_response(error: HalfmoonError, request: web.Request) -> web.Response:
    """The response for an error, with Retry-After in whole seconds if the error says when to come back."""
    headers = {"WWW-Authenticate": "Bearer"} if isinstance(error, WrongKey) else {}
    if isinstance(error, TakenOver):
        headers["X-Should-Retry"] = "false"  # to OpenAI's clients, which would take the answer back
    if error.retry_after_ms is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_ms / 1000)))
    return web.json_response(_shaped(error_body(error), request), status=kind_of(error).status, headers=headers)


def http_error_response(error: web.HTTPException, request: web.Request | None = None) -> web.Response:
    """The response for one of aiohttp's own errors (no such path, wrong method, body too large, not HTTP at all)."""
    messages = {
        404: "there is nothing at this address",
        405: "this address does not take this method",
        417: "the only expectation that is known here is 100-continue; leave the header Expect out",
    }
    message = messages.get(error.status, error.text)
    code = _HTTP_CODES.get(error.status)
    type_name = "invalid_request_error" if error.status < 500 else "server_error"
    body = {"error": {"message": message, "type": type_name, "param": None, "code": code}}
    allow = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
    return web.json_response(_shaped(body, request), status=error.status, headers=allow)


def shortened(text: str, max_chars: int = _MAX_CHARS) -> str:
    """Cuts a client's own text for an error, a log line or a ledger row."""
    return text if len(text) <= max_chars else text[:max_chars] + "…"
