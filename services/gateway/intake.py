"""From the bytes of a body to a request for the workers: the prompt's token ids, and how to sample.

Nothing here waits: the caller decides which thread a long body may keep busy.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from halfmoon.errors import InvalidRequest, UnknownModel
from halfmoon.pb.types_pb2 import SamplingParams
from halfmoon.policy.placement import ContextLengthExceeded
from services.gateway.client_text import shortened
from services.gateway.prompt_size import refuse_hopeless
from services.gateway.request_body import parse_body
from services.gateway.schemas import ChatBody, CompletionBody, GenerationBody
from services.gateway.text_stream import PushesText

_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's
_SPARE_VALUES = 100_000  # JSON values beside the prompt
_TEMPLATE_CHARS = 64  # about what a chat template writes around a message
_UINT64 = 2**64 - 1


class Encodes(Protocol):
    """halfmoon.engine.tokenizer.Tokenizer, as far as the gateway uses it."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        ...

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The text of a conversation."""
        ...

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids."""
        ...


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the gateway knows of the model; torch-free."""

    name: str  # under which it is served
    checkpoint_name: str
    fingerprint: str
    vocab_size: int
    context_tokens: int
    tokenizer: Encodes
    new_detokenizer: Callable[[], PushesText]
    created: int  # Unix seconds


@dataclass(frozen=True, slots=True)
class Intake:
    """A request that may go to the workers, and how it wants to be answered."""

    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    stops: tuple[str, ...]
    stream: bool
    with_usage: bool
    with_token_ids: bool


def take_in_chat(raw: bytes, model: ServedModel, context_tokens: int) -> Intake:
    """Applies the chat template. Raises InvalidRequest, UnknownModel or ContextLengthExceeded."""
    body = parse_body(ChatBody, raw, _max_values(context_tokens))
    check_model(body.model, model)
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    messages = [
        {"role": "system" if one.role == "developer" else one.role, "content": one.text} for one in body.messages
    ]
    if sum(len(one["content"]) + _TEMPLATE_CHARS for one in messages) > context_tokens:
        refuse_hopeless(model.tokenizer.render_chat(messages), model.tokenizer.encode, context_tokens, "messages")
    prompt = model.tokenizer.encode_chat(messages)
    limit_name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    left = _room(len(prompt), wanted, context_tokens, "messages", limit_name)
    num_top_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return _intake(body, model, prompt, left if wanted is None else wanted, num_top_logprobs)


def take_in_completion(raw: bytes, model: ServedModel, context_tokens: int) -> Intake:
    """The prompt as it is. Raises InvalidRequest, UnknownModel or ContextLengthExceeded."""
    body = parse_body(CompletionBody, raw, _max_values(context_tokens))
    check_model(body.model, model)
    prompt = _prompt_token_ids(_one_prompt(body), model, context_tokens)
    left = _room(len(prompt), body.max_tokens, context_tokens, "prompt", "max_tokens")
    max_tokens = min(left, _DEFAULT_COMPLETION_TOKENS) if body.max_tokens is None else body.max_tokens
    return _intake(body, model, prompt, max_tokens, body.logprobs)


def check_model(name: str, model: ServedModel) -> None:
    """Raises UnknownModel for any other name than the served one."""
    if name != model.name:
        raise UnknownModel(
            f"the model {shortened(name)!r} does not exist; this server serves {model.name!r}", param="model"
        )


def _one_prompt(body: CompletionBody) -> str | list[int]:
    prompt = body.prompt
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            raise InvalidRequest("one prompt a request for now", param="prompt")
        prompt = prompt[0]
    if not prompt:
        raise InvalidRequest("the prompt is empty", param="prompt")
    return prompt  # type: ignore[return-value]  # a list is of one type: the schema saw to that


def _max_values(context_tokens: int) -> int:
    """Of a body: a value or a separator is hardly less than half a token."""
    return 2 * context_tokens + _SPARE_VALUES


def _prompt_token_ids(prompt: str | list[int], model: ServedModel, context_tokens: int) -> list[int]:
    if isinstance(prompt, list):
        _check_token_ids(prompt, model, "prompt")
        return prompt
    refuse_hopeless(prompt, model.tokenizer.encode, context_tokens, "prompt")
    return model.tokenizer.encode(prompt)


def _room(num_prompt: int, wanted: int | None, context_tokens: int, prompt_name: str, limit_name: str) -> int:
    """Output tokens that the context still holds. Raises when `wanted`, or one token, is more."""
    if num_prompt == 0:
        raise InvalidRequest(f"{prompt_name} gave no tokens", param=prompt_name)
    left = context_tokens - num_prompt
    figures = f"the context length is {context_tokens} tokens, the prompt has {num_prompt}"
    if left < 1:
        raise ContextLengthExceeded(f"{figures}: no room for output; shorten {prompt_name}", param=prompt_name)
    if wanted is not None and wanted > left:
        raise ContextLengthExceeded(f"{figures} and {limit_name} is {wanted}; at most {left} fit", param=limit_name)
    return left


def _intake(
    body: GenerationBody, model: ServedModel, prompt: list[int], max_tokens: int, num_top_logprobs: int | None
) -> Intake:
    if body.min_tokens is not None and body.min_tokens > max_tokens:
        raise InvalidRequest(f"min_tokens is more than the {max_tokens} tokens allowed", param="min_tokens")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream to be true", param="stream_options")
    stop_token_ids = list(dict.fromkeys(body.stop_token_ids or []))
    _check_token_ids(stop_token_ids, model, "stop_token_ids")
    sampling = SamplingParams(
        max_tokens=max_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=min(max(body.top_k or 0, 0), model.vocab_size),
        top_p=1.0 if body.top_p is None else body.top_p,
        min_p=body.min_p or 0.0,
        seed=secrets.randbits(64) if body.seed is None else body.seed & _UINT64,
        min_tokens=body.min_tokens or 0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        logit_bias=_logit_bias(body, model),
        stop_token_ids=stop_token_ids,
        ignore_eos=bool(body.ignore_eos),
        num_top_logprobs=num_top_logprobs,
    )
    with_usage = bool(body.stream_options and body.stream_options.include_usage)
    return Intake(tuple(prompt), sampling, _stops(body), bool(body.stream), with_usage, bool(body.return_token_ids))


def _stops(body: GenerationBody) -> tuple[str, ...]:
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if not all(stops):
        raise InvalidRequest("a stop string must not be empty", param="stop")
    return tuple(stops)


def _logit_bias(body: GenerationBody, model: ServedModel) -> dict[int, float]:
    bias: dict[int, float] = {}
    for name, value in (body.logit_bias or {}).items():
        if not (name.isascii() and name.isdigit() and len(name) < 10):
            raise InvalidRequest(f"logit_bias: {name[:40]!r} is no token id", param="logit_bias")
        bias[int(name)] = value
    _check_token_ids(bias, model, "logit_bias")
    return bias


def _check_token_ids(token_ids: Sequence[int] | Mapping[int, Any], model: ServedModel, param: str) -> None:
    outside = next((one for one in token_ids if not 0 <= one < model.vocab_size), None)
    if outside is not None:
        raise InvalidRequest(f"{param}: token id {outside} is not in 0..{model.vocab_size - 1}", param=param)
