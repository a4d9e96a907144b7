"""Tokenizes what a client sent: messages through the chat template, prompts as they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from halfmoon.errors import InvalidRequest
from halfmoon.policy.placement.place import ContextLengthExceeded
from services.gateway.openai.bodies.messages import Message, RenderedChat
from services.gateway.openai.bodies.schemas import ChatBody, CompletionBody, GenerationBody
from services.gateway.openai.served_model import ServedModel
from services.gateway.replies.reasoning import is_begun_by, is_ended_by

_MAX_CHARS_PER_TOKEN = 256  # the longest tokens of known vocabularies are 128 spaces
_SLICE_CHARS = 4_096
_MAX_RUN_CHARS = 1 << 19  # half a second
_END = "\ue000\uf8ff\ue000"  # marks where a continued message ends; private characters, which nobody sends
_CLEARLY_TOO_MANY = 2  # contexts: sliced, a text has more tokens than as a whole, but less than twice as many


class ChatPrompt(NamedTuple):
    """A chat as the model reads it."""

    token_ids: tuple[int, ...]
    begins_reasoning: bool  # the output goes on inside the tags of reasoning
    ends_reasoning: bool  # the output is the answer: both tags are there


def text_of_chat(
    body: RenderedChat, messages: Sequence[Message], model: ServedModel, tools: Sequence[Mapping[str, Any]] | None
) -> str:
    """Renders the chat template. Raises InvalidRequest if the template refuses, or leaves a message out."""
    options: dict[str, Any] = {"tools": tools} if tools else {}
    if body.continue_final_message and body.add_generation_prompt:
        why = "continue_final_message: no new message begins; leave add_generation_prompt out"
        raise InvalidRequest(why, param="continue_final_message")
    if body.continue_final_message or body.add_generation_prompt is False:
        options["add_generation_prompt"] = False
    if body.chat_template is not None:
        if model.render_template is None:
            why = "chat_template: this server uses the model's own; it can be started to take those of requests"
            raise InvalidRequest(why, param="chat_template")
        options["render"] = partial(model.render_template, model.tenant, body.chat_template)
    elif body.documents and not model.takes_documents:
        why = "documents: the model's chat template leaves them out; put them into the messages"
        raise InvalidRequest(why, param="documents")
    if variables := body.template_variables():
        options["template_kwargs"] = variables
    shown = [message.for_template() for message in messages]
    if body.continue_final_message:
        shown[-1]["content"] += _END
    text = model.tokenizer.render_chat(shown, **options)
    _check_unusual_roles(messages, text)
    if not body.continue_final_message:
        return text
    end = text.rfind(_END)
    if end < 0:
        why = "continue_final_message: the model's chat template does not write the last message's content as it is"
        raise InvalidRequest(why, param="continue_final_message")
    return text[:end]


def _check_unusual_roles(messages: Sequence[Message], text: str) -> None:
    """Raises InvalidRequest if the template has left out a message of a role that it does not know."""
    at = 0
    for number, message in enumerate(messages):
        if message.has_usual_role:
            continue
        words = message.text.strip()
        at = text.find(words, at)
        if at < 0:
            role = f"messages[{number}].role"
            raise InvalidRequest(f"{role}: the model's chat template leaves out {message.role!r}", param=role)
        at += len(words)


def chat_prompt(
    body: ChatBody,
    messages: Sequence[Message],
    model: ServedModel,
    context_tokens: int,
    *,
    salt: bytes,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> ChatPrompt:
    """The prompt of a chat. Raises InvalidRequest if the template refuses, or ContextLengthExceeded."""
    text = text_of_chat(body, messages, model, tools)
    encode = partial(model.tokenizer.encode, salt=salt)
    refuse_hopeless(text, encode, context_tokens, "messages")
    token_ids = tuple(encode(text, with_special=bool(body.add_special_tokens)))
    return ChatPrompt(_truncated(token_ids, body, context_tokens), is_begun_by(text), is_ended_by(text))


def _truncated(prompt: tuple[int, ...], body: GenerationBody, context_tokens: int) -> tuple[int, ...]:
    """The prompt, without what is more than `truncate_prompt_tokens`; -1 leaves room for one token of output."""
    limit = body.truncate_prompt_tokens
    if limit is None:
        return prompt
    limit = context_tokens - 1 if limit == -1 else limit
    return prompt[:limit] if body.truncation_side == "right" else prompt[max(len(prompt) - limit, 0) :]


def completion_prompts(
    body: CompletionBody, model: ServedModel, context_tokens: int, *, salt: bytes
) -> list[tuple[int, ...]]:
    """The token ids of each prompt. Raises InvalidRequest or ContextLengthExceeded."""
    return [
        _truncated(_token_ids(prompt, body, model, context_tokens, salt), body, context_tokens)
        for prompt in each_prompt(body.prompt)
    ]


def each_prompt(prompt: str | list[int] | list[str] | list[list[int]]) -> Sequence[str | list[int]]:
    """The prompts of a body that has one or several."""
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        return prompt  # the schema allows lists of one type only
    return [prompt]  # type: ignore[list-item]


def _token_ids(
    prompt: str | list[int], body: CompletionBody, model: ServedModel, context_tokens: int, salt: bytes
) -> tuple[int, ...]:
    if not prompt:
        raise InvalidRequest("the prompt is empty", param="prompt")
    if isinstance(prompt, list):
        model.check_token_ids(prompt, "prompt")
        return tuple(prompt)
    encode = partial(model.tokenizer.encode, salt=salt)
    refuse_hopeless(prompt, encode, context_tokens, "prompt")
    return tuple(encode(prompt, with_special=body.add_special_tokens is not False))


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
