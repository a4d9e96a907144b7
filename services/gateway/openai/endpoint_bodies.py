"""The bodies of the generating endpoints: parsing each, and tokenizing it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from halfmoon.pb.types_pb2 import LAST_TOKEN, MEAN, Pooling
from services.gateway.http.request_ids import digest
from services.gateway.openai.bodies.anthropic_body import OWN_NAMES, MessagesBody
from services.gateway.openai.bodies.embeddings_body import EmbeddingsBody
from services.gateway.openai.bodies.parse_body import Parsed, num_separators, parse_request
from services.gateway.openai.bodies.responses_body import ResponsesBody
from services.gateway.openai.bodies.schemas import ChatBody, CompletionBody, ComputedBody, TokenizedBody
from services.gateway.openai.generation_request import (
    GenerationRequest,
    chat_request,
    completion_request,
    equivalent_chat_request,
    max_values,
    with_own_names,
)
from services.gateway.openai.served_model import ServedModel
from services.gateway.replies.embeddings_format import EmbeddingOptions

AnyBody: TypeAlias = ChatBody | CompletionBody | ResponsesBody | MessagesBody | EmbeddingsBody

_SCHEMAS: Mapping[str, type[AnyBody]] = {
    "chat.completions": ChatBody,
    "completions": CompletionBody,
    "responses": ResponsesBody,
    "messages": MessagesBody,
    "embeddings": EmbeddingsBody,
}
_SAME_IN_COMPLETIONS = (*ComputedBody.model_fields, *TokenizedBody.model_fields, "user")
_POOLINGS: dict[str, Pooling.ValueType] = {"last": LAST_TOKEN, "mean": MEAN}
_RESPONSES_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
}
_QUICK_BYTES = 1 << 18  # a few long texts of this size are parsed in half a millisecond
_QUICK_SEPARATORS = 4_000


def read_body(endpoint: str, raw: bytes, model: ServedModel, context_tokens: int) -> Parsed[AnyBody]:
    """Parses a body, without tokenizing it. Raises InvalidRequest, UnknownModel or ContextLengthExceeded."""
    parsed = parse_request(_SCHEMAS[endpoint], raw, max_values(context_tokens))
    if parsed.body.model is not None:
        model.check_name(parsed.body.model)
    return parsed


def body_digest(endpoint: str, body: AnyBody) -> bytes:
    """A digest of what a body says, however its JSON is written."""
    fields = body.model_dump(mode="json", exclude_unset=True)
    return digest(endpoint, json.dumps(fields, sort_keys=True))


def is_quickly_parsed(raw: bytes) -> bool:
    """Whether parsing it on the event loop does not hold up other requests."""
    return len(raw) <= _QUICK_BYTES and num_separators(raw) <= _QUICK_SEPARATORS


def generation_request_of(body: AnyBody, model: ServedModel, context_tokens: int, salt: bytes) -> GenerationRequest:
    """Tokenizes a body. The time that it takes reveals nothing of requests with other salts.

    Raises InvalidRequest or ContextLengthExceeded.
    """
    if isinstance(body, ChatBody):
        return chat_request(body, model, context_tokens, salt)
    if isinstance(body, CompletionBody):
        return completion_request(body, model, context_tokens, salt)
    if isinstance(body, MessagesBody):
        return equivalent_chat_request(body.as_chat(), OWN_NAMES, model, context_tokens, salt)
    if isinstance(body, EmbeddingsBody):
        return _embeddings_request(body, model, context_tokens, salt)
    return _responses_request(body, model, context_tokens, salt)


def seeded(body: AnyBody, seed: int) -> AnyBody:
    """The body with a seed, if it has none."""
    if isinstance(body, EmbeddingsBody) or body.seed is not None:
        return body
    return body.model_copy(update={"seed": seed})


def max_tokens_of(body: AnyBody) -> int | None:
    """The longest output that the client allows; None if it sets no limit."""
    if isinstance(body, EmbeddingsBody):
        return 1
    if isinstance(body, ResponsesBody):
        return body.max_output_tokens
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        return body.max_completion_tokens
    return body.max_tokens


def _embeddings_request(
    body: EmbeddingsBody, model: ServedModel, context_tokens: int, salt: bytes
) -> GenerationRequest:
    """Tokenizes the inputs. Raises InvalidRequest or ContextLengthExceeded with this endpoint's parameter names."""
    same = {name: getattr(body, name) for name in _SAME_IN_COMPLETIONS}
    completion = CompletionBody.model_construct(prompt=body.input, max_tokens=1, temperature=0.0, **same)
    with with_own_names({"prompt": "input"}):
        generation = completion_request(completion, model, context_tokens, salt)
    generation.sampling.pooling = _POOLINGS[body.pooling or "last"]
    options = EmbeddingOptions(body.normalize is not False, body.dimensions, body.encoding_format == "base64")
    return replace(generation, only_prompt=True, embedding=options)


def _responses_request(body: ResponsesBody, model: ServedModel, context_tokens: int, salt: bytes) -> GenerationRequest:
    """Tokenizes the body. Raises InvalidRequest or ContextLengthExceeded with this endpoint's parameter names."""
    generation = equivalent_chat_request(body.as_chat(), _RESPONSES_NAMES, model, context_tokens, salt)
    return replace(generation, echoed=_echoed(body, generation))


def _echoed(body: ResponsesBody, generation: GenerationRequest) -> dict[str, Any]:
    """The fields that the response repeats from the body, with the defaults that were used."""
    form = None if body.text is None else body.text.format
    text_format = {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)
    return {
        "instructions": body.instructions,
        "metadata": body.metadata or {},
        "max_output_tokens": body.max_output_tokens,
        "temperature": generation.sampling.temperature,
        "top_p": generation.sampling.top_p,
        "text": {"format": text_format},
        "tools": [tool.model_dump(exclude_none=True) for tool in body.tools or ()],
        "tool_choice": _shown_choice(body),
        "parallel_tool_calls": body.parallel_tool_calls is not False and bool(body.tools),
        "previous_response_id": body.previous_response_id,
        "store": body.store is True,
        "background": body.background is True,
        "truncation": "disabled",
        "user": body.user,
    }


def _shown_choice(body: ResponsesBody) -> str | dict[str, Any]:
    choice = body.tool_choice
    if choice is None:
        return "auto" if body.tools else "none"
    return choice if isinstance(choice, str) else choice.model_dump()
