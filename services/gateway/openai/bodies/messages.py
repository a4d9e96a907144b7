"""The messages of a chat, and what the chat template sees of them."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_core import from_json

from services.gateway.openai.bodies.strict_model import Items, Part, at_most_entries, misplaced

_MAX_PARTS = 1_000
_MAX_CALLS = 128
_MAX_VARIABLES = 64
_MAX_DOCUMENTS = 1_000
_MAX_TEMPLATE_CHARS = 200_000
_ROLES = frozenset(("system", "developer", "user", "assistant", "tool"))
_OWN_PARAMETERS = (
    "messages",
    "tools",
    "add_generation_prompt",
    "documents",
    "chat_template",
)  # parameters that the template receives as variables of the same name


def _without_own_parameters(variables: dict[str, Any]) -> dict[str, Any]:
    taken = next((name for name in _OWN_PARAMETERS if name in variables), None)
    if taken is not None:
        raise misplaced(taken, "it is a parameter of its own")
    return variables


TemplateKwargs = Annotated[
    dict[str, Any],
    BeforeValidator(partial(at_most_entries, _MAX_VARIABLES)),
    AfterValidator(_without_own_parameters),
]


class RenderedChat(Part):
    """How the chat template is rendered."""

    add_generation_prompt: bool | None = Field(
        None, description="the template ends with the assistant's header; default true"
    )
    continue_final_message: bool | None = Field(
        None, description="the output goes on with the last message, which the template does not end"
    )
    chat_template_kwargs: TemplateKwargs | None = Field(None, description="variables of the chat template")
    reasoning_effort: str | None = Field(None, max_length=32, description="a variable of the chat template")
    documents: Annotated[Items[dict[str, Any]], Field(max_length=_MAX_DOCUMENTS)] | None = Field(
        None, description="a variable of the chat template, refused by one that does not read it"
    )
    chat_template: str | None = Field(
        None,
        min_length=1,
        max_length=_MAX_TEMPLATE_CHARS,
        description="instead of the model's own; only with the setting trust_request_chat_template, within bounds",
    )

    @model_validator(mode="before")
    @classmethod
    def _continue_prefix(cls, value: Any) -> Any:
        """Takes `prefix` of the last message, as Mistral and DeepSeek have it, for `continue_final_message`."""
        messages = value.get("messages") if isinstance(value, dict) else None
        last = messages[-1] if isinstance(messages, list) and messages else None
        if isinstance(last, dict) and last.get("prefix") is True and last.get("role") == "assistant":
            return {**value, "continue_final_message": True}
        return value

    def template_variables(self) -> dict[str, Any]:
        """The variables that the template receives beside messages and tools."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        documents = {"documents": self.documents} if self.documents else {}
        return {**effort, **(self.chat_template_kwargs or {}), **documents}


_LITELLM = frozenset(("provider_specific_fields", "thinking_blocks"))  # what it says twice, and sends back


class TextPart(Part):
    """One part of a message's content."""

    ignored_names = frozenset(("cache_control",))

    type: Literal["text"]
    text: str


class CalledFunction(Part):
    """The function that an earlier answer called."""

    ignored_names = _LITELLM | {"parsed_arguments"}

    name: str
    arguments: str = Field(description="a JSON object, as text")


class CalledTool(Part):
    """One tool call of an earlier answer."""

    ignored_names = _LITELLM | {"index"}  # as in a stream, whose chunks some clients join and send back

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Part):
    """One message of a chat."""

    ignored_names = _LITELLM | {"cache_control", "parsed"}  # the last one, of openai's `parse`, is in the content

    role: str = Field(
        pattern=r"^[A-Za-z][A-Za-z0-9_-]*$",
        max_length=32,
        description="system, developer, user, assistant, tool, or another one that the template writes",
    )
    content: str | Annotated[Items[TextPart], Field(max_length=_MAX_PARTS)] | None = None
    name: str | None = Field(None, description="given to the chat template")
    tool_call_id: str | None = Field(None, description="on a tool's result: the call that it answers")
    tool_calls: Annotated[Items[CalledTool], Field(max_length=_MAX_CALLS)] | None = Field(
        None, description="on an assistant message: its tool calls"
    )
    reasoning_content: str | None = Field(None, description="on an assistant message: given to the chat template")
    reasoning: str | None = Field(None, description="another name of reasoning_content")
    prefix: bool | None = Field(None, description="on a last assistant message, true: the output goes on with it")
    function_call: None = None
    refusal: None = None
    audio: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None

    @model_validator(mode="after")
    def _check_role(self) -> Self:
        if self.tool_call_id is not None and self.role != "tool":
            raise misplaced("tool_call_id", "only a message of the role 'tool' has one")
        if self.tool_calls and self.role != "assistant":
            raise misplaced("tool_calls", "only a message of the role 'assistant' has them")
        return self

    @property
    def has_usual_role(self) -> bool:
        """Whether every template knows its role."""
        return self.role in _ROLES

    @property
    def text(self) -> str:
        """The content's text."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it: arguments of calls are objects, not texts, if they can be parsed."""
        seen: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": self.text}
        for name in ("name", "tool_call_id"):
            if (value := getattr(self, name)) is not None:
                seen[name] = value
        if (reasoning := self.reasoning_content or self.reasoning) is not None:
            seen["reasoning_content"] = reasoning
            if not (self.tool_calls and self.text):
                seen["thinking"] = (
                    reasoning  # as gpt-oss' template calls it, which takes only one of text and reasoning
                )
        if self.tool_calls:
            seen["tool_calls"] = [_call_for_template(call) for call in self.tool_calls]
        return seen


def _call_for_template(call: CalledTool) -> dict[str, Any]:
    try:
        arguments = from_json(call.function.arguments)  # refuses halves of surrogate pairs, which no tokenizer takes
    except ValueError:
        arguments = call.function.arguments
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}
