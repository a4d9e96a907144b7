"""From a body of /v1/responses to what is to be generated: that of the equivalent chat."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from services.gateway.openai.bodies.responses_body import ResponsesBody
from services.gateway.openai.generation_request import GenerationRequest, equivalent_chat_request
from services.gateway.openai.served_model import ServedModel

_OWN_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
}


def responses_request(body: ResponsesBody, model: ServedModel, context_tokens: int, salt: bytes) -> GenerationRequest:
    """Tokenizes the body. Raises InvalidRequest or ContextLengthExceeded with this endpoint's parameter names."""
    generation = equivalent_chat_request(body.as_chat(), _OWN_NAMES, model, context_tokens, salt)
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
