"""How one chat uses its tools: what the model is told, which call is required, and how calls are parsed."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from halfmoon.errors import InvalidRequest
from services.gateway.openai.bodies.messages import Message, RenderedChat
from services.gateway.openai.bodies.schemas import ChatBody
from services.gateway.openai.bodies.tools import NamedTool
from services.gateway.openai.requested_constraint import RequestedConstraint, constraint_of
from services.gateway.openai.served_model import ServedModel
from services.gateway.openai.tooling.described_tools import with_described_tools
from services.gateway.openai.tooling.tool_constraints import answer_or_calls, choice_of, constraint_of_choice
from services.gateway.replies.call_parts import NewToolParser
from services.gateway.replies.tagged_calls import CallList
from services.gateway.replies.tool_parsers import (
    MARKS,
    FirstCall,
    NamedCall,
    ToolFormat,
    format_of_template,
    parser_of,
)

_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")


class ToolUse(NamedTuple):
    """The tools of one request."""

    messages: Sequence[Message]  # for the chat template
    rendered: list[dict[str, Any]] | None = None  # for the chat template, if it has a place for them
    forced: RequestedConstraint | None = None  # the required call, or an answer of some form instead of calls
    new_parser: NewToolParser | None = None  # None: all text is content
    needs_marks: bool = False  # calls are found by special tokens


def tool_use_of(body: ChatBody, model: ServedModel) -> ToolUse:
    """The tool use of a chat. Raises InvalidRequest if this request cannot use tools."""
    choice, tools = choice_of(body.tool_choice, body.tools or [])
    rendered = [] if choice == "none" else [tool.model_dump(exclude_none=True) for tool in tools]
    tool_format = tool_format_of(body, model)
    shown = with_tools_shown(body.messages, rendered, tool_format)
    if choice == "none":
        return shown
    parallel = body.parallel_tool_calls is not False
    answer = constraint_of(body.response_format, body.structured_outputs)
    if answer is not None and (answer.param == "structured_outputs" or answer.constraint.kind != "json_schema"):
        raise _no_room(answer.param)
    constraint = constraint_of_choice(choice, tools, parallel=parallel)
    if constraint is None:
        if answer is not None and tool_format not in (None, "hermes"):
            raise _no_room(answer.param)
        bound = answer and answer._replace(constraint=answer_or_calls(answer.constraint, tools, parallel=parallel))
        parameters = {tool.function.name: tool.function.parameters or {} for tool in tools}
        new_parser = parser_of(tool_format or "hermes", parameters)
        return shown._replace(
            forced=bound,
            new_parser=new_parser if parallel else lambda: FirstCall(new_parser()),
            needs_marks=tool_format in MARKS,
        )
    forced = RequestedConstraint(constraint, "tools")
    if isinstance(choice, NamedTool):
        return shown._replace(forced=forced, new_parser=partial(NamedCall, choice.function.name))
    return shown._replace(forced=forced, new_parser=CallList)


def _no_room(param: str) -> InvalidRequest:
    return InvalidRequest(f"{param} leaves no room for calls; set tool_choice to 'none'", param=param)


def tool_format_of(body: RenderedChat, model: ServedModel) -> ToolFormat | None:
    """How the model calls tools: as its chat template has it, or that of the request."""
    return model.tool_format if body.chat_template is None else format_of_template(body.chat_template)


def with_tools_shown(
    messages: Sequence[Message], tools: list[dict[str, Any]], tool_format: ToolFormat | None
) -> ToolUse:
    """How a model is told of tools, as JSON values: by its chat template, or in plain text."""
    if tool_format is None:
        return ToolUse(with_described_tools(messages, tools))
    if tool_format == "mistral":
        messages = [_with_short_ids(message) for message in messages]
    return ToolUse(messages, tools or None)


def _with_short_ids(message: Message) -> Message:
    """The message with ids of calls as Mistral's templates require them: nine letters and digits."""
    calls = [call.model_copy(update={"id": _short_id(call.id)}) for call in message.tool_calls or ()] or None
    answered = message.tool_call_id and _short_id(message.tool_call_id)
    return message.model_copy(update={"tool_calls": calls, "tool_call_id": answered})


def _short_id(call_id: str) -> str:
    return call_id if _SHORT_ID.fullmatch(call_id) else hashlib.sha256(call_id.encode()).hexdigest()[:9]
