"""Parses and validates a body. Every mistake is an InvalidRequest that names the parameter."""

from __future__ import annotations

from collections.abc import Sequence
from types import NoneType, UnionType
from typing import Any, Generic, NamedTuple, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json

from halfmoon.errors import InvalidRequest
from halfmoon.policy.placement.place import ContextLengthExceeded
from services.gateway.http.error_responses import shortened
from services.gateway.openai.bodies.anthropic_body import MessagesBody, ToolResultBlock, Turn
from services.gateway.openai.bodies.messages import CalledFunction, CalledTool, Message, TextPart
from services.gateway.openai.bodies.responses_body import (
    FunctionCallOutput,
    InputMessage,
    InputText,
    ResponsesBody,
    TextConfig,
    TextFormat,
)
from services.gateway.openai.bodies.schemas import ChatBody, CompletionBody, StreamOptions
from services.gateway.openai.bodies.structured_output import JsonSchema, ResponseFormat, StructuredOutputs
from services.gateway.openai.bodies.tools import BUILT_IN, FunctionDefinition, NamedTool, Tool
from services.gateway.openai.bodies.unsupported import IGNORED, REFUSED

Body = TypeVar("Body", bound=BaseModel)


def _is_union(annotation: Any) -> bool:
    """Whether the field takes values of several types, other than null."""
    return get_origin(annotation) in (Union, UnionType) and len({*get_args(annotation)} - {NoneType}) > 1


GUIDED = {f"guided_{kind}": kind for kind in ("choice", "grammar", "json", "regex")}
"""Names that the fields of `structured_outputs` once had."""

RENAMED = {"random_seed": "seed"}
"""Names that other servers have for parameters: Mistral's."""

TAGS = frozenset(
    (
        *("message", "function_call", "function_call_output", "reasoning"),
        *("text", "thinking", "redacted_thinking", "tool_use", "tool_result"),
    )
)
"""Types of the items of a list that may have several: pydantic names them in the location of an error, too."""

UNION_FIELDS = frozenset(
    field.alias or name
    for schema in (
        ChatBody,
        CompletionBody,
        Message,
        TextPart,
        CalledTool,
        CalledFunction,
        StreamOptions,
        JsonSchema,
        ResponseFormat,
        StructuredOutputs,
        Tool,
        FunctionDefinition,
        NamedTool,
        ResponsesBody,
        InputMessage,
        InputText,
        FunctionCallOutput,
        TextConfig,
        TextFormat,
        MessagesBody,
        Turn,
        ToolResultBlock,
    )
    for name, field in schema.model_fields.items()
    if _is_union(field.annotation)
)
"""Fields that take values of several types: in the location of an error, pydantic names the type after them."""


class Parsed(NamedTuple, Generic[Body]):
    """A body, and the parameters in it that do nothing."""

    body: Body
    ignored: tuple[str, ...]


def parse_request(schema: type[Body], raw: bytes, max_values: int) -> Parsed[Body]:
    """The body of an OpenAI request, in which parameters that would not change the answer are ignored.

    Raises InvalidRequest or ContextLengthExceeded.
    """
    fields = _fields(raw, max_values)
    _rename_guided(fields)
    _rename(fields)
    left_out = _leave_out_built_in(fields) if schema is ResponsesBody else ()
    unknown = {name: value for name, value in fields.items() if name not in schema.model_fields}
    ignored = (*left_out, *(name for name, value in unknown.items() if name in IGNORED and value is not None))
    dropped = {name for name, value in unknown.items() if name in IGNORED or _is_neutral(name, value)}
    return Parsed(_validated(schema, {name: fields[name] for name in fields if name not in dropped}), ignored)


def parse_body(schema: type[Body], raw: bytes, max_values: int) -> Body:
    """The body of a request of at most `max_values` JSON values. Raises InvalidRequest or ContextLengthExceeded.

    The number is limited because parsing makes an object of each value, and nothing else runs meanwhile.
    """
    return _validated(schema, _fields(raw, max_values))


def _fields(raw: bytes, max_values: int) -> dict[str, Any]:
    if num_separators(raw) > max_values:
        raise ContextLengthExceeded(f"the body holds more than {max_values} values or separators: they cannot fit")
    try:
        fields = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise InvalidRequest("the body must be a JSON object")
    return fields


def _validated(schema: type[Body], fields: dict[str, Any]) -> Body:
    try:
        return schema.model_validate(fields)
    except ValidationError as error:
        raise _invalid(error.errors(include_url=False, include_input=False)) from error


def num_separators(raw: bytes) -> int:
    """A quick estimate: at least half the number of values. Separators inside strings count, too."""
    return sum(raw.count(separator) for separator in (b",", b"[", b"{"))


