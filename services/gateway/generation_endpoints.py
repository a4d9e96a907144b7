"""The generating endpoints: one HTTP request from its body to its last byte.

Receive the body; `generation.py` makes an answer of it; send that whole or as a stream; record.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from aiohttp import web

from halfmoon.errors import HalfmoonError
from halfmoon.rpc.telemetry.spans import span_scope
from services.gateway.cluster.token_router import GatewayStopping, TakenOver
from services.gateway.generation import Generation, ReadBody
from services.gateway.http.drain_gate import DrainGate
from services.gateway.http.error_responses import kind_of
from services.gateway.http.ignored_parameters import note_ignored
from services.gateway.http.rate_limits import RateLimits
from services.gateway.http.received_request import receive_body
from services.gateway.http.request_ids import LAST_EVENT_HEADER, is_meant_for_repeats, is_repeatable, repeat_key
from services.gateway.openai.bodies.responses_body import ResponsesBody
from services.gateway.openai.endpoint_bodies import AnyBody, body_digest, is_quickly_parsed
from services.gateway.repeatable import RepeatableRequest
from services.gateway.replies.event_ids import MAX_OUTPUTS, EventIds
from services.gateway.replies.replies import Keep, StreamReply, WholeReply
from services.gateway.replies.sse_body import ClientGone, SSEBody
from services.gateway.request import GatewayRequest
from services.gateway.responses.background import BackgroundResponses
from services.gateway.responses.conversations import Conversations, Turn
from services.gateway.responses.response_endpoints import ResponseEndpoints
from services.gateway.running_repeats import RunningRepeats
from services.gateway.telemetry.request_record import RequestRecorder

log = logging.getLogger(__name__)

_CLIENT_CLOSED = 499  # only the ledger sees it


class GenerationEndpoints:
    """Serves chat completions, completions, responses and messages. Owns nothing."""

    def __init__(
        self,
        generation: Generation,
        recorder: RequestRecorder,
        drain_gate: DrainGate,
        limits: RateLimits,
        repeats: RunningRepeats,
        conversations: Conversations,
        background: BackgroundResponses,
        kept: ResponseEndpoints,
    ) -> None:
        self._generation = generation
        self._recorder = recorder
        self._drain_gate = drain_gate
        self._limits = limits
        self._repeats = repeats
        self._conversations = conversations
        self._background = background
        self._kept = kept

    async def chat(self, http_request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        return await self._recorded(http_request, "chat.completions")

    async def completions(self, http_request: web.Request) -> web.StreamResponse:
        """POST /v1/completions."""
        return await self._recorded(http_request, "completions")

    async def responses(self, http_request: web.Request) -> web.StreamResponse:
        """POST /v1/responses."""
        return await self._recorded(http_request, "responses")

    async def messages(self, http_request: web.Request) -> web.StreamResponse:
        """POST /v1/messages."""
        return await self._recorded(http_request, "messages")

    async def embeddings(self, http_request: web.Request) -> web.StreamResponse:
        """POST /v1/embeddings."""
        return await self._recorded(http_request, "embeddings")

    async def _recorded(self, http_request: web.Request, endpoint: str) -> web.StreamResponse:
        """Serves one request. Records it, however it ends."""
        recorder = self._recorder
        request = recorder.begin(http_request, endpoint)
        try:
            with self._drain_gate.inside(), recorder.in_flight(), span_scope(request.span):
                return await self._serve(http_request, request)
        except HalfmoonError as error:
            if _is_left(request, error):
                recorder.leave(request)
            else:
                recorder.fail(request, error)
            raise
        except (asyncio.CancelledError, ClientGone):
            recorder.end(request, "cancelled", _CLIENT_CLOSED, "the client went away")
            raise
        except web.HTTPException as error:  # the body is too large, or compressed in an unknown way
            recorder.end(request, "rejected", error.status, error.text)
            raise
        except Exception:
            recorder.end(request, "error", 500, "internal error")
            raise

    async def _serve(self, http_request: web.Request, request: GatewayRequest) -> web.StreamResponse:
        self._limits.take_request(request.tenant)
        raw = await receive_body(http_request)
        body, ignored = await self._generation.parse(request, raw)
        note_ignored(http_request, ignored)
        self._generation.identify(request, body, http_request.headers)
        if is_repeatable(http_request):
            request.repeat = await self._repeatable(http_request, request, body, raw)
        read, keep = ReadBody(body, len(raw)), None
        if isinstance(body, ResponsesBody):
            turn = await self._conversations.begin(request, body, len(raw))
            if body.background:
                return await self._in_background(http_request, request, turn, body)
            read = ReadBody(turn.body, turn.num_bytes)
            keep = partial(self._conversations.keep, turn, request.tenant.name) if turn.is_kept else None
        answer = partial(self._answer, http_request, request, read, keep)
        if request.repeat is None:
            return await answer()
        return await self._repeats.run(request.repeat, answer, lambda: request.ttft_s is not None)

    async def _in_background(
        self, http_request: web.Request, request: GatewayRequest, turn: Turn, body: ResponsesBody
    ) -> web.StreamResponse:
        """Leaves a response to the background, whose run of it is recorded; follows its events if asked to."""
        response = await self._background.submit(request, turn, body)
        self._recorder.leave(request, "request.queued")
        if not body.stream:
            return web.json_response(response)
        return await self._kept.stream_new(http_request, turn.response_id)

    async def _repeatable(
        self, http_request: web.Request, request: GatewayRequest, body: AnyBody, raw: bytes
    ) -> RepeatableRequest:
        digest_of = partial(body_digest, request.endpoint, body)
        digest = digest_of() if is_quickly_parsed(raw) else await asyncio.to_thread(digest_of)
        return RepeatableRequest(
            repeat_key(http_request, digest),
            digest,
            int(request.created_at.timestamp()),
            http_request.headers.get(LAST_EVENT_HEADER),
        )

    async def _answer(
        self, http_request: web.Request, request: GatewayRequest, read: ReadBody, keep: Keep | None
    ) -> web.StreamResponse:
        repeat = request.repeat
        await self._generation.prepare(
            request, read, finds=repeat is not None, is_meant=is_meant_for_repeats(http_request)
        )
        if request.generation.stream and request.generation.embedding is None:
            sse_body = SSEBody(http_request, outlives_client=repeat is not None)
            reply_format = self._generation.reply_format(request)
            reply = StreamReply(sse_body, reply_format, request.usage, _event_ids(request))
            return await self._stream(request, reply, keep)
        return await self._whole(request, self._generation.whole_reply(request), keep)

    async def _whole(self, request: GatewayRequest, reply: WholeReply, keep: Keep | None) -> web.StreamResponse:
        await self._generation.run(request, reply)
        body = reply.body(request.generation.num_choices, request.generation.best_of)
        if keep is not None:
            await keep(body)
        response = web.json_response(body)
        self._recorder.end(request)
        return response

    async def _stream(self, request: GatewayRequest, reply: StreamReply, keep: Keep | None) -> web.StreamResponse:
        try:
            await self._generation.run(request, reply)
        except ClientGone:
            raise
        except Exception as failure:
            if not reply.has_begun:
                raise
            error = _client_error(failure)
            if _is_left(request, error):
                return await self._leave(request, reply, error)
            response = await reply.fail(error, waits=True)
            self._recorder.end(request, "error", kind_of(error).status, error.message)
            return response
        response = await reply.finish(keep)
        self._recorder.end(request)
        return response

    async def _leave(self, request: GatewayRequest, reply: StreamReply, error: HalfmoonError) -> web.StreamResponse:
        """Ends a stream whose answer goes on elsewhere. A repeat on this gateway waits for it: an unread one is cut."""
        try:
            response = await reply.fail(error, waits=not isinstance(error, TakenOver))
        except ClientGone:
            raise error from None
        self._recorder.leave(request)
        return response


def _event_ids(request: GatewayRequest) -> EventIds | None:
    repeat, num_outputs = request.repeat, len(request.outputs)
    return None if repeat is None or num_outputs > MAX_OUTPUTS else EventIds(num_outputs, repeat.last_event_id)


def _is_left(request: GatewayRequest, error: HalfmoonError) -> bool:
    """Whether the answer goes on without this connection. It is recorded where it ends."""
    has_stopped = isinstance(error, GatewayStopping) and request.repeat is not None and request.ttft_s is not None
    return has_stopped or isinstance(error, TakenOver)


def _client_error(failure: Exception) -> HalfmoonError:
    """The error as a client may see it. The text of an unknown one goes to the log only."""
    if isinstance(failure, HalfmoonError):
        return failure
    log.error("request.failed", exc_info=failure)
    return HalfmoonError("internal error: see the gateway's log")
