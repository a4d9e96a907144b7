"""Which fields take values of several types: pydantic puts the type's name into the place of an error there."""

from __future__ import annotations

from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from services.gateway.openai.messages import CalledFunction, CalledTool, Message, TextPart
from services.gateway.openai.responses_body import InputMessage, InputText, ResponsesBody, TextConfig, TextFormat
from services.gateway.openai.schemas import ChatBody, CompletionBody, StreamOptions
from services.gateway.openai.structured_output import JsonSchema, ResponseFormat, StructuredOutputs
from services.gateway.openai.tools import FunctionDefinition, NamedTool, Tool


def _is_union(annotation: Any) -> bool:
    """Not so where only null is the other type."""
    return get_origin(annotation) in (Union, UnionType) and len({*get_args(annotation)} - {NoneType}) > 1


UNION_FIELDS = frozenset(
    name
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
        TextConfig,
        TextFormat,
    )
    for name, field in schema.model_fields.items()
    if _is_union(field.annotation)
)
