"""The OpenAPI document at /openapi.json, generated from the schemas that validate the bodies."""

from __future__ import annotations

import re
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
    "404": "the model is not served here, or there is nothing of this id",
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
    "/metrics": "Metrics for Prometheus",
    "/halfmoon/v1/cluster": "The workers",
}
_KEPT = {
    "/v1/models/{model_id}": {"get": "One of the served models"},
    "/v1/responses/{response_id}": {
        "get": "A kept response",
        "delete": "Deletes a kept response; one in the background ends",
    },
    "/v1/responses/{response_id}/input_items": {"get": "The items of a response's own turn"},
    "/v1/responses/{response_id}/cancel": {"post": "Ends a background response"},
    "/v1/files/{file_id}": {"get": "A file", "delete": "Deletes a file that no batch reads"},
    "/v1/files/{file_id}/content": {"get": "A file's bytes"},
    "/v1/batches/{batch_id}": {"get": "A batch"},
    "/v1/batches/{batch_id}/cancel": {"post": "Ends a batch; results so far become files"},
}
_Query = dict[str, tuple[str, dict[str, Any]]]  # description and schema of each parameter
_LIMIT: dict[str, Any] = {"type": "integer", "minimum": 1, "maximum": 100}
_ORDER: dict[str, Any] = {"type": "string", "enum": ["asc", "desc"]}
_PAGE: _Query = {
    "limit": ("at most so many", _LIMIT),
    "order": ("by age; desc: the newest first", _ORDER),
    "after": ("the id that the page before ended with", {"type": "string"}),
}
_QUERIES: dict[str, _Query] = {
    "/v1/files": {
        **_PAGE,
        "limit": ("at most so many", _LIMIT | {"maximum": 10_000}),
        "purpose": ("only files of this purpose", {"type": "string"}),
    },
    "/v1/batches": _PAGE,
    "/v1/responses/{response_id}": {
        "stream": ("the events of a background response", {"type": "boolean"}),
        "starting_after": ("only events after this number", {"type": "integer", "minimum": 0, "maximum": 10**9 - 1}),
    },
    "/v1/responses/{response_id}/input_items": _PAGE,
    "/reset_prefix_cache": {"reset_external": ("stores, too", {"type": "boolean"})},
}
_MEDIA = {"/metrics": "text/plain", "/v1/files/{file_id}/content": "application/octet-stream"}
_FORM = {
    "type": "object",
    "required": ["purpose", "file"],
    "properties": {
        "purpose": {"type": "string", "enum": ["batch"]},
        "file": {"type": "string", "format": "binary", "description": "JSON lines, one request each"},
        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "description": "the file's age limit"},
    },
}
_RETRY = frozenset(("429", "503"))
_SENT = {
    IDEMPOTENCY_HEADER: "the client's id of this request: a repeat of it gets the rest of the same answer",
    HEADER: "the request's name in logs and answers, and its id if there is no Idempotency-Key",
}
_LAST_EVENT = {LAST_EVENT_HEADER: "in the repeat of a stream: the id of the last event that the client has"}
_PROBES = ("/health", "/ping")
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
        }
        | _others(),
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
    answer = _answer(path, _READS[path])
    if path in _PROBES:
        return {"summary": _READS[path], "responses": {"200": answer, "503": answer}}
    if path == "/metrics":  # without a key
        return _bodiless(path, _READS[path])
    return _bodiless(path, _READS[path], *(("400", "401", "503") if path in _QUERIES else ("401",)))


def _others() -> dict[str, Any]:
    """What takes no JSON: items by their ids, the upload of files, emptying the caches."""
    kept = {
        path: {method: _bodiless(path, summary, "400", "401", "404", "503") for method, summary in methods.items()}
        for path, methods in _KEPT.items()
    }
    upload = _bodiless("/v1/files", "Uploads a file", "400", "401", "408", "413", "429", "503")
    upload |= {
        "parameters": [],
        "requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}},
    }
    empty = _bodiless("/reset_prefix_cache", "Empties the workers' prefix caches; for operators", "400", "401")
    return {
        "/v1/files": {"get": _get("/v1/files"), "post": upload},
        "/ping": {"get": _get("/ping"), "post": _get("/ping")},
        "/reset_prefix_cache": {"post": empty},
        **kept,
    }


def _bodiless(path: str, summary: str, *statuses: str) -> dict[str, Any]:
    parameters = [
        {"name": name, "in": "path", "required": True, "description": "its id", "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", path)
    ]
    parameters += [
        {"name": name, "in": "query", "description": text, "schema": schema}
        for name, (text, schema) in _QUERIES.get(path, {}).items()
    ]
    responses = {"200": _answer(path, summary), **_refusals(*statuses)}
    return {"summary": summary, **({"parameters": parameters} if parameters else {}), "responses": responses}


def _answer(path: str, text: str) -> dict[str, Any]:
    media = _MEDIA.get(path)
    content = {"application/json": {"schema": {"type": "object"}}} if media is None else {media: {}}
    return {"description": text, "content": content}


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
