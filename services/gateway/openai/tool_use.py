"""How one chat uses its tools: what the template sees, which call is required, and how calls are parsed."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from halfmoon.errors import InvalidRequest
from services.gateway.openai.schemas import ChatBody
from services.gateway.openai.served_model import ServedModel
from services.gateway.openai.structured_output import RequestedConstraint
from services.gateway.openai.tools import NamedTool, choice_of, constraint_of_choice
from services.gateway.replies.tool_parsers import PARSERS, NamedCall, NewToolParser, RequiredCalls


class ToolUse(NamedTuple):
    """The tools of one request."""

    rendered: list[dict[str, Any]] | None = None  # for the chat template
    forced: RequestedConstraint | None = None  # the required call
    new_parser: NewToolParser | None = None  # None: all text is content


def tool_use_of(body: ChatBody, model: ServedModel) -> ToolUse:
    """The tool use of a chat. Raises InvalidRequest if this model or this request cannot use tools."""
    tools = body.tools or []
    choice = choice_of(body.tool_choice, tools)
    if choice == "none":
        return ToolUse()
    if model.tool_format is None:
        raise InvalidRequest("tools: the model's chat template has no place for them that is known here", param="tools")
    for name in ("response_format", "structured_outputs"):
        form = getattr(body, name)
        if form is not None and getattr(form, "type", None) != "text":
            raise InvalidRequest(f"{name} leaves no room for calls; set tool_choice to 'none'", param=name)
    if choice == "auto" and body.parallel_tool_calls is False:
        message = "parallel_tool_calls: false is not supported where the model decides; set tool_choice to 'required'"
        raise InvalidRequest(message, param="parallel_tool_calls")
    rendered = [tool.model_dump(exclude_none=True) for tool in tools]
    constraint = constraint_of_choice(choice, tools, parallel=body.parallel_tool_calls is not False)
    if constraint is None:
        return ToolUse(rendered, None, PARSERS[model.tool_format])
    forced = RequestedConstraint(constraint, "tools")
    if isinstance(choice, NamedTool):
        return ToolUse(rendered, forced, partial(NamedCall, choice.function.name))
    return ToolUse(rendered, forced, RequiredCalls)
