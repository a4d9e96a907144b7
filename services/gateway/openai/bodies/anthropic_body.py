"""The bodies of /v1/messages, as Anthropic's clients send them, and the chat that each is equivalent to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from services.gateway.openai.bodies.messages import CalledFunction, CalledTool, Message
from services.gateway.openai.bodies.schemas import ChatBody, SampledBody
from services.gateway.openai.bodies.strict_model import Items, Part, misplaced
from services.gateway.openai.bodies.structured_output import JsonSchema, ResponseFormat
from services.gateway.openai.bodies.tools import FunctionDefinition, Name, NamedFunction, NamedTool, Tool, ToolChoice

_MAX_MESSAGES = 10_000
_MAX_BLOCKS = 1_000
_MAX_TOOLS = 128
_MAX_CALLS = 128
_MAX_STOPS = 16
OWN_NAMES = {
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "stop": "stop_sequences",
    "continue_final_message": "messages",
}
"""Parameters of the equivalent chat, as they are called here."""

_CACHED = frozenset(("cache_control",))


class TextBlock(Part):
    """A text."""

    ignored_names = _CACHED | {"citations"}

    type: Literal["text"]
    text: str


class ThinkingBlock(Part):
    """Reasoning of an earlier answer."""

    ignored_names = frozenset(("signature", "data"))

    type: Literal["thinking", "redacted_thinking"]
    thinking: str = ""


class ToolUseBlock(Part):
    """A call of an earlier answer."""

    ignored_names = _CACHED | {"caller"}

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(Part):
    """What an earlier call returned."""

    ignored_names = _CACHED

    type: Literal["tool_result"]
    tool_use_id: str
    is_error: bool | None = Field(None, description="the model is told so before the content")
    content: str | Annotated[Items[TextBlock], Field(max_length=_MAX_BLOCKS)] | None = None


Block: TypeAlias = Annotated[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]


class Turn(Part):
    """One message of the conversation."""

    role: Literal["user", "assistant"]
    content: str | Annotated[Items[Block], Field(max_length=_MAX_BLOCKS)]

    @model_validator(mode="after")
    def _check_blocks(self) -> Self:
        own = ToolResultBlock if self.role == "user" else (ToolUseBlock, ThinkingBlock)
        for block in () if isinstance(self.content, str) else self.content:
            if not isinstance(block, TextBlock) and not isinstance(block, own):
                raise misplaced("content", f"the role {self.role!r} has no block of the type {block.type!r}")
        if sum(isinstance(block, ToolUseBlock) for block in self.content) > _MAX_CALLS:
            raise misplaced("content", f"at most {_MAX_CALLS} calls in one message")
        return self


class DescribedTool(Part):
    """A function that the model may call."""

    ignored_names = _CACHED | {
        *("strict", "eager_input_streaming", "defer_loading", "allowed_callers", "input_examples")
    }

    type: Literal["custom"] | None = Field(None, description="tools that Anthropic runs itself have others")
    name: Name
    description: str | None = None
    input_schema: dict[str, Any]


class ChosenTool(Part):
    """Whether and which tool is called."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = Field(None, description="with the type tool")
    disable_parallel_tool_use: bool | None = None


class Thinking(Part):
    """Reasoning before the answer, of a model that reasons."""

    ignored_names = frozenset(("display", "budget_tokens"))  # the model decides how long it thinks

    type: Literal["enabled", "adaptive", "disabled"]

    def template_variables(self) -> dict[str, bool]:
        """Under both names that chat templates have for it."""
        is_on = self.type != "disabled"
        return {"enable_thinking": is_on, "thinking": is_on}


class Labels(Part):
    """`metadata`."""

    user_id: str | None = None


