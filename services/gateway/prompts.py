"""The token ids of what a client sent: messages through the chat template, prompts as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from halfmoon.errors import InvalidRequest
from services.gateway.messages import Message
from services.gateway.prompt_size import refuse_hopeless
from services.gateway.schemas import CompletionBody
from services.gateway.served_model import ServedModel

_TEMPLATE_CHARS = 64  # about what a chat template writes around a message


def chat_prompt(
    messages: Sequence[Message],
    model: ServedModel,
    context_tokens: int,
    *,
    param: str = "messages",
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[int, ...]:
    """Raises InvalidRequest where the template refuses, ContextLengthExceeded for what cannot fit."""
    seen = [one.for_template() for one in messages]
    options: dict[str, Any] = {}
    if tools:
        options["tools"] = tools
    if not add_generation_prompt:
        options["add_generation_prompt"] = False
    if template_kwargs:
        options["template_kwargs"] = template_kwargs
    if sum(len(one["content"]) + _TEMPLATE_CHARS for one in seen) > context_tokens:
        refuse_hopeless(model.tokenizer.render_chat(seen, **options), model.tokenizer.encode, context_tokens, param)
    return tuple(model.tokenizer.encode_chat(seen, **options))


def completion_prompts(body: CompletionBody, model: ServedModel, context_tokens: int) -> list[tuple[int, ...]]:
    """One prompt or several. Raises InvalidRequest or ContextLengthExceeded."""
    return [_token_ids(one, model, context_tokens) for one in _each_prompt(body.prompt)]


def _each_prompt(prompt: str | list[int] | list[str] | list[list[int]]) -> Sequence[str | list[int]]:
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        return prompt  # a list is of one type: the schema saw to that
    return [prompt]  # type: ignore[list-item]


def _token_ids(prompt: str | list[int], model: ServedModel, context_tokens: int) -> tuple[int, ...]:
    if not prompt:
        raise InvalidRequest("the prompt is empty", param="prompt")
    if isinstance(prompt, list):
        model.check_token_ids(prompt, "prompt")
        return tuple(prompt)
    refuse_hopeless(prompt, model.tokenizer.encode, context_tokens, "prompt")
    return tuple(model.tokenizer.encode(prompt))
