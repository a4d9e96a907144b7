"""From a body to its answer, whoever waits for it: parse, reject early, tokenize, run on the cluster.

Knows nothing of HTTP requests and connections.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from halfmoon.kv.keys import adapter_salt
from halfmoon.kv.kv_policy import parse_kv_policy, policy_salt
from halfmoon.policy.admission.refusal import PredictedLatency
from halfmoon.policy.admission.tenants import kv_salt
from services.gateway.cluster.held_answers import HeldAnswers
from services.gateway.cluster.membership import Membership
from services.gateway.http.rate_limits import RateLimits
from services.gateway.openai.bodies.parse_body import Parsed
from services.gateway.openai.bodies.schemas import ChatBody, CompletionBody
from services.gateway.openai.endpoint_bodies import (
    AnyBody,
    generation_request_of,
    is_quickly_parsed,
    max_tokens_of,
    read_body,
    seeded,
)
from services.gateway.openai.generation_request import GenerationRequest
from services.gateway.openai.requested_constraint import CheckConstraint, check_requested
from services.gateway.openai.served_model import ServedModel
from services.gateway.openai.tokenizer_threads import TokenizerThreads
from services.gateway.peers.offer import Offer, OtherModel
from services.gateway.replies.chat_format import ChatFormat
from services.gateway.replies.completion_format import CompletionFormat
from services.gateway.replies.embeddings_format import EmbeddingsFormat
from services.gateway.replies.messages_format import MessagesFormat
from services.gateway.replies.replies import Begin, OutputSink, Reply, WholeReply
from services.gateway.replies.reply_format import ReplyFormat
from services.gateway.replies.responses_format import ResponsesFormat
from services.gateway.replies.text_stream import TextPiece
from services.gateway.request import GatewayRequest
from services.gateway.routing.early_rejection import EarlyRejection
from services.gateway.routing.prompt_prefix import prompt_prefix_of
from services.gateway.routing.relay import Relay

_SHORT_PROMPT_BYTES = 1_024  # the prompt of a shorter body is tokenized as soon as judged by its prefix
_SLOW_PROMPT_BYTES = 4_096  # the prompt of a longer body is tokenized off the event loop
_MOST_PREFIX_BYTES = 1 << 22  # rendering and counting a longer prompt would hold up the event loop


@dataclass(frozen=True, slots=True)
class ReadBody:
    """A body, and the size of what it stands for."""

    body: AnyBody
    num_bytes: int


class Generation:
    """The stages of a request. Owns nothing."""

    def __init__(
        self,
        model: ServedModel,
        membership: Membership,
        early_rejection: EarlyRejection,
        relay: Relay,
        check_constraint: CheckConstraint,
        threads: TokenizerThreads,
        limits: RateLimits,
        held_answers: HeldAnswers,
        *,
        is_cache_shared: bool,
    ) -> None:
        self._model = model
        self._membership = membership
        self._early_rejection = early_rejection
        self._relay = relay
        self._check_constraint = check_constraint
        self._threads = threads
        self._limits = limits
        self._held_answers = held_answers
        self._is_cache_shared = is_cache_shared  # among tenants

    async def parse(self, request: GatewayRequest, raw: bytes) -> Parsed[AnyBody]:
        """The body as its endpoint reads it. Raises InvalidRequest, UnknownModel or ContextLengthExceeded."""
        context_tokens = self._context_tokens()

        def parse(model: ServedModel) -> Parsed[AnyBody]:
            return read_body(request.endpoint, raw, model, context_tokens)

        return parse(self._model) if is_quickly_parsed(raw) else await self._threads.run(parse, self._model, len(raw))

    def identify(
        self, request: GatewayRequest, body: AnyBody, headers: Mapping[str, str] | None, offer: Offer | None = None
    ) -> None:
        """Notes the model, the class of a request with these headers or this offer, and whose KV it shares.

        Raises OtherModel.
        """
        request.model = self._model.named(body.model)
        if headers is not None:
            request.qos = self._early_rejection.class_of(headers, body.model or request.model, request.tenant)
        cache_salt = body.cache_salt
        if offer is not None:
            if offer.model != self.fingerprint(request):
                raise OtherModel
            request.qos = offer.in_class(request.qos, self._early_rejection.classes, request.tenant)
            request.is_offered, cache_salt = True, offer.cache_salt
        tenant_salt = kv_salt(request.tenant, cache_salt, is_shared=self._is_cache_shared)
        kv_policy = request.qos.kv_policy if body.kv_policy is None else body.kv_policy
        if kv_policy is not None:
            tenant_salt = policy_salt(parse_kv_policy(kv_policy), tenant_salt)
        request.tenant_salt = adapter_salt(self._model.adapters.get(request.model, ""), tenant_salt)

    def fingerprint(self, request: GatewayRequest) -> str:
        """The fingerprint of what answers an identified request: the model, or an adapter of it."""
        return self._model.adapters.get(request.model, self._model.fingerprint)

    async def predict(self, request: GatewayRequest) -> PredictedLatency:
        """The latency of a prepared request, which is not run. Raises what `Relay.predict` raises."""
        return await self._relay.predict(request.by_prompt)

    async def prepare(self, request: GatewayRequest, read: ReadBody, *, finds: bool, is_meant: bool = True) -> None:
        """Everything before the first worker is asked. `finds`: workers may hold the answer of an earlier request.

        Raises Refused, RateLimited, InvalidRequest, ContextLengthExceeded and ReusedKey.
        """
        body, repeat = read.body, request.repeat
        if repeat is not None:
            if finds:
                repeat.hold(await self._held_answers.find(repeat.key, is_meant=is_meant))
            body = seeded(body, repeat.seed)
        self._reject_early(request, body, read.num_bytes)
        generation = await self._tokenize(request, body, read.num_bytes)
        if generation.constraint is not None:
            await check_requested(generation.constraint, self._check_constraint, request.tenant.name)
        request.begin_outputs(generation, self._model)
        if request.is_metered and (repeat is None or not repeat.held):
            num_expected_tokens = self._early_rejection.expected_tokens(request)
            self._limits.take_tokens(request.tenant, num_expected_tokens)
            request.num_expected_tokens = num_expected_tokens

    def whole_reply(self, request: GatewayRequest, on_begin: Begin | None = None) -> WholeReply:
        """The reply at once. `on_begin` is called at the first token."""
        embedding, num_outputs = request.generation.embedding, len(request.outputs)
        if embedding is not None:
            created = int(request.created_at.timestamp())
            head = {"id": f"embd-{request.request_id}", "created": created, "model": request.model}
            embeddings = EmbeddingsFormat(head, embedding, request.embedding)
            return WholeReply(embeddings, num_outputs, request.usage, on_begin)
        return WholeReply(self.reply_format(request), num_outputs, request.usage, on_begin)

    def reply_format(self, request: GatewayRequest) -> ReplyFormat:
        """The shape of the reply."""
        generation, repeat = request.generation, request.repeat
        created = int(request.created_at.timestamp()) if repeat is None else repeat.created_at
        head = (request.request_id, request.model, created, self._model.tokenizer, generation.reply_options)
        call_ids = None if repeat is None else repeat.call_id
        if request.endpoint == "responses":
            named = (request.reply_id, *head[1:])
            return ResponsesFormat(*named, generation.echoed, generation.new_tool_parser, call_ids)
        if request.endpoint == "messages":
            return MessagesFormat(request.request_id, request.model, generation.new_tool_parser, call_ids)
        if request.endpoint == "chat.completions":
            prompt = generation.prompts[0]
            return ChatFormat(*head, prompt, request.prompt_logprobs, generation.new_tool_parser, call_ids)
        return CompletionFormat(
            *head, generation.prompts, generation.prompt_texts, generation.num_choices, request.prompt_logprobs
        )

    async def run(self, request: GatewayRequest, reply: Reply) -> None:
        """Puts the text of all outputs into the reply. Raises what `Relay.run` raises."""
        if request.generation.sampling.max_tokens == 0:  # an echo and nothing else
            await reply.begin()
            for output in request.outputs:
                reply.put(output.index, TextPiece("", (), "length"))
            return
        singly, only_prompt = request.repeat is not None, request.generation.only_prompt
        await self._relay.run(
            request.by_prompt,
            lambda output: OutputSink(output.index, output.text, reply, singly=singly, only_prompt=only_prompt),
        )
        if request.is_kept:
            self._relay.bring_next_turn(request.outputs[0])

    def _context_tokens(self) -> int:
        return self._membership.context_tokens(self._model.context_tokens)

    async def _tokenize(self, request: GatewayRequest, body: AnyBody, num_bytes: int) -> GenerationRequest:
        context_tokens = self._membership.context_tokens(self._model.context_tokens, request.tenant_salt)

        def tokenize(model: ServedModel) -> GenerationRequest:
            return generation_request_of(body, model, context_tokens, request.tenant_salt)

        waits = isinstance(body, ChatBody) and body.chat_template is not None
        if num_bytes > _SLOW_PROMPT_BYTES or waits:
            model = replace(self._model, tenant=request.tenant.name)
            return await self._threads.run(tokenize, model, num_bytes, waits=waits)
        return tokenize(self._model)

    def _reject_early(self, request: GatewayRequest, body: AnyBody, num_bytes: int) -> None:
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
        request.has_gaps = 2 * num_bytes < self._context_tokens() if max_tokens is None else max_tokens > 1
        if request.repeat is not None and request.repeat.held:
            return  # it was admitted
        self._early_rejection.reject_early(request)
        if _SHORT_PROMPT_BYTES < num_bytes <= _MOST_PREFIX_BYTES:
            read_prefix = partial(prompt_prefix_of, body, self._model, request.tenant_salt)
            self._early_rejection.reject_by_prefix(request, read_prefix)
