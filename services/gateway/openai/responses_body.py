"""The body of /v1/responses, limited to text, and the chat that it is equivalent to."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from services.gateway.openai.messages import CalledFunction, CalledTool, Message
from services.gateway.openai.schemas import Bias, ChatBody
from services.gateway.openai.strict_model import Items, Part, at_most_entries, misplaced
from services.gateway.openai.structured_output import JsonSchema, ResponseFormat, StructuredOutputs
from services.gateway.openai.tooling.tools import FunctionDefinition, Name, NamedFunction, NamedTool, Tool, ToolChoice

_MAX_ITEMS = 10_000
_MAX_PARTS = 1_000
_MAX_TOOLS = 128
_MAX_BIASES = 1_024
_MAX_LABELS = 64
_LOGPROBS = "message.output_text.logprobs"


class InputText(Part):
    """One part of an item's content. A part of an earlier output is accepted as it was returned."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    logprobs: list[Any] | None = Field(None, description="of an earlier output; ignored")


class InputMessage(Part):
    """One message. A message of an earlier output is accepted as it was returned."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[Items[InputText], Field(max_length=_MAX_PARTS)]
    id: str | None = None
    status: Literal["completed", "incomplete", "in_progress"] | None = None


class FunctionCall(Part):
    """A call of an earlier output, accepted as it was returned."""

    ignored_names = frozenset(("caller",))

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Literal["completed", "incomplete", "in_progress"] | None = None


class FunctionCallOutput(Part):
    """What a call returned."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Annotated[Items[InputText], Field(max_length=_MAX_PARTS)]
    id: str | None = None
    status: Literal["completed", "incomplete", "in_progress"] | None = None


class ReasoningItem(Part):
    """Reasoning of an earlier output. The template is not given it."""

    ignored_names = frozenset(("id", "summary", "content", "encrypted_content", "status"))

    type: Literal["reasoning"]


def _kind_of_item(item: Any) -> str:
    """The type of an item; a message need not name its own."""
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", "message")
    return kind if isinstance(kind, str) else "message"


Item: TypeAlias = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind_of_item),
]


class FunctionTool(FunctionDefinition):
    """A function that the model may call. Unlike a chat's, it is not wrapped."""

    ignored_names = frozenset(("defer_loading",))

    type: Literal["function"]


class ChosenFunction(Part):
    """The one function that must be called."""

    type: Literal["function"]
    name: Name


