"""The bodies of the OpenAI API's requests: names, types and ranges. Strict: "5" is not 5, true is not 1."""

from __future__ import annotations

from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

_STRICT = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, hide_input_in_errors=True)


NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "service_tier": ("auto", "default"),
    "store": (False,),
}
"""Parameters that are known and not supported: accepted at these values and at null, where they change nothing."""

_MAX_MESSAGES = 10_000
_MAX_PARTS = 1_000
_MAX_PROMPTS = 1_000
_MAX_PROMPT_TOKENS = 2_000_000
_MAX_STOPS = 16
_MAX_STOP_TOKENS = 1_024
_MAX_BIASES = 1_024
_MAX_NAMES = 64

Item = TypeVar("Item")
Items: TypeAlias = Annotated[list[Item], Field(fail_fast=True)]
"""A list whose first wrong item is the only one reported: a body may hold a million of them."""


class Part(BaseModel):
    """An object of a body."""

    model_config = _STRICT

    @model_validator(mode="before")
    @classmethod
    def _refuse_a_flood_of_names(cls, found: Any) -> Any:
        """Each unknown name would become an error of its own."""
        if isinstance(found, dict) and len(found) > _MAX_NAMES:
            first = next(name for name in found if name not in cls.model_fields)
            raise PydanticCustomError("too_many_names", "too many names", {"first": first})
        return found


class TextPart(Part):
    """One part of a message's content."""

    type: Literal["text"]
    text: str


class Message(Part):
    """One message of a chat. Tools are not supported: neither is the role of their results."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[Items[TextPart], Field(max_length=_MAX_PARTS)] | None = None
    name: None = None
    tool_call_id: None = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None
    function_call: None = None
    refusal: None = None
    audio: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None

    @property
    def text(self) -> str:
        """The content's text."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class StreamOptions(Part):
    """What a stream carries besides its text."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


def _few_biases(found: Any) -> Any:
    """pydantic itself counts a dict's entries after it has collected the errors of them all."""
    if isinstance(found, dict) and len(found) > _MAX_BIASES:
        raise PydanticCustomError("too_long", "at most {max_length}", {"max_length": _MAX_BIASES})
    return found


class GenerationBody(Part):
    """What both endpoints take. Null is the same as absent."""

    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stop: str | Annotated[Items[str], Field(max_length=_MAX_STOPS)] | None = None
    stop_token_ids: Annotated[Items[int], Field(max_length=_MAX_STOP_TOKENS)] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(None, ge=0)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.01, le=10)
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], BeforeValidator(_few_biases)] | None = (
        None
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None  # not OpenAI's: the output's token ids, in `choices[].token_ids`
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: Annotated[Items[Message], Field(min_length=1, max_length=_MAX_MESSAGES)]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: (
        str
        | Annotated[Items[int], Field(max_length=_MAX_PROMPT_TOKENS)]
        | Annotated[Items[str], Field(max_length=_MAX_PROMPTS)]
        | Annotated[Items[Items[int]], Field(max_length=_MAX_PROMPTS)]
    )
    logprobs: int | None = Field(None, ge=0, le=5)


def _is_union(annotation: Any) -> bool:
    """Whether pydantic puts the branch's name into an error's location: not so where only null is the other one."""
    return get_origin(annotation) in (Union, UnionType) and len({*get_args(annotation)} - {NoneType}) > 1


UNION_FIELDS = frozenset(
    name
    for schema in (ChatBody, CompletionBody, Message, TextPart, StreamOptions)
    for name, field in schema.model_fields.items()
    if _is_union(field.annotation)
)
"""Fields that take values of several types."""
