"""Structured output: OpenAI's `response_format` and vLLM's `structured_outputs`."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from halfmoon.engine import request as engine
from halfmoon.errors import InvalidRequest
from halfmoon.pb.types_pb2 import Constraint
from services.gateway.http.error_responses import shortened
from services.gateway.openai.strict_model import Items, Part, misplaced

_MAX_CHOICES = 1_000
_MAX_REASON_CHARS = 500
_KINDS: dict[engine.ConstraintKind, Constraint.Kind.ValueType] = {
    "json_schema": Constraint.JSON_SCHEMA,
    "regex": Constraint.REGEX,
    "choice": Constraint.CHOICE,
    "grammar": Constraint.GRAMMAR,
}


class JsonSchema(Part):
    """`response_format.json_schema`."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="a JSON schema; without it, any object")
    strict: bool | None = Field(None, description="ignored: the output always follows the schema strictly")


class ResponseFormat(Part):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check_type(self) -> Self:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise misplaced("json_schema", "it goes with the type 'json_schema', and only with that")
        return self


class StructuredOutputs(Part):
    """vLLM's `structured_outputs`: one of the first five fields."""

    json_: dict[str, Any] | str | None = Field(None, alias="json", description="a JSON schema")
    json_object: bool | None = Field(None, description="any JSON object")
    regex: str | None = Field(None, description="a regular expression (Rust's syntax) for the whole output")
    choice: Annotated[Items[str], Field(min_length=1, max_length=_MAX_CHOICES)] | None = None
    grammar: str | None = Field(None, description="Lark or GBNF")
    structural_tag: None = None
    whitespace_pattern: None = None
    disable_fallback: bool | None = Field(None, description="there is none")
    disable_any_whitespace: Literal[True] | None = Field(None, description="JSON is always written on one line")
    disable_additional_properties: Literal[False] | None = None

    def constraint(self) -> engine.Constraint | None:
        """The constraint, if there is one. Raises InvalidRequest for several."""
        constraints: list[engine.Constraint] = []
        if self.json_ is not None:
            source = self.json_ if isinstance(self.json_, str) else json.dumps(self.json_, ensure_ascii=False)
            constraints.append(engine.Constraint("json_schema", source))
        if self.json_object:
            constraints.append(_ANY_OBJECT)
        if self.regex is not None:
            constraints.append(engine.Constraint("regex", self.regex))
        if self.choice is not None:
            constraints.append(engine.Constraint("choice", json.dumps(self.choice, ensure_ascii=False)))
        if self.grammar is not None:
            constraints.append(engine.Constraint("grammar", self.grammar))
        if len(constraints) > 1:
            raise InvalidRequest("structured_outputs: say one of its kinds, not several", param="structured_outputs")
        return constraints[0] if constraints else None


_ANY_OBJECT = engine.Constraint("json_schema", '{"type": "object"}')


class RequestedConstraint(NamedTuple):
    """A constraint and the parameter that it came in. Nobody has checked yet that it can be used."""

    constraint: engine.Constraint
    param: str

    @property
    def message(self) -> Constraint:
        """The constraint as the workers take it."""
        return Constraint(
            kind=_KINDS[self.constraint.kind],
            source=self.constraint.source,
            begins_reasoning=self.constraint.begins_reasoning,
            ends_reasoning=self.constraint.ends_reasoning,
        )


CheckConstraint = Callable[[engine.Constraint, str], Awaitable[None]]
"""Raises InvalidRequest, with the reason, for a constraint of a tenant that cannot be used."""


def constraint_of(form: ResponseFormat | None, structured: StructuredOutputs | None) -> RequestedConstraint | None:
    """The constraint of a body, if it has one. Raises InvalidRequest for two."""
    from_form, from_structured = _of_form(form), structured and structured.constraint()
    if from_form is not None and from_structured is not None:
        raise InvalidRequest("structured_outputs: response_format is there, too; send one", param="structured_outputs")
    if from_form is not None:
        return RequestedConstraint(from_form, "response_format")
    return RequestedConstraint(from_structured, "structured_outputs") if from_structured else None


async def check_requested(requested: RequestedConstraint, check: CheckConstraint, tenant: str) -> None:
    """Raises InvalidRequest, naming the parameter, for a constraint that cannot be used."""
    try:
        await check(requested.constraint, tenant)
    except InvalidRequest as error:
        reason, param = shortened(error.message, _MAX_REASON_CHARS), requested.param
        raise InvalidRequest(f"{param}: {reason}", param=param) from error


def _of_form(form: ResponseFormat | None) -> engine.Constraint | None:
    if form is None or form.type == "text":
        return None
    schema = form.json_schema.schema_ if form.json_schema else None
    return _ANY_OBJECT if schema is None else engine.Constraint("json_schema", json.dumps(schema, ensure_ascii=False))
