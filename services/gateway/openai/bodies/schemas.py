"""Schemas of the generating endpoints' bodies: names, types and ranges. Null means absent."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from halfmoon.kv.kv_policy import PATTERN
from services.gateway.openai.bodies.messages import Message, RenderedChat
from services.gateway.openai.bodies.strict_model import Items, Part, at_most_entries
from services.gateway.openai.bodies.structured_output import ResponseFormat, StructuredOutputs
from services.gateway.openai.bodies.tools import ToolChoice, Tools

_MAX_MESSAGES = 10_000
_MAX_PROMPTS = 1_000
_MAX_PROMPT_TOKENS = 2_000_000
_MAX_STOPS = 16
_MAX_STOP_TOKENS = 1_024
_MAX_BIASES = 1_024
_MAX_ALLOWED = 200_000
_MAX_BAD_WORDS = 128
_MAX_CHOICES = 128
_MAX_LOGPROBS = 20
_MAX_LABELS = 64

Prompt = (
    str
    | Annotated[Items[int], Field(max_length=_MAX_PROMPT_TOKENS)]
    | Annotated[Items[str], Field(max_length=_MAX_PROMPTS)]
    | Annotated[Items[Items[int]], Field(max_length=_MAX_PROMPTS)]
)
Bias = Annotated[float, Field(ge=-100, le=100)]
BadWord = Annotated[str, Field(min_length=1, max_length=256)]


class StreamOptions(Part):
    """What a stream carries in addition to its text."""

    include_usage: bool | None = Field(None, description="adds a last chunk with the usage")
    continuous_usage_stats: bool | None = Field(None, description="the usage so far in every chunk")
    include_obfuscation: bool | None = Field(None, description="does nothing: there is no padding")


class ComputedBody(Part):
    """Parameters of all endpoints that need workers."""

    model: str | None = Field(None, description="name of the served model, as in /v1/models; optional")
    priority: int | None = Field(None, ge=-(2**31), lt=2**31, description="smaller goes first; default 0")
    cache_salt: str | None = Field(
        None, min_length=1, max_length=256, description="KV is shared only among requests of the same salt"
    )
    kv_policy: str | None = Field(
        None,
        max_length=32,
        json_schema_extra={"pattern": f"^({PATTERN})$"},
        description="sinks:S+W: KV of the first S and the latest W tokens alone is kept; snapkv:B+W: of the B that the "
        "prompt's end attends to; h2o:B+W: that all of it attends to; whole: all of it; default: what the class says, "
        "or whole",
    )


class TokenizedBody(Part):
    """How a prompt of text becomes tokens, and how many."""

    add_special_tokens: bool | None = Field(
        None, description="the tokenizer's special tokens around a prompt of text; default true"
    )
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, description="a longer prompt is cut to this many tokens; -1: to what leaves room for one more"
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="which end of the prompt is cut off; default left"
    )


class SampledBody(ComputedBody):
    """Parameters of all generating endpoints, Anthropic's too."""

    temperature: float | None = Field(None, ge=0, le=1e4, description="0 is greedy; default: the model's, or 1")
    top_p: float | None = Field(None, gt=0, le=1, description="nucleus sampling; default: the model's, or 1")
    top_k: int | None = Field(None, ge=-1, description="0 and -1 are off; default: the model's, or off")
    seed: int | None = Field(None, ge=-(2**63), lt=2**64, description="equal seeds give equal outputs")
    stream: bool | None = Field(None, description="server-sent events")