class TextFormat(Part):
    """`text.format`. Unlike in a chat's response_format, a JSON schema is not wrapped."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextConfig(Part):
    """`text`: how the output is formatted."""

    format: TextFormat | None = None
    verbosity: str | None = Field(None, description="does nothing: the model decides")


class Reasoning(Part):
    """`reasoning`: what the chat template is told."""

    ignored_names = frozenset(("summary", "generate_summary"))

    effort: str | None = Field(None, max_length=32)


class ResponsesBody(Part):
    """POST /v1/responses."""

    model: str | None = Field(None, description="name of the served model, as in /v1/models; optional")
    input: str | Annotated[Items[Item], Field(min_length=1, max_length=_MAX_ITEMS)] = Field(
        description="the user's text, or messages of text, calls and their results"
    )
    instructions: str | None = Field(None, description="system message before the input")
    max_output_tokens: int | None = Field(None, ge=1, description="default: the model's, or what fits")
    temperature: float | None = Field(None, ge=0, le=1e4, description="0 is greedy; default: the model's, or 1")
    top_p: float | None = Field(None, gt=0, le=1, description="nucleus sampling; default: the model's, or 1")
    top_k: int | None = Field(None, ge=-1, description="0 and -1 are off; default: the model's, or off")
    seed: int | None = Field(None, ge=-(2**63), lt=2**64, description="equal seeds give equal outputs")
    stop: str | Annotated[Items[str], Field(max_length=16)] | None = Field(
        None, description="texts that end the output and are not part of it"
    )
    include_stop_str_in_output: bool | None = Field(None, description="the stop text stays in the output")
    ignore_eos: bool | None = Field(None, description="the end-of-sequence token does not end the output")
    presence_penalty: float | None = Field(None, ge=-2, le=2, description="on tokens that the output has")
    frequency_penalty: float | None = Field(None, ge=-2, le=2, description="on tokens, for each time the output has it")
    repetition_penalty: float | None = Field(
        None, ge=0.01, le=10, description="on tokens of prompt and output; default: the model's, or 1"
    )
    logit_bias: Annotated[dict[str, Bias], BeforeValidator(partial(at_most_entries, _MAX_BIASES))] | None = Field(
        None, description="by token id, added to the logits"
    )
    include: Items[Literal["message.output_text.logprobs"]] | None = Field(None, description=f"`{_LOGPROBS}`")
    top_logprobs: int | None = Field(None, ge=0, le=20, description="likeliest tokens; needs that value in include")
    tools: Annotated[Items[FunctionTool], Field(max_length=_MAX_TOOLS)] | None = Field(
        None, description="functions that the model may call; described in the system message where need be"
    )
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction | None = Field(
        None, description="none, auto, required, or one function by name"
    )
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call; only with a required call")
    text: TextConfig | None = Field(None, description="format: text, json_object or json_schema")
    structured_outputs: StructuredOutputs | None = Field(
        None, description="one of json, json_object, regex, choice, grammar (Lark or GBNF)"
    )
    reasoning: Reasoning | None = Field(None, description="effort: a variable of the chat template")
    skip_special_tokens: bool | None = Field(None, description="false: special tokens are part of the text")
    stream: bool | None = Field(None, description="server-sent events")
    priority: int | None = Field(None, ge=-(2**31), lt=2**31, description="smaller goes first; default 0")
    user: str | None = Field(None, description="a label for the log")
    metadata: Annotated[dict[str, Any], BeforeValidator(partial(at_most_entries, _MAX_LABELS))] | None = Field(
        None, description="labels for the log, which has keyed digests of them"
    )
    safety_identifier: str | None = Field(None, description="a label for the log")
    prompt_cache_key: str | None = Field(None, description="a label for the log; prefixes are found by their tokens")
    cache_salt: str | None = Field(
        None, min_length=1, max_length=256, description="KV is shared only among requests of the same salt"
    )

    @model_validator(mode="after")
    def _check_input(self) -> Self:
        if not isinstance(self.input, str) and all(isinstance(item, ReasoningItem) for item in self.input):
            raise misplaced("input", "reasoning alone is nothing to answer; add a message")
        return self

    def as_chat(self) -> ChatBody:
        """The chat with the same prompt and the same sampling."""
        same = {name: getattr(self, name) for name in type(self).model_fields if name in ChatBody.model_fields}
        return ChatBody.model_construct(
            **{
                **same,
                "messages": self._messages(),
                "tools": [_tool(tool) for tool in self.tools or ()] or None,
                "tool_choice": self._choice(),
                "max_completion_tokens": self.max_output_tokens,
                "logprobs": bool(self.include),
                "response_format": self._format(),
                "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
            }
        )

    def _messages(self) -> list[Message]:
        items = [InputMessage(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        messages = [Message(role="system", content=self.instructions)] if self.instructions is not None else []
        for item in items:
            match item:
                case FunctionCall():
                    _add_call(messages, item)
                case FunctionCallOutput():
                    messages.append(Message(role="tool", tool_call_id=item.call_id, content=_text(item.output)))
                case InputMessage():
                    messages.append(Message(role=item.role, content=_text(item.content)))
        return messages

    def _choice(self) -> ToolChoice | None:
        if not isinstance(self.tool_choice, ChosenFunction):
            return self.tool_choice
        return NamedTool(type="function", function=NamedFunction(name=self.tool_choice.name))

    def _format(self) -> ResponseFormat | None:
        form = None if self.text is None else self.text.format
        if form is None or form.type == "text":
            return None
        schema = JsonSchema(name=form.name or "", schema=form.schema_) if form.type == "json_schema" else None
        return ResponseFormat(type=form.type, json_schema=schema)


def _text(content: str | list[InputText]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _add_call(messages: list[Message], call: FunctionCall) -> None:
    """Adds a call to the assistant's message, or as one of its own. An output has its text and its calls in a row."""
    called = CalledTool(id=call.call_id, function=CalledFunction(name=call.name, arguments=call.arguments))
    if not messages or messages[-1].role != "assistant":
        messages.append(Message(role="assistant", tool_calls=[called]))
    elif messages[-1].tool_calls:
        messages[-1].tool_calls.append(called)
    else:
        messages[-1] = messages[-1].model_copy(update={"tool_calls": [called]})


def _tool(tool: FunctionTool) -> Tool:
    function = FunctionDefinition(
        name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict
    )
    return Tool(type="function", function=function)
