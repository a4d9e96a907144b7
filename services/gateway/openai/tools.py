"""The tools of a chat: what may be called, and how a call that must come is made sure of."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from halfmoon.engine.request import Constraint
from halfmoon.errors import InvalidRequest
from services.gateway.openai.strict_model import Items, Part

_MAX_TOOLS = 128

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


class FunctionDefinition(Part):
    """A function that the model may call."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="a JSON schema of its arguments")
    strict: bool | None = Field(None, description="arguments follow the schema where the call is forced")


class Tool(Part):
    """One tool."""

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Part):
    """The function of a named tool."""

    name: Name


class NamedTool(Part):
    """The tool that has to be called."""

    type: Literal["function"]
    function: NamedFunction


Tools = Annotated[Items[Tool], Field(max_length=_MAX_TOOLS)]
ToolChoice = Literal["none", "auto", "required"] | NamedTool


def choice_of(choice: ToolChoice | None, tools: Sequence[Tool]) -> ToolChoice:
    """What holds: with tools the model decides, without there is nothing to call. Raises InvalidRequest."""
    if not tools:
        if choice in (None, "none", "auto"):
            return "none"
        raise InvalidRequest("tool_choice needs tools to choose from", param="tool_choice")
    if isinstance(choice, NamedTool) and choice.function.name not in [one.function.name for one in tools]:
        raise InvalidRequest(f"tool_choice: {choice.function.name!r} is not among the tools", param="tool_choice")
    return "auto" if choice is None else choice


def constraint_of_choice(choice: ToolChoice, tools: Sequence[Tool], *, parallel: bool) -> Constraint | None:
    """What a forced call's output has to be: the named tool's arguments, or a list of named calls with theirs."""
    if isinstance(choice, NamedTool):
        named = next(one.function for one in tools if one.function.name == choice.function.name)
        return _json_schema(named.parameters or {"type": "object"})
    if choice != "required":
        return None
    definitions: dict[str, Any] = {}
    calls = [_call_schema(one.function, definitions) for one in tools]
    most = {} if parallel else {"maxItems": 1}
    return _json_schema({"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}, "$defs": definitions})


def _call_schema(function: FunctionDefinition, definitions: dict[str, Any]) -> dict[str, Any]:
    """Raises InvalidRequest when two tools define different things under one name."""
    parameters = dict(function.parameters or {"type": "object"})
    for name, definition in parameters.pop("$defs", {}).items():
        if definitions.setdefault(name, definition) != definition:
            raise InvalidRequest(f"tools: two of them have different $defs named {name!r}", param="tools")
    return {
        "type": "object",
        "properties": {"name": {"const": function.name}, "parameters": parameters},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _json_schema(schema: dict[str, Any]) -> Constraint:
    return Constraint("json_schema", json.dumps(schema, ensure_ascii=False))