def _is_neutral(name: str, value: Any) -> bool:
    if name not in REFUSED or value is None:
        return value is None
    why, neutral = REFUSED[name]
    if any(type(value) is type(other) and value == other for other in neutral):
        return True
    only = f" (only {', '.join(map(repr, neutral))})" if neutral else ""
    raise InvalidRequest(f"{name}: this value is not supported{only}: {why}", param=name)


def _rename_guided(fields: dict[str, Any]) -> None:
    """Takes vLLM's former names, `guided_json` and so on, for what they are called now.

    A client may send one constraint under both names, as guidance does.
    """
    guided = {name: fields.pop(name) for name in GUIDED if name in fields}
    for name, value in guided.items():
        if value is None:
            continue
        named = {GUIDED[name]: value}
        if fields.get("structured_outputs") not in (None, named):
            raise InvalidRequest(f"{name}: an output has one form; leave out one of them", param=name)
        fields["structured_outputs"] = named


def _rename(fields: dict[str, Any]) -> None:
    """Takes other servers' names of parameters."""
    for other, name in RENAMED.items():
        value = fields.pop(other, None)
        if value is None:
            continue
        if fields.get(name) not in (None, value):
            raise InvalidRequest(f"{other}: it is another name of {name}; leave out one of them", param=other)
        fields[name] = value


def _leave_out_built_in(fields: dict[str, Any]) -> tuple[str, ...]:
    """Takes tools that a server would run itself out of a list that has functions, too; returns their places.

    Raises InvalidRequest where there is no function: the request wanted nothing else.
    """
    tools = fields.get("tools")
    if not isinstance(tools, list):
        return ()
    kinds = [tool.get("type") if isinstance(tool, dict) else None for tool in tools]
    left_out = [number for number, kind in enumerate(kinds) if isinstance(kind, str) and kind in BUILT_IN]
    if left_out and "function" not in kinds:
        param = f"tools[{left_out[0]}].type"
        why = f"{param}: {kinds[left_out[0]]} is not there; the model calls functions, which the client runs"
        raise InvalidRequest(why, param=param)
    fields["tools"] = [tool for number, tool in enumerate(tools) if number not in left_out]
    return tuple(f"tools[{number}]" for number in left_out)


def _invalid(errors: Sequence[ErrorDetails]) -> InvalidRequest:
    """The first error; for a union, the one of the branch that got furthest into the value."""
    same = [error for error in errors if error["loc"][:1] == errors[0]["loc"][:1]]
    error = max(
        same, key=lambda candidate: (candidate["type"] in ("too_long", "too_short"), len(_path(candidate["loc"])))
    )
    location = error["loc"]
    if error["type"] == "model_type" and isinstance(location[-2:][0], int) and location[-1] in TAGS:
        location = location[:-1]  # the item itself is not an object; its type is what it was taken for
    path = _path(location)
    if error["type"] == "union_tag_not_found":
        path = [*path, "type"]
    if error["type"] in ("too_many_names", "misplaced"):
        path = [*path, error["ctx"]["name"]]
    param = shortened(_dotted(path))
    match error["type"]:
        case "extra_forbidden" | "too_many_names":
            message = f"unknown parameter: {param or repr(param)}"
        case "missing" | "union_tag_not_found":
            message = f"missing parameter: {param}"
        case "none_required":
            message = f"{param}: this parameter is not supported"
        case "too_long":
            message = f"{param}: at most {error['ctx']['max_length']} items"
        case "model_type" | "model_attributes_type":
            message = f"{param}: input should be a valid dictionary"
        case "union_tag_invalid":
            message = f"{param}: the type should be one of {error['ctx']['expected_tags']}"
        case "value_error":  # of a check of ours; one of several fields together has no path
            message = f"{param}: {error['ctx']['error']}" if path else str(error["ctx"]["error"])
        case _:
            message = f"{param}: {error['msg'][:1].lower()}{error['msg'][1:]}"
    return InvalidRequest(message, param=param if path else None)


def _path(location: Sequence[int | str]) -> list[int | str]:
    """The location without pydantic's names for the branches of a union, which follow the union's field.

    The name of an item's type follows the item's number, and a field of the item follows it.
    """
    around = zip(["", *location], location, [*location[1:], 0], strict=False)
    return [
        part
        for parent, part, child in around
        if parent not in UNION_FIELDS and not (isinstance(parent, int) and isinstance(child, str) and part in TAGS)
    ]


def _dotted(path: Sequence[int | str]) -> str:
    """The path as in `messages[0].content`."""
    text = str(path[0]) if path else ""
    return text + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path[1:])
