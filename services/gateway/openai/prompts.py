"""The token ids of what a client sent: messages through the chat template, prompts as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from halfmoon.errors import InvalidRequest
from services.gateway.openai.messages import Message
from services.gateway.openai.prompt_size import refuse_hopeless
from services.gateway.openai.schemas import CompletionBody
from services.gateway.openai.served_model import ServedModel


def text_of_chat(
    messages: Sequence[Message],
    model: ServedModel,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """Raises InvalidRequest where the template refuses."""
    seen = [one.for_template() for one in messages]
    options: dict[str, Any] = {}
    if tools:
        options["tools"] = tools
    if not add_generation_prompt:
        options["add_generation_prompt"] = False
    if template_kwargs:
        options["template_kwargs"] = template_kwargs
    return model.tokenizer.render_chat(seen, **options)


def chat_prompt(
    messages: Sequence[Message],
    model: ServedModel,
    context_tokens: int,
    *,
    salt: bytes,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[int, ...]:
    """Raises InvalidRequest where the template refuses, ContextLengthExceeded for what cannot fit."""
    text = text_of_chat(
        messages,
        model,
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        template_kwargs=template_kwargs,
    )
    encode = partial(model.tokenizer.encode, salt=salt)
    refuse_hopeless(text, encode, context_tokens, "messages")
    return tuple(encode(text, with_special=False))


def completion_prompts(
    body: CompletionBody, model: ServedModel, context_tokens: int, *, salt: bytes
) -> list[tuple[int, ...]]:
    """One prompt or several. Raises InvalidRequest or ContextLengthExceeded."""
    return [_token_ids(one, model, context_tokens, salt) for one in each_prompt(body.prompt)]


def each_prompt(prompt: str | list[int] | list[str] | list[list[int]]) -> Sequence[str | list[int]]:
    """Of a body, whether it has one or several."""
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        return prompt  # a list is of one type: the schema saw to that
    return [prompt]  # type: ignore[list-item]


def _token_ids(prompt: str | list[int], model: ServedModel, context_tokens: int, salt: bytes) -> tuple[int, ...]:
    if not prompt:
        raise InvalidRequest("the prompt is empty", param="prompt")
    if isinstance(prompt, list):
        model.check_token_ids(prompt, "prompt")
        return tuple(prompt)
    encode = partial(model.tokenizer.encode, salt=salt)
    refuse_hopeless(prompt, encode, context_tokens, "prompt")
    return tuple(encode(prompt))
