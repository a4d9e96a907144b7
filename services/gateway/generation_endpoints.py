"""The generating endpoints: one HTTP request from its body to its last byte.

Receive and parse the body; reject early; tokenize; run the outputs on the cluster; answer whole or as a stream; record.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from aiohttp import web

from halfmoon.errors import HalfmoonError
from halfmoon.kv.keys import adapter_salt
from halfmoon.policy.admission.tenants import kv_salt
from halfmoon.rpc.telemetry.spans import span_scope
from services.gateway.cluster.held_answers import HeldAnswers
from services.gateway.cluster.membership import Membership
from services.gateway.cluster.token_router import GatewayStopping, TakenOver
from services.gateway.http.drain_gate import DrainGate
from services.gateway.http.error_responses import error_response, kind_of
from services.gateway.http.ignored_parameters import note_ignored
from services.gateway.http.rate_limits import RateLimits
from services.gateway.http.received_request import receive_body
from services.gateway.http.request_ids import LAST_EVENT_HEADER, is_meant_for_repeats, is_repeatable, repeat_key
from services.gateway.openai.endpoint_bodies import (
    AnyBody,
    body_digest,
    generation_request_of,
    is_quickly_parsed,
    max_tokens_of,
    read_body,
    seeded,
)
from services.gateway.openai.generation_request import GenerationRequest
from services.gateway.openai.parse_body import Parsed
from services.gateway.openai.schemas import CompletionBody
from services.gateway.openai.served_model import ServedModel
from services.gateway.openai.structured_output import CheckConstraint, check_requested
from services.gateway.openai.tokenizer_threads import TokenizerThreads
from services.gateway.repeatable import RepeatableRequest
from services.gateway.replies.chat_format import ChatFormat
from services.gateway.replies.completion_format import CompletionFormat
from services.gateway.replies.embeddings_format import EmbeddingsFormat
from services.gateway.replies.event_ids import MAX_OUTPUTS, EventIds
from services.gateway.replies.messages_format import MessagesFormat
from services.gateway.replies.replies import OutputSink, Reply, StreamReply, WholeReply
from services.gateway.replies.reply_format import ReplyFormat
from services.gateway.replies.responses_format import ResponsesFormat
from services.gateway.replies.sse_body import ClientGone, SSEBody
from services.gateway.replies.text_stream import TextPiece
from services.gateway.request import GatewayRequest
from services.gateway.routing.early_rejection import EarlyRejection
from services.gateway.routing.prompt_prefix import prompt_prefix_of
from services.gateway.routing.relay import Relay
from services.gateway.running_repeats import RunningRepeats
from services.gateway.telemetry.request_record import RequestRecorder

log = logging.getLogger(__name__)

_SLOW_PROMPT_BYTES = 4_096  # the prompt of a longer body is tokenized off the event loop
_MOST_PREFIX_BYTES = 1 << 22  # rendering and counting a longer prompt would hold up the event loop
_CLIENT_CLOSED = 499  # only the ledger sees it


class GenerationEndpoints:
    """Serves chat completions, completions, responses and messages. Owns nothing."""

    def __init__(
        self,
        model: ServedModel,
        membership: Membership,
        early_rejection: EarlyRejection,
        relay: Relay,
        recorder: RequestRecorder,
        drain_gate: DrainGate,
        check_constraint: CheckConstraint,
        threads: TokenizerThreads,
        limits: RateLimits,
        held_answers: HeldAnswers,
        repeats: RunningRepeats,
        *,
        is_cache_shared: bool,
    ) -> None:
        self._model = model
        self._membership = membership
        self._early_rejection = early_rejection
        self._relay = relay
        self._recorder = recorder
        self._drain_gate = drain_gate
        self._check_constraint = check_constraint
        self._threads = threads
        self._limits = limits
        self._held_answers = held_answers
        self._repeats = repeats
        self._is_cache_shared = is_cache_shared  # among tenants

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
                return _given_up(http_request, error)
            recorder.fail(request, error)
            return error_response(error, http_request)
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
        context_tokens = self._membership.context_tokens(self._model.context_tokens)
        body, ignored = await self._parse(request, raw, context_tokens)
        note_ignored(http_request, ignored)
        request.model = self._model.named(body.model)
        request.qos = self._early_rejection.class_of(http_request.headers, body.model or request.model, request.tenant)
        tenant_salt = kv_salt(request.tenant, body.cache_salt, is_shared=self._is_cache_shared)
        request.tenant_salt = adapter_salt(self._model.adapters.get(request.model, ""), tenant_salt)
        answer = partial(self._answer, http_request, request, body, len(raw), context_tokens)
        if not is_repeatable(http_request):
            return await answer()
        request.repeat = await self._repeatable(http_request, request, body, raw)
        return await self._repeats.run(request.repeat, answer, lambda: request.ttft_s is not None)

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
        self, http_request: web.Request, request: GatewayRequest, body: AnyBody, num_bytes: int, context_tokens: int
    ) -> web.StreamResponse:
        repeat = request.repeat
        if repeat is not None:
            repeat.hold(await self._held_answers.find(repeat.key, is_meant=is_meant_for_repeats(http_request)))
            body = seeded(body, repeat.seed)
        self._reject_early(request, body, num_bytes, context_tokens)
        generation = await self._tokenize(request, body, num_bytes, context_tokens)
        if generation.constraint is not None:
            await check_requested(generation.constraint, self._check_constraint, request.tenant.name)
        request.begin_outputs(generation, self._model)
        if repeat is None or not repeat.held:
            num_expected_tokens = self._early_rejection.expected_tokens(request)
            self._limits.take_tokens(request.tenant, num_expected_tokens)
            request.num_expected_tokens = num_expected_tokens
        if generation.embedding is not None:
            embeddings = EmbeddingsFormat(request.model, generation.embedding, request.embedding)
            return await self._whole(request, WholeReply(embeddings, len(request.outputs), request.usage))
        reply_format = self._reply_format(request)
        if request.generation.stream:
            sse_body = SSEBody(http_request, outlives_client=repeat is not None)
            return await self._stream(request, StreamReply(sse_body, reply_format, request.usage, _event_ids(request)))
        return await self._whole(request, WholeReply(reply_format, len(request.outputs), request.usage))

    async def _parse(self, request: GatewayRequest, raw: bytes, context_tokens: int) -> Parsed[AnyBody]:
        def parse(model: ServedModel) -> Parsed[AnyBody]:
            return read_body(request.endpoint, raw, model, context_tokens)

        return parse(self._model) if is_quickly_parsed(raw) else await self._threads.run(parse, self._model, len(raw))

    async def _tokenize(
        self, request: GatewayRequest, body: AnyBody, num_bytes: int, context_tokens: int
    ) -> GenerationRequest:
        def tokenize(model: ServedModel) -> GenerationRequest:
            return generation_request_of(body, model, context_tokens, request.tenant_salt)

        is_slow = num_bytes > _SLOW_PROMPT_BYTES
        return await self._threads.run(tokenize, self._model, num_bytes) if is_slow else tokenize(self._model)

    def _reject_early(self, request: GatewayRequest, body: AnyBody, num_bytes: int, context_tokens: int) -> None:
        """Raises Refused.

        Whether there will be gaps between tokens is certain for a short body without a limit, too: a token has at least
        one byte, and a template hardly adds more than the body has around its text, so more than one token fits. With a
        limit, a prompt that leaves room for just one token is judged as if it left more.
        """
        max_tokens = max_tokens_of(body)
        if max_tokens == 0 and not (isinstance(body, CompletionBody) and body.wants_prompt_alone):
            return  # an echo: no worker is needed
        request.needs_workers = True
        request.priority = body.priority or 0
        request.has_gaps = 2 * num_bytes < context_tokens if max_tokens is None else max_tokens > 1
        if request.repeat is not None and request.repeat.held:
            return  # it was admitted
        self._early_rejection.reject_early(request)
        if num_bytes > _MOST_PREFIX_BYTES:
            return
        read_prefix = partial(prompt_prefix_of, body, self._model, request.tenant_salt)
        self._early_rejection.reject_by_prefix(request, read_prefix)

    def _reply_format(self, request: GatewayRequest) -> ReplyFormat:
        generation, repeat = request.generation, request.repeat
        created = int(request.created_at.timestamp()) if repeat is None else repeat.created_at
        head = (request.request_id, request.model, created, self._model.tokenizer, generation.reply_options)
        call_ids = None if repeat is None else repeat.call_id
        if request.endpoint == "responses":
            return ResponsesFormat(*head, generation.echoed, generation.new_tool_parser, call_ids)
        if request.endpoint == "messages":
            return MessagesFormat(request.request_id, request.model, generation.new_tool_parser, call_ids)
        if request.endpoint == "chat.completions":
            prompt = generation.prompts[0]
            return ChatFormat(*head, prompt, request.prompt_logprobs, generation.new_tool_parser, call_ids)
        return CompletionFormat(
            *head, generation.prompts, generation.prompt_texts, generation.num_choices, request.prompt_logprobs
        )

    async def _whole(self, request: GatewayRequest, reply: WholeReply) -> web.StreamResponse:
        await self._run(request, reply)
        response = await reply.finish(request.generation.num_choices, request.generation.best_of)
        self._recorder.end(request)
        return response

    async def _stream(self, request: GatewayRequest, reply: StreamReply) -> web.StreamResponse:
        try:
            await self._run(request, reply)
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
        response = await reply.finish()
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

    async def _run(self, request: GatewayRequest, reply: Reply) -> None:
        if request.generation.sampling.max_tokens == 0:  # an echo and nothing else
            await reply.begin()
            for output in request.outputs:
                reply.put(output.index, TextPiece("", (), (), "length"))
            return
        singly, only_prompt = request.repeat is not None, request.generation.only_prompt
        await self._relay.run(
            request.by_prompt,
            lambda output: OutputSink(output.index, output.text, reply, singly=singly, only_prompt=only_prompt),
        )


def _event_ids(request: GatewayRequest) -> EventIds | None:
    repeat, num_outputs = request.repeat, len(request.outputs)
    return None if repeat is None or num_outputs > MAX_OUTPUTS else EventIds(num_outputs, repeat.last_event_id)


def _is_left(request: GatewayRequest, error: HalfmoonError) -> bool:
    """Whether the answer goes on without this connection. It is recorded where it ends."""
    has_stopped = isinstance(error, GatewayStopping) and request.repeat is not None and request.ttft_s is not None
    return has_stopped or isinstance(error, TakenOver)


def _given_up(http_request: web.Request, error: HalfmoonError) -> web.StreamResponse:
    """The response to a request that is left to a repeat. Cuts a stream that has begun: nothing may follow it."""
    if http_request.writer.output_size and http_request.transport is not None:
        http_request.transport.abort()
        raise ClientGone
    return error_response(error, http_request)


def _client_error(failure: Exception) -> HalfmoonError:
    """The error as a client may see it. The text of an unknown one goes to the log only."""
    if isinstance(failure, HalfmoonError):
        return failure
    log.error("request.failed", exc_info=failure)
    return HalfmoonError("internal error: see the gateway's log")
