"""The generating endpoints: one HTTP request from its body to its last byte.

Receive the body; `generation.py` makes an answer of it; send that whole or as a stream; record.
"""

from __future__ import annotations

import asyncio
import json
import logging
from functools import partial

from aiohttp import web

from halfmoon.errors import HalfmoonError, NoCapacity
from halfmoon.rpc.telemetry.spans import span_scope
from services.gateway.cluster.token_router import GatewayStopping, TakenOver
from services.gateway.generation import Generation, ReadBody
from services.gateway.http.drain_gate import DrainGate
from services.gateway.http.error_responses import error_response, kind_of
from services.gateway.http.ignored_parameters import note_ignored
from services.gateway.http.rate_limits import RateLimited, RateLimits
from services.gateway.http.received_request import receive_body
from services.gateway.http.request_ids import LAST_EVENT_HEADER, is_meant_for_repeats, is_repeatable, repeat_key
from services.gateway.openai.bodies.responses_body import ResponsesBody
from services.gateway.openai.endpoint_bodies import AnyBody, body_digest, is_quickly_parsed
from services.gateway.peers.offer import offer_of
from services.gateway.peers.offering import PeerGateways
from services.gateway.repeatable import RepeatableRequest
from services.gateway.replies.event_ids import MAX_OUTPUTS, EventIds
from services.gateway.replies.passed_answer import counted_end
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
_WHOLE_HEADERS = {"Content-Type": "application/json; charset=utf-8"}


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
        peers: PeerGateways,
    ) -> None:
        self._generation = generation
        self._recorder = recorder
        self._drain_gate = drain_gate
        self._limits = limits
        self._repeats = repeats
        self._conversations = conversations
        self._background = background
        self._kept = kept
        self._peers = peers

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
        offer = offer_of(http_request)
        self._generation.identify(request, body, http_request.headers, offer)
        if offer is not None and offer.step == "ask":
            return await self._asked(http_request, request, ReadBody(body, len(raw)))
        if is_repeatable(http_request):
            request.repeat = await self._repeatable(http_request, request, body, raw)
        read, keep = ReadBody(body, len(raw)), None
        if isinstance(body, ResponsesBody):
            turn = await self._conversations.begin(request, body, len(raw))
            if body.background:
                return await self._in_background(http_request, request, turn, body)
            read = ReadBody(turn.body, turn.num_bytes)
            keep = partial(self._conversations.keep, turn, request.tenant.name) if turn.is_kept else None
        may_pass = offer is None and _is_whole(body)
        answer = partial(self._answer_or_pass, http_request, request, read, keep, raw if may_pass else None)
        if request.repeat is None:
            return await answer()
        return await self._repeats.run(request.repeat, answer, lambda: request.ttft_s is not None)

    async def _asked(self, http_request: web.Request, request: GatewayRequest, read: ReadBody) -> web.Response:
        """Tells another gateway what is predicted for its request. Nothing is recorded of it."""
        try:
            await self._generation.prepare(request, read, finds=False)
            latency = await self._generation.predict(request)
        except HalfmoonError as error:
            return error_response(error, http_request)
        finally:
            self._recorder.postpone(request)
        return web.json_response({"ttft_s": latency.ttft_s, "tbt_s": latency.tbt_s})

    async def _answer_or_pass(
        self,
        http_request: web.Request,
        request: GatewayRequest,
        read: ReadBody,
        keep: Keep | None,
        raw: bytes | None,
    ) -> web.StreamResponse:
        """Answers a request, or has a peer answer it where it would be refused. `raw`: None if no peer may."""
        try:
            return await self._answer(http_request, request, read, keep)
        except NoCapacity as refusal:
            if raw is None or isinstance(refusal, RateLimited) or request.ttft_s is not None:
                raise
            answer = await self._peers.answer(http_request, request, raw, self._generation.fingerprint(request))
            if answer is None:
                raise
        self._recorder.end(request)
        return answer

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
        if request.is_offered:
            return await self._whole_early(http_request, request)
        return await self._whole(request, self._generation.whole_reply(request), keep)

    async def _whole_early(self, http_request: web.Request, request: GatewayRequest) -> web.StreamResponse:
        """Answers another gateway at once, with a head at the first token: until then, that one may still refuse."""
        answer = SSEBody(http_request, _WHOLE_HEADERS)
        reply = self._generation.whole_reply(request, answer.begin)
        await self._generation.run(request, reply)
        body = reply.body(request.generation.num_choices, request.generation.best_of)
        answer.write(json.dumps(body).encode() + counted_end(request.usage()))
        response = await answer.end()
        self._recorder.end(request)
        return response

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
        response = await reply.finish(keep, counted_end(request.usage()) if request.is_offered else b"")
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


def _is_whole(body: AnyBody) -> bool:
    """Whether an answer needs nothing but the body, and leaves nothing behind: another gateway may give it, too."""
    return not isinstance(body, ResponsesBody) or (body.store is False and not body.previous_response_id)


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