class OutputFormat(Part):
    """The form of the answer."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Part):
    """How the answer is written."""

    effort: str | None = Field(None, max_length=32)
    format: OutputFormat | None = None


class CountedBody(Part):
    """POST /v1/messages/count_tokens."""

    model: str | None = Field(None, description="name of the served model, as in /v1/models; optional")
    messages: Annotated[Items[Turn], Field(min_length=1, max_length=_MAX_MESSAGES)] = Field(
        description="text, tool calls and their results; a last message of the assistant is continued"
    )
    system: str | Annotated[Items[TextBlock], Field(max_length=_MAX_BLOCKS)] | None = Field(
        None, description="the system message"
    )
    tools: Annotated[Items[DescribedTool], Field(max_length=_MAX_TOOLS)] | None = Field(
        None, description="functions that the model may call"
    )
    tool_choice: ChosenTool | None = Field(None, description="auto, any, one tool by name, or none")
    thinking: Thinking | None = Field(
        None,
        description="enabled, adaptive or disabled: variables of the chat template, `enable_thinking` and `thinking`",
    )
    output_config: OutputConfig | None = Field(
        None, description="effort: a variable of the chat template; format: a JSON schema"
    )

    @model_validator(mode="before")
    @classmethod
    def _former_output_format(cls, value: Any) -> Any:
        """Takes `output_format`, as a beta of the API called it, for `output_config.format`."""
        if not isinstance(value, dict) or value.get("output_format") is None:
            return value
        config = value.get("output_config") or {}
        if not isinstance(config, dict) or config.get("format") is not None:
            raise misplaced("output_format", "output_config has a format, too; leave out one of them")
        rest = {name: inner for name, inner in value.items() if name != "output_format"}
        return {**rest, "output_config": {**config, "format": value["output_format"]}}

    def as_chat(self, **options: Any) -> ChatBody:
        """The chat with the same prompt."""
        messages = [*self._system(), *(message for turn in self.messages for message in _messages_of(turn))]
        last = messages[-1]
        parallel = self.tool_choice is None or not self.tool_choice.disable_parallel_tool_use
        config = self.output_config or OutputConfig()
        return ChatBody.model_construct(
            model=self.model,
            messages=messages,
            tools=[_tool(tool) for tool in self.tools or ()] or None,
            tool_choice=self._choice(),
            parallel_tool_calls=None if parallel else False,
            continue_final_message=True if last.role == "assistant" and not last.tool_calls else None,
            reasoning_effort=config.effort,
            chat_template_kwargs=None if self.thinking is None else self.thinking.template_variables(),
            response_format=None if config.format is None else _json_schema(config.format),
            **options,
        )

    def _system(self) -> list[Message]:
        if not self.system:
            return []
        return [Message(role="system", content=self.system if isinstance(self.system, str) else _text(self.system))]

    def _choice(self) -> ToolChoice | None:
        match self.tool_choice:
            case None:
                return None
            case ChosenTool(type="tool", name=name):
                return NamedTool(type="function", function=NamedFunction(name=name or "none"))
            case ChosenTool(type="any"):
                return "required"
            case ChosenTool(type="none"):
                return "none"
        return "auto"


class MessagesBody(CountedBody, SampledBody):
    """POST /v1/messages."""

    max_tokens: int = Field(ge=1, description="maximum number of output tokens; what does not fit is cut")
    stop_sequences: Annotated[Items[str], Field(max_length=_MAX_STOPS)] | None = Field(
        None, description="texts that end the output and are not part of it"
    )
    metadata: Labels | None = Field(None, description="user_id: a label for the log")

    def as_chat(self, **options: Any) -> ChatBody:
        """The chat with the same prompt and the same sampling."""
        return super().as_chat(
            **{name: getattr(self, name) for name in SampledBody.model_fields if name != "model"},
            max_tokens=self.max_tokens,
            stop=self.stop_sequences,
            user=None if self.metadata is None else self.metadata.user_id,
            **options,
        )


def _messages_of(turn: Turn) -> Iterator[Message]:
    """A turn as messages: results of tools, then the rest."""
    blocks = [TextBlock(type="text", text=turn.content)] if isinstance(turn.content, str) else turn.content
    for block in blocks:
        if isinstance(block, ToolResultBlock):
            returned = block.content if isinstance(block.content, str) else _text(block.content or [])
            text = f"Error: {returned}" if block.is_error else returned
            yield Message(role="tool", tool_call_id=block.tool_use_id, content=text)
    texts = [block for block in blocks if isinstance(block, TextBlock)]
    calls = [_called(block) for block in blocks if isinstance(block, ToolUseBlock)]
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    if texts or calls or thoughts or not blocks:
        content = _text(texts) or None
        yield Message(
            role=turn.role, content=content, tool_calls=calls or None, reasoning_content="".join(thoughts) or None
        )


def _text(blocks: list[TextBlock]) -> str:
    return "".join(block.text for block in blocks)


def _called(block: ToolUseBlock) -> CalledTool:
    return CalledTool(
        id=block.id, function=CalledFunction(name=block.name, arguments=json.dumps(block.input, ensure_ascii=False))
    )


def _tool(tool: DescribedTool) -> Tool:
    function = FunctionDefinition(name=tool.name, description=tool.description, parameters=tool.input_schema)
    return Tool(type="function", function=function)


def _json_schema(form: OutputFormat) -> ResponseFormat:
    return ResponseFormat(type="json_schema", json_schema=JsonSchema(name="output", schema=form.schema_))
