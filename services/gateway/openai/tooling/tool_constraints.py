"""The effective choice among a chat's tools, and the constraints that force calls or leave room for them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

from halfmoon.engine.request import JSON_STYLE, ONE_LINE_STYLE, Constraint
from halfmoon.errors import InvalidRequest
from services.gateway.openai.bodies.tools import AllowedChoice, FunctionDefinition, NamedTool, Tool, ToolChoice
from services.gateway.openai.closed_schema import closed_schema

EffectiveChoice = Literal["none", "auto", "required"] | NamedTool


def choice_of(choice: ToolChoice | None, tools: Sequence[Tool]) -> tuple[EffectiveChoice, Sequence[Tool]]:
    """The effective choice, and the tools that it leaves; the default is auto with tools and none without.

    Raises InvalidRequest.
    """
    if not tools:
        if choice in (None, "none", "auto"):
            return "none", tools
        raise InvalidRequest("tool_choice needs tools to choose from", param="tool_choice")
    if isinstance(choice, AllowedChoice):
        _check_known(choice.allowed_tools.tools, tools)
        names = {named.function.name for named in choice.allowed_tools.tools}
        return choice.allowed_tools.mode, [tool for tool in tools if tool.function.name in names]
    if isinstance(choice, NamedTool):
        _check_known([choice], tools)
    return "auto" if choice is None else "required" if choice == "any" else choice, tools


def _check_known(chosen: Sequence[NamedTool], tools: Sequence[Tool]) -> None:
    known = {tool.function.name for tool in tools}
    for one in chosen:
        if one.function.name not in known:
            raise InvalidRequest(f"tool_choice: {one.function.name!r} is not among the tools", param="tool_choice")


def constraint_of_choice(choice: EffectiveChoice, tools: Sequence[Tool], *, parallel: bool) -> Constraint | None:
    """The constraint of a required call: the named tool's arguments, or a list of calls with name and arguments."""
    if isinstance(choice, NamedTool):
        named = next(tool.function for tool in tools if tool.function.name == choice.function.name)
        return _json_schema(closed_schema(named.parameters or {"type": "object"}))
    if choice != "required":
        return None
    definitions: dict[str, Any] = {}
    calls = [_call_schema(tool.function, definitions, "parameters") for tool in tools]
    limit = {} if parallel else {"maxItems": 1}
    return _json_schema({"type": "array", "minItems": 1, **limit, "items": {"anyOf": calls}, "$defs": definitions})


def answer_or_calls(answer: Constraint, tools: Sequence[Tool], *, parallel: bool) -> Constraint:
    """The constraint of an output that is either an answer, by its JSON schema, or calls in the tags of Hermes."""
    definitions: dict[str, Any] = {}
    calls = [_call_schema(tool.function, definitions, "arguments") for tool in tools]
    call = json.dumps({"anyOf": calls, "$defs": definitions, "x-guidance": ONE_LINE_STYLE}, ensure_ascii=False)
    form = json.dumps({"x-guidance": JSON_STYLE, **json.loads(answer.source)}, ensure_ascii=False)
    lines = (
        'start: answer | call ("\\n" call)*' if parallel else "start: answer | call",
        f"answer: %json {form}",
        'call: "<tool_call>\\n" body "\\n</tool_call>"',
        f"body: %json {call}",
    )
    return Constraint("grammar", "\n".join(lines))


def _call_schema(function: FunctionDefinition, definitions: dict[str, Any], arguments: str) -> dict[str, Any]:
    """The schema of one call. Raises InvalidRequest if two tools define different things under one name."""
    parameters = dict(closed_schema(function.parameters or {"type": "object"}))
    for name, definition in parameters.pop("$defs", {}).items():
        if definitions.setdefault(name, definition) != definition:
            raise InvalidRequest(f"tools: two of them have different $defs named {name!r}", param="tools")
    return {
        "type": "object",
        "properties": {"name": {"const": function.name}, arguments: parameters},
        "required": ["name", arguments],
        "additionalProperties": False,
    }


def _json_schema(schema: dict[str, Any]) -> Constraint:
    return Constraint("json_schema", json.dumps({**schema, "x-guidance": ONE_LINE_STYLE}, ensure_ascii=False))
