"""The body of /v1/responses, limited to text, and the chat that it is equivalent to."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import Discriminator, Field, Tag, model_validator

from services.gateway.openai.bodies.messages import CalledFunction, CalledTool, Message
from services.gateway.openai.bodies.schemas import ChatBody, OpenAIBody
from services.gateway.openai.bodies.strict_model import Items, Part, misplaced
from services.gateway.openai.bodies.structured_output import JsonSchema, ResponseFormat
from services.gateway.openai.bodies.tools import (
    AllowedChoice,
    AllowedTools,
    FunctionDefinition,
    Name,
    NamedFunction,
    NamedTool,
    Tool,
    ToolChoice,
)

_MAX_ITEMS = 10_000
_MAX_PARTS = 1_000
_MAX_TOOLS = 128
_LOGPROBS = "message.output_text.logprobs"

Included: TypeAlias = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]
"""What clients ask for in addition. All but the first is of things that are not there, or in the output already."""


class InputText(Part):
    """One part of an item's content. A part of an earlier output is accepted as it was returned."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    logprobs: list[Any] | None = Field(None, description="of an earlier output; ignored")


class InputMessage(Part):
    """One message. A message of an earlier output is accepted as it was returned."""

    ignored_names = frozenset(("phase",))

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[Items[InputText], Field(max_length=_MAX_PARTS)]
    id: str | None = None
    status: Literal["completed", "incomplete", "in_progress"] | None = None


class FunctionCall(Part):
    """A call of an earlier output, accepted as it was returned."""

    ignored_names = frozenset(("caller", "namespace"))

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


class ReasoningText(Part):
    """One part of reasoning."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Part):
    """Reasoning of an earlier output, given to the chat template with what it led to."""

    ignored_names = frozenset(("id", "summary", "encrypted_content", "status"))

    type: Literal["reasoning"]
    content: Annotated[Items[ReasoningText], Field(max_length=_MAX_PARTS)] | None = None

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(part.text for part in self.content or ())


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


class AllowedFunctions(Part):
    """The functions that may be called, or of which one must be."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[Items[ChosenFunction], Field(min_length=1, max_length=_MAX_TOOLS)]


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


class ResponsesBody(OpenAIBody):
    """POST /v1/responses."""

    input: str | Annotated[Items[Item], Field(min_length=1, max_length=_MAX_ITEMS)] = Field(
        description="the user's text, or messages of text, calls and their results"
    )
    instructions: str | None = Field(None, description="system message before the input; not kept for later turns")
    previous_response_id: str | None = Field(
        None, max_length=128, description="the response that this one goes on from, with all turns before it"
    )
    store: bool | None = Field(None, description="whether the response is kept; default true, if the server keeps any")
    background: bool | None = Field(None, description="true: the response is returned at once, and computed later")
    max_output_tokens: int | None = Field(None, ge=1, description="default: the model's, or what fits")
    include: Annotated[Items[Included], Field(max_length=_MAX_TOOLS)] | None = Field(
        None, description=f"`{_LOGPROBS}`; OpenAI's other values add nothing"
    )
    top_logprobs: int | None = Field(None, ge=0, le=20, description="likeliest tokens; needs that value in include")
    tools: Annotated[Items[FunctionTool], Field(max_length=_MAX_TOOLS)] | None = Field(
        None, description="functions that the model may call; described in the system message where need be"
    )
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction | AllowedFunctions | None = Field(
        None, description="none, auto, required, one function by name, or allowed_tools"
    )
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call")
    text: TextConfig | None = Field(None, description="format: text, json_object or json_schema")
    reasoning: Reasoning | None = Field(None, description="effort: a variable of the chat template")

    @model_validator(mode="after")
    def _check_input(self) -> Self:
        if not isinstance(self.input, str) and all(isinstance(item, ReasoningItem) for item in self.input):
            raise misplaced("input", "reasoning alone is nothing to answer; add a message")
        if self.top_logprobs and not self.wants_logprobs:
            raise misplaced("top_logprobs", f"include has to hold {_LOGPROBS}")
        return self

    @property
    def wants_logprobs(self) -> bool:
        """Whether the output's log-probabilities are asked for."""
        return _LOGPROBS in (self.include or ())

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
                "logprobs": self.wants_logprobs,
                "response_format": self._format(),
                "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
            }
        )

    def _messages(self) -> list[Message]:
        items = [InputMessage(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        messages = [Message(role="system", content=self.instructions)] if self.instructions is not None else []
        thought: str | None = None  # of the assistant's message that follows
        for item in items:
            match item:
                case ReasoningItem():
                    thought = (thought or "") + item.text or None
                    continue
                case FunctionCall():
                    _add_call(messages, item, thought)
                case FunctionCallOutput():
                    messages.append(Message(role="tool", tool_call_id=item.call_id, content=_text(item.output)))
                case InputMessage():
                    own = thought if item.role == "assistant" else None
                    messages.append(Message(role=item.role, content=_text(item.content), reasoning_content=own))
            thought = None
        return messages

    def _choice(self) -> ToolChoice | None:
        match self.tool_choice:
            case ChosenFunction() as one:
                return _named(one)
            case AllowedFunctions(mode=mode, tools=tools):
                allowed = AllowedTools(mode=mode, tools=[_named(tool) for tool in tools])
                return AllowedChoice(type="allowed_tools", allowed_tools=allowed)
            case choice:
                return choice

    def _format(self) -> ResponseFormat | None:
        form = None if self.text is None else self.text.format
        if form is None or form.type == "text":
            return None
        schema = JsonSchema(name=form.name or "", schema=form.schema_) if form.type == "json_schema" else None
        return ResponseFormat(type=form.type, json_schema=schema)


def _text(content: str | list[InputText]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _add_call(messages: list[Message], call: FunctionCall, thought: str | None) -> None:
    """Adds a call to the assistant's message, or as one of its own. An output has its text and its calls in a row."""
    called = CalledTool(id=call.call_id, function=CalledFunction(name=call.name, arguments=call.arguments))
    if not messages or messages[-1].role != "assistant":
        messages.append(Message(role="assistant", tool_calls=[called], reasoning_content=thought))
    elif messages[-1].tool_calls:
        messages[-1].tool_calls.append(called)
    else:
        messages[-1] = messages[-1].model_copy(update={"tool_calls": [called]})


def _named(function: ChosenFunction) -> NamedTool:
    return NamedTool(type="function", function=NamedFunction(name=function.name))


def _tool(tool: FunctionTool) -> Tool:
    function = FunctionDefinition(
        name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict
    )
    return Tool(type="function", function=function)
