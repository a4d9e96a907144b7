"""Tokenizes what a client sent: messages through the chat template, prompts as they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from functools import partial
from typing import Any

import numpy as np

from halfmoon.errors import InvalidRequest
from halfmoon.policy.placement.place import ContextLengthExceeded
from services.gateway.openai.messages import Message
from services.gateway.openai.schemas import CompletionBody
from services.gateway.openai.served_model import ServedModel

_MAX_CHARS_PER_TOKEN = 256  # the longest tokens of known vocabularies are 128 spaces
_SLICE_CHARS = 4_096
_MAX_RUN_CHARS = 1 << 19  # half a second
_CLEARLY_TOO_MANY = 2  # contexts: sliced, a text has more tokens than as a whole, but less than twice as many


def text_of_chat(
    messages: Sequence[Message],
    model: ServedModel,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """Renders the chat template. Raises InvalidRequest if the template refuses."""
    rendered = [message.for_template() for message in messages]
    options: dict[str, Any] = {}
    if tools:
        options["tools"] = tools
    if not add_generation_prompt:
        options["add_generation_prompt"] = False
    if template_kwargs:
        options["template_kwargs"] = template_kwargs
    return model.tokenizer.render_chat(rendered, **options)


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
    """The token ids of a chat. Raises InvalidRequest if the template refuses, or ContextLengthExceeded."""
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
    """The token ids of each prompt. Raises InvalidRequest or ContextLengthExceeded."""
    return [_token_ids(prompt, model, context_tokens, salt) for prompt in each_prompt(body.prompt)]


def each_prompt(prompt: str | list[int] | list[str] | list[list[int]]) -> Sequence[str | list[int]]:
    """The prompts of a body that has one or several."""
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        return prompt  # the schema allows lists of one type only
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


def refuse_hopeless(text: str, encode: Callable[[str], Sized], context_tokens: int, param: str) -> None:
    """Raises ContextLengthExceeded for a text that is far too long. One that passes may still be somewhat too long.

    A tokenizer works in one go, whether or not anybody still waits for it. So a text is counted in slices first, and
    tokenized as a whole only if it may fit, and has no run that takes too long.
    """
    if len(text) > context_tokens * _MAX_CHARS_PER_TOKEN:
        raise _exceeded(context_tokens, f"{len(text)} characters", param)
    _refuse_runs(text, context_tokens, param)
    if len(text) <= max(context_tokens, _SLICE_CHARS):
        return
    num_tokens = 0
    for start in range(0, len(text), _SLICE_CHARS):
        num_tokens += len(encode(text[start : start + _SLICE_CHARS]))
        if num_tokens > context_tokens * _CLEARLY_TOO_MANY:
            raise _exceeded(context_tokens, f"more than {num_tokens // _CLEARLY_TOO_MANY}", param)


def _refuse_runs(text: str, context_tokens: int, param: str) -> None:
    """Raises ContextLengthExceeded for a very long run of letters, of white space or of signs.

    Tokenizers take it for one word, whose tokens cost a microsecond and a hundred bytes a character, in one go.
    """
    if len(text) <= _MAX_RUN_CHARS:
        return
    codes = np.frombuffer(text.encode(errors="surrogatepass"), dtype=np.uint8)
    kinds = _BYTE_KINDS[codes]
    ends = np.flatnonzero(kinds[1:] != kinds[:-1])
    longest = int(np.diff(ends, prepend=-1, append=len(kinds) - 1).max())
    if longest > _MAX_RUN_CHARS:
        size = f"a run of {longest} letters, spaces or signs, of which at most {_MAX_RUN_CHARS} can be tokenized"
        raise _exceeded(context_tokens, size, param)


def _byte_kind(code: int) -> int:
    if code >= 0x80 or chr(code).isalpha():
        return 0
    return 1 if chr(code).isspace() else 2 if chr(code).isdigit() else 3


_BYTE_KINDS = np.array([_byte_kind(code) for code in range(256)], dtype=np.uint8)


def _exceeded(context_tokens: int, size: str, param: str) -> ContextLengthExceeded:
    message = f"the context length is {context_tokens} tokens, the prompt has {size}; shorten {param}"
    return ContextLengthExceeded(message, param=param)
