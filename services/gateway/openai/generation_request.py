"""From a body to what is to be generated: prompts, how to sample, and how to answer.

Pure functions: the caller decides which thread a long prompt may keep busy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from halfmoon.errors import InvalidRequest
from halfmoon.pb.types_pb2 import SamplingParams
from halfmoon.policy.placement.place import ContextLengthExceeded
from services.gateway.openai.bodies.schemas import ChatBody, CompletionBody, GenerationBody
from services.gateway.openai.prompts import chat_prompt, completion_prompts
from services.gateway.openai.requested_constraint import RequestedConstraint, constraint_of
from services.gateway.openai.sampling import sampling_of, stops_of
from services.gateway.openai.served_model import ServedModel, SpecialTokens
from services.gateway.openai.tooling.tool_use import tool_format_of, tool_use_of
from services.gateway.replies.call_parts import NewToolParser, ToolParser
from services.gateway.replies.embeddings_format import EmbeddingOptions
from services.gateway.replies.harmony import ANSWER_HEADER, HarmonyMessages
from services.gateway.replies.reasoning import ReasoningSplitter
from services.gateway.replies.reply_format import ReplyOptions
from services.gateway.replies.tool_parsers import FirstCall

_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's
_SPARE_VALUES = 100_000  # JSON values beside the prompt
_MOST_PROMPT_LOGPROBS = 250_000  # of a request: a worker sends a prompt's in one message, and a reply has them all
_MOST_ECHOED_CHARS = 1 << 24  # of prompts in all outputs, each of which begins with its own
_CHARS_PER_ID = 8
_MAX_CHOICES = 1_024  # outputs of all prompts together


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What to generate, as a body says it: tokenized prompts, how to sample, and how to answer."""

    prompts: tuple[tuple[int, ...], ...] = ()  # token ids
    sampling: SamplingParams = field(default_factory=SamplingParams)  # its max_tokens may be more than fit
    constraint: RequestedConstraint | None = None  # of the output, to be checked; `sampling` has it, too
    stops: tuple[str, ...] = ()
    stream: bool = False
    reply_options: ReplyOptions = field(default_factory=ReplyOptions)
    num_choices: int = 1  # for each prompt
    best_of: int = 1  # outputs for each prompt; the best `num_choices` are returned
    keep_stop: bool = False  # stop strings stay in the text
    special_tokens: SpecialTokens = "hidden"
    priority: int = 0
    only_prompt: bool = False  # the workers' one token is dropped
    embedding: EmbeddingOptions | None = None  # what is made of the prompts; None: an output
    prompt_texts: tuple[str, ...] = ()  # empty unless the prompts are echoed
    labels: dict[str, Any] = field(default_factory=dict)  # for the log
    echoed: dict[str, Any] = field(default_factory=dict)  # fields that the response repeats from the body
    new_tool_parser: NewToolParser | None = None  # None: no tool calls in the text
    reasoning_tags: tuple[int | None, int] | None = None  # tokens around reasoning; no first one: it has begun
    context_tokens: int = 1 << 31  # most tokens of a prompt and its output together

    @property
    def num_outputs(self) -> int:
        """Outputs of all prompts together."""
        return len(self.prompts) * self.best_of


NOT_TOKENIZED = GenerationRequest()


def chat_request(body: ChatBody, model: ServedModel, context_tokens: int, salt: bytes) -> GenerationRequest:
    """The request of a chat, after its template. Raises InvalidRequest or ContextLengthExceeded."""
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    use = tool_use_of(body, model)
    prompt = chat_prompt(body, use.messages, model, context_tokens, salt=salt, tools=use.rendered)
    constraint = use.forced or constraint_of(body.response_format, body.structured_outputs)
    has_channels = tool_format_of(body, model) == "harmony" and not body.continue_final_message
    if has_channels and constraint is not None:
        prompt = prompt._replace(
            token_ids=(*prompt.token_ids, *model.tokenizer.encode(ANSWER_HEADER, with_special=False))
        )
    limit_name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if limit == 0:
        raise InvalidRequest(f"{limit_name} must be at least 1", param=limit_name)
    left = _room(len(prompt.token_ids), context_tokens, "messages")
    num_top_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    max_tokens = limit or model.defaults.max_new_tokens or left
    tags = model.reasoning_tags if model.reasons and not prompt.ends_reasoning else None
    generation = _generation(
        body,
        model,
        context_tokens,
        [prompt.token_ids],
        max_tokens,
        num_top_logprobs,
        constraint=constraint,
        tags=tags and (None if prompt.begins_reasoning else tags[0], tags[1]),
    )
    if use.needs_marks and generation.special_tokens == "hidden":
        generation = replace(generation, special_tokens="marks")
    is_shown = body.include_reasoning is not False
    if has_channels and constraint is None:
        return _in_channels(generation, is_shown=is_shown, one_call=body.parallel_tool_calls is False)
    if not model.reasons or (constraint is not None and tags is None):  # it begins with the answer
        return replace(generation, new_tool_parser=use.new_parser)
    new_parser = partial(_splitter, use.new_parser, is_begun=prompt.begins_reasoning, is_shown=is_shown)
    return replace(generation, new_tool_parser=new_parser)


