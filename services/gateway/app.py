"""The HTTP application: routes, request ids, and every error in the shape of its API."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from halfmoon.errors import HalfmoonError, InvalidRequest
from halfmoon.rpc.context import request_scope
from services.gateway.batches.batch_endpoints import BatchEndpoints
from services.gateway.batches.file_endpoints import FileEndpoints
from services.gateway.control.active_admission import AdmissionEndpoint
from services.gateway.control.autopilot_endpoints import AutopilotEndpoints
from services.gateway.control.class_endpoints import ClassEndpoints
from services.gateway.control.console_endpoints import ConsoleEndpoints
from services.gateway.control.live_workload import WorkloadEndpoint
from services.gateway.control.operator_endpoints import OperatorEndpoints
from services.gateway.control.status_endpoints import ControlEndpoints
from services.gateway.control.tenant_endpoints import TenantEndpoints
from services.gateway.control.worker_endpoints import WorkerEndpoints
from services.gateway.generation_endpoints import GenerationEndpoints
from services.gateway.http.api_keys import ApiKeys
from services.gateway.http.browser_guard import BrowserGuard
from services.gateway.http.cors import Cors
from services.gateway.http.error_responses import error_response, http_error_response
from services.gateway.http.ignored_parameters import mark_ignored
from services.gateway.http.operator_access import OperatorAccess
from services.gateway.http.rate_limits import RateLimits
from services.gateway.http.request_ids import HEADER, assign_request_id, request_id_of
from services.gateway.openai.tokenizer_endpoints import TokenizerEndpoints
from services.gateway.replies.sse_body import ClientGone
from services.gateway.responses.response_endpoints import ResponseEndpoints
from services.gateway.telemetry.load_header import LoadHeader

log = logging.getLogger(__name__)


_OF_OTHER_MODELS = ("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank", "/classify", "/pooling")


async def _refuse(request: web.Request) -> web.StreamResponse:
    why = "language models are served here, which have no head for scores or classes"
    raise InvalidRequest(f"{request.path}: {why}; compare what /v1/embeddings returns")


@dataclass(frozen=True, slots=True)
class Access:
    """Which clients may send what."""

    keys: ApiKeys
    limits: RateLimits
    operators: OperatorAccess
    cors: Cors
    browsers: BrowserGuard
    max_body_bytes: int


@dataclass(frozen=True, slots=True)
class Endpoints:
    """The handlers of all routes."""

    generation: GenerationEndpoints
    responses: ResponseEndpoints
    files: FileEndpoints
    batches: BatchEndpoints
    tokenizer: TokenizerEndpoints
    control: ControlEndpoints
    operators: OperatorEndpoints
    workers: WorkerEndpoints
    classes: ClassEndpoints
    tenants: TenantEndpoints
    admission: AdmissionEndpoint
    autopilot: AutopilotEndpoints
    console: ConsoleEndpoints
    workload: WorkloadEndpoint
    load_header: LoadHeader


def make_app(endpoints: Endpoints, access: Access) -> web.Application:
    """The application with all routes of the gateway."""
    app = web.Application(middlewares=[_outermost(access)], client_max_size=access.max_body_bytes)
    app.on_response_prepare.append(_name_request)
    app.on_response_prepare.append(access.cors.mark)
    app.on_response_prepare.append(access.limits.mark)
    app.on_response_prepare.append(mark_ignored)
    app.on_response_prepare.append(endpoints.load_header.mark)
    generation, tokenizer, control = endpoints.generation, endpoints.tokenizer, endpoints.control
    app.router.add_post("/v1/chat/completions", generation.chat)
    app.router.add_post("/v1/completions", generation.completions)
    app.router.add_post("/v1/responses", generation.responses)
    kept = endpoints.responses
    app.router.add_get("/v1/responses/{response_id}", kept.get)
    app.router.add_delete("/v1/responses/{response_id}", kept.delete)
    app.router.add_get("/v1/responses/{response_id}/input_items", kept.input_items)
    app.router.add_post("/v1/responses/{response_id}/cancel", kept.cancel)
    app.router.add_route("*", "/v1/conversations{rest:.*}", kept.refuse_conversations)
    files, batches = endpoints.files, endpoints.batches
    app.router.add_post("/v1/files", files.upload)
    app.router.add_get("/v1/files", files.list)
    app.router.add_get("/v1/files/{file_id}", files.get)
    app.router.add_get("/v1/files/{file_id}/content", files.content)
    app.router.add_delete("/v1/files/{file_id}", files.delete)
    app.router.add_post("/v1/batches", batches.create)
    app.router.add_get("/v1/batches", batches.list)
    app.router.add_get("/v1/batches/{batch_id}", batches.get)
    app.router.add_post("/v1/batches/{batch_id}/cancel", batches.cancel)
    app.router.add_post("/v1/messages", generation.messages)
    app.router.add_post("/v1/messages/count_tokens", tokenizer.count)
    app.router.add_post("/v1/embeddings", generation.embeddings)
    for path in _OF_OTHER_MODELS:
        app.router.add_post(path, _refuse)
    app.router.add_post("/tokenize", tokenizer.tokenize)
    app.router.add_post("/detokenize", tokenizer.detokenize)
    app.router.add_get("/v1/models", control.models)
    app.router.add_get("/v1/models/{model_id:.+}", control.model)
    app.router.add_get("/tokenizer_info", tokenizer.info)
    app.router.add_get("/openapi.json", control.openapi)
    app.router.add_get("/docs", control.docs)
    app.router.add_get("/health", control.health)
    app.router.add_get("/ping", control.health)
    app.router.add_post("/ping", control.health)
    app.router.add_get("/version", control.version)
    app.router.add_get("/load", control.load)
    app.router.add_get("/metrics", control.metrics)
    app.router.add_get("/server_info", endpoints.operators.server_info)
    app.router.add_post("/reset_prefix_cache", endpoints.operators.reset_prefix_cache)
    app.router.add_get("/halfmoon/v1/cluster", control.cluster)
    app.router.add_get("/halfmoon/v1/requests", control.requests)
    workers = endpoints.workers
    app.router.add_post("/halfmoon/v1/workers/{name}/drain", workers.drain)
    app.router.add_post("/halfmoon/v1/workers/{name}/role", workers.role)
    app.router.add_get("/halfmoon/v1/worker_changes", workers.changes)
    console, classes, admission = endpoints.console, endpoints.classes, endpoints.admission
    app.router.add_get("/halfmoon/v1/requests/{request_id}", console.request)
    app.router.add_get("/halfmoon/v1/series", console.series)
    app.router.add_get("/halfmoon/v1/placements", console.placements)
    app.router.add_get("/halfmoon/v1/cache", console.cache)
    app.router.add_get("/halfmoon/v1/stores", console.stores)
    app.router.add_get("/halfmoon/v1/class_edits", console.class_edits)
    app.router.add_post("/halfmoon/v1/class_previews/{name}", console.class_preview)
    app.router.add_get("/halfmoon/v1/workload", endpoints.workload.workload)
    app.router.add_get("/halfmoon/v1/admission", admission.get)
    app.router.add_put("/halfmoon/v1/admission", admission.put)
    autopilot, tenants = endpoints.autopilot, endpoints.tenants
    app.router.add_get("/halfmoon/v1/autopilot", autopilot.get)
    app.router.add_put("/halfmoon/v1/autopilot", autopilot.put)
    app.router.add_post("/halfmoon/v1/autopilot/observation", autopilot.observe)
    app.router.add_get("/halfmoon/v1/tenants", tenants.list)
    app.router.add_put("/halfmoon/v1/tenants/{name}", tenants.put)
    app.router.add_delete("/halfmoon/v1/tenants/{name}", tenants.delete)
    app.router.add_post("/halfmoon/v1/tenants/{name}/keys", tenants.add_key)
    app.router.add_delete("/halfmoon/v1/tenants/{name}/keys/{key_id}", tenants.revoke_key)
    app.router.add_get("/halfmoon/v1/classes", classes.list)
    app.router.add_put("/halfmoon/v1/classes/{name}", classes.put)
    app.router.add_delete("/halfmoon/v1/classes/{name}", classes.delete)
    return app


def _outermost(access: Access) -> Middleware:
    @web.middleware
    async def outermost(request: web.Request, handler: Handler) -> web.StreamResponse:
        with request_scope(assign_request_id(request)):
            try:
                access.browsers.check_host(request)
                preflight = access.cors.preflight(request)
                if preflight is not None:
                    return preflight
                access.browsers.check_write(request)
                (access.operators if access.operators.governs(request) else access.keys).check(request)
                return await handler(request)
            except ClientGone:
                return web.Response(status=499)  # never read
            except HalfmoonError as error:
                return _ended(request, error_response(error, request))
            except web.HTTPException as error:
                return _ended(request, http_error_response(error, request))
            except Exception:
                log.exception("http.failed", extra={"path": request.path})
                unknown = HalfmoonError("internal error: see the gateway's log")
                return _ended(request, error_response(unknown, request))

    return outermost


def _ended(request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
    """The response to a request that failed. One that has begun is cut off: nothing may follow a part of it."""
    if not request.writer.output_size:
        return response
    log.warning("http.cut", extra={"path": request.path, "status": response.status})
    if request.transport is not None:
        request.transport.abort()
    return web.Response(status=499)  # never read


async def _name_request(request: web.Request, response: web.StreamResponse) -> None:
    response.headers[HEADER] = request_id_of(request)
