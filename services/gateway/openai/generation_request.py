"""From a body to a request for the workers: prompts, how to sample, and how to answer.

Nothing here waits: the caller decides which thread a long prompt may keep busy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from halfmoon.errors import InvalidRequest
from halfmoon.pb.types_pb2 import Constraint, SamplingParams
from halfmoon.policy.placement.place import ContextLengthExceeded
from services.gateway.openai.prompts import chat_prompt, completion_prompts
from services.gateway.openai.sampling import sampling_of, stops_of
from services.gateway.openai.schemas import ChatBody, CompletionBody, GenerationBody
from services.gateway.openai.served_model import ServedModel
from services.gateway.openai.tool_use import NewToolParser, tool_use_of
from services.gateway.replies.reply_format import ReplyOptions

_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's
_SPARE_VALUES = 100_000  # JSON values beside the prompt
_MAX_CHOICES = 1_024  # of all prompts together


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request that may go to the workers, and how it wants to be answered."""

    prompts: tuple[tuple[int, ...], ...]  # token ids
    sampling: SamplingParams
    stops: tuple[str, ...]
    stream: bool
    wanted: ReplyOptions
    num_choices: int = 1  # for each prompt
    best_of: int = 1  # outputs for each prompt, of which `num_choices` are given
    keep_stop: bool = False  # in the text
    priority: int = 0
    tenant_salt: bytes = b""  # KV is shared among requests of one salt
    echoes: tuple[str, ...] = ()  # texts of the prompts, where they are wanted
    labels: dict[str, Any] = field(default_factory=dict)  # for the log
    said: dict[str, Any] = field(default_factory=dict)  # what a response repeats of its request
    new_tool_parser: NewToolParser | None = None  # where calls may be among the text

    @property
    def num_outputs(self) -> int:
        """Of all prompts together."""
        return len(self.prompts) * self.best_of


def chat_request(body: ChatBody, model: ServedModel, context_tokens: int) -> GenerationRequest:
    """Applies the chat template. Raises InvalidRequest or ContextLengthExceeded."""
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    use = tool_use_of(body, model)
    prompt = chat_prompt(
        body.messages,
        model,
        context_tokens,
        salt=salt_of(body.cache_salt),
        tools=use.rendered,
        add_generation_prompt=body.add_generation_prompt is not False,
        template_kwargs=body.chat_template_kwargs,
    )
    limit_name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if wanted == 0:
        raise InvalidRequest(f"{limit_name} must be at least 1", param=limit_name)
    left = room(len(prompt), wanted, context_tokens, "messages", limit_name)
    num_top_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    max_tokens = left if wanted is None else wanted
    intake = _intake(body, model, [prompt], max_tokens, num_top_logprobs, forced=use.forced)
    return replace(intake, new_tool_parser=use.new_parser)


def completion_request(body: CompletionBody, model: ServedModel, context_tokens: int) -> GenerationRequest:
    """The prompts as they are. Raises InvalidRequest or ContextLengthExceeded."""
    _check_completion(body)
    prompts = completion_prompts(body, model, context_tokens, salt=salt_of(body.cache_salt))
    left = min(room(len(one), body.max_tokens, context_tokens, "prompt", "max_tokens") for one in prompts)
    max_tokens = min(left, _DEFAULT_COMPLETION_TOKENS) if body.max_tokens is None else body.max_tokens
    echoes = tuple(model.tokenizer.decode(one) for one in prompts) if body.echo else ()
    return _intake(body, model, prompts, max_tokens, body.logprobs, echoes, body.best_of)


def _check_completion(body: CompletionBody) -> None:
    if body.max_tokens == 0 and not body.echo:
        raise InvalidRequest("max_tokens must be at least 1, unless echo is true", param="max_tokens")
    if body.echo and body.logprobs is not None:
        raise InvalidRequest("echo: prompts have no log-probabilities here; leave logprobs or echo out", param="echo")
    if body.best_of is not None and body.best_of < (body.n or 1):
        raise InvalidRequest(f"best_of is less than n, which is {body.n or 1}", param="best_of")
    if body.best_of is not None and body.stream and body.best_of > (body.n or 1):
        raise InvalidRequest("best_of cannot be streamed: the best are known at the end; set n", param="best_of")


def max_values(context_tokens: int) -> int:
    """Of a body: a value or a separator is hardly less than half a token."""
    return 2 * context_tokens + _SPARE_VALUES


def salt_of(cache_salt: str | None) -> bytes:
    """KV is shared among requests of one salt."""
    return (cache_salt or "").encode()


def room(num_prompt: int, wanted: int | None, context_tokens: int, prompt_name: str, limit_name: str) -> int:
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
    body: GenerationBody,
    model: ServedModel,
    prompts: Sequence[tuple[int, ...]],
    max_tokens: int,
    num_top_logprobs: int | None,
    echoes: tuple[str, ...] = (),
    best_of: int | None = None,
    forced: Constraint | None = None,
) -> GenerationRequest:
    num_choices = body.n or 1
    best_of = best_of or num_choices
    if len(prompts) * best_of > _MAX_CHOICES:
        raise InvalidRequest(f"n: prompts times n are more than {_MAX_CHOICES} outputs; send fewer", param="n")
    wanted = _wanted(body, num_top_logprobs is not None)
    if best_of > num_choices and num_top_logprobs is None:
        num_top_logprobs = 0  # the best are told by it
    return GenerationRequest(
        prompts=tuple(prompts),
        sampling=sampling_of(body, model, max_tokens, num_top_logprobs, forced),
        stops=stops_of(body),
        stream=bool(body.stream),
        wanted=wanted,
        num_choices=num_choices,
        best_of=best_of,
        keep_stop=bool(body.include_stop_str_in_output),
        priority=body.priority or 0,
        tenant_salt=salt_of(body.cache_salt),
        echoes=echoes,
        labels=body.model_dump(include=_LABELS, exclude_none=True),
    )


_LABELS = {"user", "metadata", "safety_identifier", "prompt_cache_key"}


def _wanted(body: GenerationBody, logprobs: bool) -> ReplyOptions:
    options = body.stream_options
    if options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream to be true", param="stream_options")
    with_usage = bool(options and options.include_usage)
    running = bool(options and options.continuous_usage_stats)
    if running and not with_usage:
        param = "stream_options.continuous_usage_stats"
        raise InvalidRequest(f"{param} needs include_usage to be true", param=param)
    return ReplyOptions(
        logprobs=logprobs,
        token_ids=bool(body.return_token_ids),
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
        usage="running" if running else "last" if with_usage else "none",
    )