class OpenAIBody(SampledBody):
    """Parameters of all of OpenAI's generating endpoints."""

    min_p: float | None = Field(
        None,
        ge=0,
        le=1,
        description="minimum probability, relative to the likeliest token's; default: the model's, or 0",
    )
    stop: str | Annotated[Items[str], Field(max_length=_MAX_STOPS)] | None = Field(
        None, description="texts that end the output and are not part of it"
    )
    include_stop_str_in_output: bool | None = Field(None, description="the stop text stays in the output")
    stop_token_ids: Annotated[Items[int], Field(max_length=_MAX_STOP_TOKENS)] | None = Field(
        None, description="tokens that end the output"
    )
    ignore_eos: bool | None = Field(None, description="the end-of-sequence token does not end the output")
    min_tokens: int | None = Field(
        None, ge=0, description="minimum number of tokens before a token or a stop string may end the output"
    )
    presence_penalty: float | None = Field(None, ge=-2, le=2, description="on tokens that the output has")
    frequency_penalty: float | None = Field(None, ge=-2, le=2, description="on tokens, for each time the output has it")
    repetition_penalty: float | None = Field(
        None, ge=0.01, le=10, description="on tokens of prompt and output; default: the model's, or 1"
    )
    logit_bias: Annotated[dict[str, Bias], BeforeValidator(partial(at_most_entries, _MAX_BIASES))] | None = Field(
        None, description="by token id, added to the logits"
    )
    allowed_token_ids: Annotated[Items[int], Field(min_length=1, max_length=_MAX_ALLOWED)] | None = Field(
        None,
        description="no other tokens are drawn, ends of sequence neither; where `min_tokens` or `bad_words` ban all of"
        " them, these give way; not with a structured output",
    )
    bad_words: Annotated[Items[BadWord], Field(max_length=_MAX_BAD_WORDS)] | None = Field(
        None, description="texts that the output does not have, as far as their tokens are the usual ones"
    )
    structured_outputs: StructuredOutputs | None = Field(
        None, description="one of json, json_object, regex, choice, grammar (Lark or GBNF)"
    )
    skip_special_tokens: bool | None = Field(None, description="false: special tokens are part of the text")
    user: str | None = Field(None, description="a label for the log")
    metadata: Annotated[dict[str, Any], BeforeValidator(partial(at_most_entries, _MAX_LABELS))] | None = Field(
        None, description="labels for the log, which has keyed digests of them"
    )
    safety_identifier: str | None = Field(None, description="a label for the log")
    prompt_cache_key: str | None = Field(None, description="a label for the log; prefixes are found by their tokens")


class GenerationBody(OpenAIBody, TokenizedBody):
    """Parameters of chats and completions."""

    max_tokens: int | None = Field(
        None, ge=0, description="maximum number of output tokens; what does not fit beside the prompt is cut"
    )
    n: int | None = Field(None, ge=1, le=_MAX_CHOICES, description="choices for each prompt; choice i has seed + i")
    response_format: ResponseFormat | None = Field(None, description="json_object, json_schema or text")
    stream_options: StreamOptions | None = Field(None, description="include_usage, continuous_usage_stats")
    return_token_ids: bool | None = Field(
        None, description="choices carry `token_ids`, and for the prompt `prompt_token_ids`"
    )
    return_tokens_as_token_ids: bool | None = Field(None, description="logprobs name tokens `token_id:5`")
    return_timing: bool | None = Field(
        None, description="the end carries `timing`, in seconds: queue, prefill, TTFT, mean TBT, all"
    )
    prompt_logprobs: int | None = Field(
        None,
        ge=0,
        le=_MAX_LOGPROBS,
        description="the same for the prompt's tokens, which are all computed; not streamed",
    )


class ChatBody(GenerationBody, RenderedChat):
    """POST /v1/chat/completions."""

    messages: Annotated[Items[Message], Field(min_length=1, max_length=_MAX_MESSAGES)] = Field(
        description="rendered by the model's chat template"
    )
    max_completion_tokens: int | None = Field(
        None, ge=1, description="overrides max_tokens; default: the model's, or what fits"
    )
    logprobs: bool | None = Field(None, description="log-probabilities of the output's tokens")
    top_logprobs: int | None = Field(
        None, ge=0, le=_MAX_LOGPROBS, description="also for this many likeliest tokens; needs logprobs"
    )
    include_reasoning: bool | None = Field(None, description="false: what the model thinks is left out of the answer")
    tools: Tools | None = Field(
        None, description="functions that the model may call; in the system message if its chat template has no place"
    )
    tool_choice: ToolChoice | None = Field(None, description="none, auto, required, one tool by name, or allowed_tools")
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call")
    add_special_tokens: bool | None = Field(
        None, description="the tokenizer's special tokens around what the template writes; default false"
    )
    echo: Literal[False] | None = None


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Prompt = Field(description="text or token ids, one prompt or several")
    logprobs: int | None = Field(
        None, ge=0, le=_MAX_LOGPROBS, description="log-probabilities of the tokens and of this many likeliest ones"
    )
    best_of: int | None = Field(
        None,
        ge=1,
        le=_MAX_CHOICES,
        description="number of outputs, of which the n with the highest mean logprob are returned",
    )
    echo: bool | None = Field(
        None, description="the text begins with the prompt, and logprobs with those of its tokens"
    )

    @property
    def wants_prompt_alone(self) -> bool:
        """Whether a worker is needed without an output, for log-probabilities of the prompt."""
        return self.max_tokens == 0 and (self.logprobs is not None or self.prompt_logprobs is not None)
