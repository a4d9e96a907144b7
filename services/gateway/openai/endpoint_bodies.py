"""The bodies of the generating endpoints: parsing each, and tokenizing it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TypeAlias

from services.gateway.http.request_ids import digest
from services.gateway.openai.bodies.anthropic_body import OWN_NAMES, MessagesBody
from services.gateway.openai.bodies.embeddings_body import EmbeddingsBody
from services.gateway.openai.bodies.parse_body import Parsed, num_separators, parse_request
from services.gateway.openai.bodies.responses_body import ResponsesBody
from services.gateway.openai.bodies.schemas import ChatBody, CompletionBody
from services.gateway.openai.embeddings_request import embeddings_request
from services.gateway.openai.generation_request import (
    GenerationRequest,
    chat_request,
    completion_request,
    equivalent_chat_request,
    max_values,
)
from services.gateway.openai.responses_request import responses_request
from services.gateway.openai.served_model import ServedModel

AnyBody: TypeAlias = ChatBody | CompletionBody | ResponsesBody | MessagesBody | EmbeddingsBody

_SCHEMAS: Mapping[str, type[AnyBody]] = {
    "chat.completions": ChatBody,
    "completions": CompletionBody,
    "responses": ResponsesBody,
    "messages": MessagesBody,
    "embeddings": EmbeddingsBody,
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
        return embeddings_request(body, model, context_tokens, salt)
    return responses_request(body, model, context_tokens, salt)


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
