"""The OpenAPI document at /openapi.json, generated from the schemas that validate the bodies."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import models_json_schema

from halfmoon import __version__
from services.gateway.http.rate_limits import LIMIT_HEADERS
from services.gateway.http.request_ids import HEADER, IDEMPOTENCY_HEADER, LAST_EVENT_HEADER
from services.gateway.openai.document.parameter_table import ENDPOINTS

_REF = "#/components/schemas/{model}"
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "the parameter that is wrong"},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_REFUSALS = {
    "400": "a parameter is wrong or not supported; `param` names it",
    "401": "the API key is missing or unknown",
    "404": "the model is not served here",
    "408": "the body did not come in time",
    "409": "the request was repeated, and its answer goes on there",
    "413": "the body is too large",
    "415": "the Content-Encoding is not supported",
    "422": "the Idempotency-Key came with another body a moment ago",
    "429": "there is no capacity; Retry-After says when to come back",
    "503": "no worker is there, or the gateway stops",
    "504": "the request took too long",
}
_READS = {
    "/v1/models": "The served model",
    "/health": "Whether a request could be placed now",
    "/ping": "The same as /health",
    "/v1/files": "The tenant's files",
    "/v1/batches": "The tenant's batches",
    "/version": "The gateway's version",
    "/tokenizer_info": "The tokenizer's configuration and the chat template",
    "/server_info": "What the gateway was started with; for operators",
    "/load": "The number of running requests",
    "/halfmoon/v1/cluster": "The workers",
}
_RETRY = frozenset(("429", "503"))
_SENT = {
    IDEMPOTENCY_HEADER: "the client's id of this request: a repeat of it gets the rest of the same answer",
    HEADER: "the request's name in logs and answers, and its id if there is no Idempotency-Key",
}
_LAST_EVENT = {LAST_EVENT_HEADER: "in the repeat of a stream: the id of the last event that the client has"}
_STREAMING = frozenset(("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"))


def openapi_document() -> dict[str, Any]:
    """The document, in OpenAPI 3.1."""
    _, definitions = models_json_schema(
        [(schema, "validation") for schema in ENDPOINTS.values()], ref_template=_REF, title=None
    )
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Halfmoon",
            "version": __version__,
            "description": "Disaggregated serving of language models",
        },
        "paths": {
            path: {
                **({"post": _post(path)} if path in ENDPOINTS else {}),
                **({"get": _get(path)} if path in _READS else {}),
            }
            for path in (*ENDPOINTS, *_READS)
        },
        "components": {
            "schemas": {**definitions.get("$defs", {}), "Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _post(path: str) -> dict[str, Any]:
    schema = {"$ref": _REF.format(model=ENDPOINTS[path].__name__)}
    answer: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if path in _STREAMING:
        answer["text/event-stream"] = {}  # a schema would be one of each event
    return {
        "summary": ENDPOINTS[path].__doc__,
        "parameters": [
            {"name": name, "in": "header", "description": text, "schema": {"type": "string"}}
            for name, text in (_SENT | _LAST_EVENT if path in _STREAMING else {HEADER: _SENT[HEADER]}).items()
        ],
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {
            "200": {"description": "the answer", "content": answer, "headers": _headers(HEADER, *LIMIT_HEADERS)},
            **_refusals(*_REFUSALS),
        },
    }


def _get(path: str) -> dict[str, Any]:
    answer = {"description": _READS[path], "content": {"application/json": {"schema": {"type": "object"}}}}
    unwell = {"503": answer} if path in ("/health", "/ping") else _refusals("401")
    return {"summary": _READS[path], "responses": {"200": answer, **unwell}}


def _refusals(*statuses: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": _REF.format(model="Error")}}}
    return {
        status: {
            "description": _REFUSALS[status],
            "content": content,
            "headers": _headers(HEADER, *(("Retry-After", *LIMIT_HEADERS) if status in _RETRY else ())),
        }
        for status in statuses
    }


def _headers(*names: str) -> dict[str, Any]:
    """Headers that a response may have; those of limits only for tenants with limits."""
    return {name: {"schema": {"type": "string"}} for name in names}
