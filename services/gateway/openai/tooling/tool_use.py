"""How one chat uses its tools: what the model is told, which call is required, and how calls are parsed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from halfmoon.errors import InvalidRequest
from services.gateway.openai.messages import Message
from services.gateway.openai.schemas import ChatBody
from services.gateway.openai.served_model import ServedModel
from services.gateway.openai.structured_output import RequestedConstraint
from services.gateway.openai.tooling.described_tools import with_described_tools
from services.gateway.openai.tooling.tools import NamedTool, choice_of, constraint_of_choice
from services.gateway.replies.tool_parsers import PARSERS, NamedCall, NewToolParser, RequiredCalls


class ToolUse(NamedTuple):
    """The tools of one request."""

    messages: Sequence[Message]  # for the chat template
    rendered: list[dict[str, Any]] | None = None  # for the chat template, if it has a place for them
    forced: RequestedConstraint | None = None  # the required call
    new_parser: NewToolParser | None = None  # None: all text is content


def tool_use_of(body: ChatBody, model: ServedModel) -> ToolUse:
    """The tool use of a chat. Raises InvalidRequest if this request cannot use tools."""
    tools = body.tools or []
    choice = choice_of(body.tool_choice, tools)
    rendered = [] if choice == "none" else [tool.model_dump(exclude_none=True) for tool in tools]
    told = told_of_tools(body.messages, rendered, model)
    if choice == "none":
        return told
    for name in ("response_format", "structured_outputs"):
        form = getattr(body, name)
        if form is not None and getattr(form, "type", None) != "text":
            raise InvalidRequest(f"{name} leaves no room for calls; set tool_choice to 'none'", param=name)
    if choice == "auto" and body.parallel_tool_calls is False:
        message = "parallel_tool_calls: false is not supported where the model decides; set tool_choice to 'required'"
        raise InvalidRequest(message, param="parallel_tool_calls")
    constraint = constraint_of_choice(choice, tools, parallel=body.parallel_tool_calls is not False)
    if constraint is None:
        return told._replace(new_parser=PARSERS[model.tool_format or "hermes"])
    forced = RequestedConstraint(constraint, "tools")
    if isinstance(choice, NamedTool):
        return told._replace(forced=forced, new_parser=partial(NamedCall, choice.function.name))
    return told._replace(forced=forced, new_parser=RequiredCalls)


def told_of_tools(messages: Sequence[Message], tools: list[dict[str, Any]], model: ServedModel) -> ToolUse:
    """How a model is told of tools, as JSON values: by its chat template, or in plain text."""
    if model.tool_format is None:
        return ToolUse(with_described_tools(messages, tools))
    return ToolUse(messages, tools or None)
