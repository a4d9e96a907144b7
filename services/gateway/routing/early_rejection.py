"""Early rejection: a request that cannot meet its class's targets is refused before its prompt is tokenized."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from halfmoon.policy.admission.latency_bounds import ANY_PROMPT, PromptLowerBound
from halfmoon.policy.admission.qos_classes import Caller, ClassTable, QosClass
from halfmoon.policy.admission.refusal import Refused
from halfmoon.policy.admission.tenants import Tenant
from halfmoon.rpc.credentials.api_keys import bearer, sent_value
from services.gateway.openai.served_model import PromptPrefix
from services.gateway.request import GatewayRequest
from services.gateway.routing.prompt_prefix import held_blocks
from services.gateway.routing.routing_context import RoutingContext, trace_admission
from services.gateway.telemetry.decisions import Decision


class EarlyRejection:
    """Refuses requests by what is known before tokenization. Owns nothing."""

    def __init__(self, context: RoutingContext) -> None:
        self._context = context

    @property
    def classes(self) -> ClassTable:
        """The classes in force."""
        return self._context.admission.classes

    def class_of(self, headers: Mapping[str, str], model: str, tenant: Tenant) -> QosClass:
        """The class of a tenant's request with these headers for the model of this name."""
        return self._context.admission.classes.of(_caller(headers, model, tenant))

    def expected_tokens(self, request: GatewayRequest) -> float:
        """How many tokens a tokenized request will cost: its prompts, and outputs as long as others of its class."""
        generation, lengths = request.generation, self._context.admission.lengths
        max_tokens, qos_class = generation.sampling.max_tokens, request.qos.name
        num_outputs = (lengths.predict(qos_class, len(prompt), max_tokens) for prompt in generation.prompts)
        return sum(map(len, generation.prompts)) + generation.best_of * sum(num_outputs)

    def reject_early(self, request: GatewayRequest) -> None:
        """Raises Refused if no prompt at all could be admitted now."""
        context, qos, now_s = self._context, request.qos, self._context.clock()
        priority, view = self._priority(request), context.membership.view()
        with self._recording(request, ANY_PROMPT, now_s):
            context.admission.reject_early(view, priority, has_gaps=request.has_gaps, qos=qos, now_s=now_s)

    def reject_by_prefix(self, request: GatewayRequest, read_prefix: Callable[[], PromptPrefix | None]) -> None:
        """Raises Refused if no prompt with this one's prefix could be admitted now.

        The prefix is read, and looked up in the block index, only if the request would be refused with nothing cached.
        """
        context, qos, now_s = self._context, request.qos, self._context.clock()
        admission, membership = context.admission, context.membership
        if not admission.has_enforced_targets(qos):
            return
        prefix = read_prefix()
        if prefix is None:
            return
        refusal_of = partial(
            admission.early_refusal,
            membership.view(),
            priority=self._priority(request),
            has_gaps=request.has_gaps,
            qos=qos,
            now_s=now_s,
        )
        prompt = PromptLowerBound(prefix.least_tokens(), most_seen=membership.most_seen(request.tenant_salt))
        refusal = refusal_of(prompt)
        cached_blocks = None if refusal is None else held_blocks(prefix, membership, request.tenant_salt)
        if cached_blocks is None:
            return
        if cached_blocks.any():
            prompt = prompt._replace(cached_blocks=cached_blocks)
            refusal = refusal_of(prompt)
        if refusal is not None:
            with self._recording(request, prompt, now_s):
                admission.reject(refusal, qos, now_s)

    def _priority(self, request: GatewayRequest) -> int:
        return self._context.admission.shares.priority(request.qos.priority, request.tenant, request.priority)

    @contextmanager
    def _recording(self, request: GatewayRequest, prompt: PromptLowerBound, now_s: float) -> Iterator[None]:
        """Shows a refusal with its reasons among the latest decisions."""
        try:
            yield
        except Refused as refusal:
            trace_admission(request.arrived_s, now_s, refusal)
            decision = Decision(
                request_id=request.request_id,
                at_s=now_s,
                waited_s=now_s - request.arrived_s,
                qos_class=request.qos.name,
                num_prompt_tokens=None,
                candidates=self._context.candidates(prompt.num_tokens, prompt.most_seen, refusal.ranked_by),
                prefill_worker=None,
                decode_worker=None,
                ttft_s=refusal.ttft_s,
                tbt_s=refusal.tbt_s,
                targets=refusal.targets,
                applied=refusal.applied,
                refusal=refusal.reason,
            )
            self._context.telemetry.decisions.note(decision)
            raise


def _caller(headers: Mapping[str, str], model: str, tenant: Tenant) -> Caller:
    """The client, by what classes match: headers, API key, tenant and the name that it gives the model."""
    api_key = bearer(headers.get("Authorization", ""))
    named = {name.lower(): value for name, value in headers.items()}
    return Caller(named, sent_value(api_key) if api_key else "", model, tenant)