def _in_channels(generation: GenerationRequest, *, is_shown: bool, one_call: bool) -> GenerationRequest:
    def new_parser() -> ToolParser:
        messages = HarmonyMessages(is_shown=is_shown)
        return FirstCall(messages) if one_call else messages

    seen = "marks" if generation.special_tokens == "hidden" else generation.special_tokens
    return replace(generation, new_tool_parser=new_parser, special_tokens=seen)


def _splitter(new_parser: NewToolParser | None, *, is_begun: bool, is_shown: bool) -> ReasoningSplitter:
    return ReasoningSplitter(new_parser and new_parser(), is_begun=is_begun, is_shown=is_shown)


def equivalent_chat_request(
    chat: ChatBody, own_names: Mapping[str, str], model: ServedModel, context_tokens: int, salt: bytes
) -> GenerationRequest:
    """The request of a chat that stands for another endpoint's body, where some parameters have other names.

    Raises InvalidRequest or ContextLengthExceeded with those names.
    """
    with with_own_names(own_names):
        generation = chat_request(chat, model, context_tokens, salt)
    constraint = generation.constraint
    named = constraint and constraint._replace(param=own_names.get(constraint.param, constraint.param))
    return replace(generation, constraint=named)


@contextmanager
def with_own_names(own_names: Mapping[str, str]) -> Iterator[None]:
    """Renames the parameter of an InvalidRequest that is raised inside."""
    try:
        yield
    except InvalidRequest as error:
        param = error.param or ""
        own = own_names.get(param, param)
        message = error.message.replace(param, own, 1) if param else error.message
        raise type(error)(message, param=own or None) from error


def completion_request(body: CompletionBody, model: ServedModel, context_tokens: int, salt: bytes) -> GenerationRequest:
    """The request of a completion, without a template. Raises InvalidRequest or ContextLengthExceeded."""
    _check_completion(body)
    prompts = completion_prompts(body, model, context_tokens, salt=salt)
    for prompt in prompts:
        _room(len(prompt), context_tokens, "prompt")
    max_tokens = _DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    prompt_texts = tuple(model.tokenizer.decode(prompt) for prompt in prompts) if body.echo else ()
    max_tokens = 1 if body.wants_prompt_alone else max_tokens
    generation = _generation(
        body,
        model,
        context_tokens,
        prompts,
        max_tokens,
        body.logprobs,
        prompt_texts,
        body.best_of,
        constraint_of(body.response_format, body.structured_outputs),
    )
    return replace(generation, only_prompt=body.wants_prompt_alone)


def _check_completion(body: CompletionBody) -> None:
    if body.max_tokens == 0 and not body.echo:
        raise InvalidRequest("max_tokens must be at least 1, unless echo is true", param="max_tokens")
    if body.best_of is not None and body.best_of < (body.n or 1):
        raise InvalidRequest(f"best_of is less than n, which is {body.n or 1}", param="best_of")
    if body.best_of is not None and body.stream and body.best_of > (body.n or 1):
        raise InvalidRequest("best_of cannot be streamed: the best are known at the end; set n", param="best_of")


def max_values(context_tokens: int) -> int:
    """Most JSON values of a body that can fit: a value or a separator is rarely less than half a token."""
    return 2 * context_tokens + _SPARE_VALUES


def _room(num_prompt: int, context_tokens: int, prompt_name: str) -> int:
    """Output tokens that still fit into the context. Raises ContextLengthExceeded when not even one does."""
    if num_prompt == 0:
        raise InvalidRequest(f"{prompt_name} gave no tokens", param=prompt_name)
    left = context_tokens - num_prompt
    if left < 1:
        figures = f"the context length is {context_tokens} tokens, the prompt has {num_prompt}"
        raise ContextLengthExceeded(f"{figures}: no room for output; shorten {prompt_name}", param=prompt_name)
    return left


def _generation(
    body: GenerationBody,
    model: ServedModel,
    context_tokens: int,
    prompts: Sequence[tuple[int, ...]],
    max_tokens: int,
    num_top_logprobs: int | None,
    prompt_texts: tuple[str, ...] = (),
    best_of: int | None = None,
    constraint: RequestedConstraint | None = None,
    tags: tuple[int | None, int] | None = None,
) -> GenerationRequest:
    """tags: those of `GenerationRequest`. A constraint does not bind the reasoning."""
    num_choices = body.n or 1
    best_of = best_of or num_choices
    if len(prompts) * best_of > _MAX_CHOICES:
        raise InvalidRequest(f"n: prompts times n are more than {_MAX_CHOICES} outputs; send fewer", param="n")
    if best_of > 1:
        _check_repetition(prompts, prompt_texts, best_of, with_ids=bool(body.return_token_ids))
    if constraint is not None and tags is not None:
        bound = replace(constraint.constraint, begins_reasoning=tags[0], ends_reasoning=tags[1])
        constraint = constraint._replace(constraint=bound)
    reply_options = _reply_options(body, logprobs=num_top_logprobs is not None)
    num_prompt_logprobs = _num_prompt_logprobs(body, num_top_logprobs if prompt_texts else None, prompts, best_of)
    if best_of > num_choices and num_top_logprobs is None:
        num_top_logprobs = 0  # ranks the outputs
    return GenerationRequest(
        prompts=tuple(prompts),
        context_tokens=context_tokens,
        sampling=sampling_of(
            body,
            model,
            min(max_tokens, context_tokens),
            num_top_logprobs,
            constraint and constraint.message,
            num_prompt_logprobs,
        ),
        constraint=constraint,
        reasoning_tags=tags,
        stops=stops_of(body),
        stream=bool(body.stream),
        reply_options=reply_options,
        num_choices=num_choices,
        best_of=best_of,
        keep_stop=bool(body.include_stop_str_in_output),
        special_tokens="shown" if body.skip_special_tokens is False else "hidden",
        priority=body.priority or 0,
        prompt_texts=prompt_texts,
        labels=body.model_dump(include=_LABELS, exclude_none=True),
    )


def _check_repetition(
    prompts: Sequence[tuple[int, ...]], prompt_texts: Sequence[str], num_outputs: int, *, with_ids: bool
) -> None:
    """Raises InvalidRequest where repeating the prompts in each of their outputs would be too much."""
    num_chars = sum(map(len, prompt_texts)) + (sum(map(len, prompts)) * _CHARS_PER_ID if with_ids else 0)
    if num_chars * num_outputs > _MOST_ECHOED_CHARS:
        why = f"each output begins with its prompt, {num_chars * num_outputs} characters in all"
        raise InvalidRequest(f"n: {why}; at most {_MOST_ECHOED_CHARS} are sent: send a smaller n", param="n")


def _num_prompt_logprobs(
    body: GenerationBody, num_echoed: int | None, prompts: Sequence[tuple[int, ...]], num_outputs: int
) -> int | None:
    """How many likeliest tokens are wanted at each of the prompt's; None: no log-probabilities of it at all."""
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequest("prompt_logprobs are not streamed; leave stream out", param="prompt_logprobs")
    wanted = [number for number in (body.prompt_logprobs, num_echoed) if number is not None]
    if not wanted:
        return None
    if sum(map(len, prompts)) * num_outputs * (max(wanted) + 1) > _MOST_PROMPT_LOGPROBS:
        why = f"log-probabilities of prompts: at most {_MOST_PROMPT_LOGPROBS} in all outputs, likeliest tokens counted"
        raise InvalidRequest(f"{why}; send fewer or shorter ones, or a smaller n", param="logprobs")
    return max(wanted)


_LABELS = {"user", "metadata", "safety_identifier", "prompt_cache_key"}


def _reply_options(body: GenerationBody, *, logprobs: bool) -> ReplyOptions:
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
        prompt_logprobs=body.prompt_logprobs is not None,
        token_ids=bool(body.return_token_ids),
        timing=bool(body.return_timing),
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
        usage="running" if running else "last" if with_usage else "none",
    )
