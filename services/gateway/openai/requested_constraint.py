"""The constraint that a body's structured output means, and the parameter that it came in."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from halfmoon.engine import request as engine
from halfmoon.errors import InvalidRequest
from halfmoon.pb.types_pb2 import Constraint
from services.gateway.http.error_responses import shortened
from services.gateway.openai.bodies.structured_output import ResponseFormat, StructuredOutputs
from services.gateway.openai.closed_schema import closed_schema

_MAX_REASON_CHARS = 500
_KINDS: dict[engine.ConstraintKind, Constraint.Kind.ValueType] = {
    "json_schema": Constraint.JSON_SCHEMA,
    "regex": Constraint.REGEX,
    "choice": Constraint.CHOICE,
    "grammar": Constraint.GRAMMAR,
}
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
    from_form, from_structured = _of_form(form), structured and _of_structured(structured)
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
    if (pattern := form.any_pattern) is not None:
        return engine.Constraint("regex", pattern)
    schema = form.any_schema
    if schema is None:
        return _ANY_OBJECT
    return engine.Constraint("json_schema", json.dumps(closed_schema(schema), ensure_ascii=False))


def _of_structured(body: StructuredOutputs) -> engine.Constraint | None:
    """Raises InvalidRequest for several constraints."""
    constraints: list[engine.Constraint] = []
    if body.json_ is not None:
        constraints.append(_of_schema(body.json_, body))
    if body.json_object:
        constraints.append(_of_schema({"type": "object"}, body))
    if body.regex is not None:
        constraints.append(engine.Constraint("regex", body.regex))
    if body.choice is not None:
        constraints.append(engine.Constraint("choice", json.dumps(body.choice, ensure_ascii=False)))
    if body.grammar is not None:
        constraints.append(engine.Constraint("grammar", body.grammar))
    if len(constraints) > 1:
        raise InvalidRequest("structured_outputs: say one of its kinds, not several", param="structured_outputs")
    return constraints[0] if constraints else None


def _of_schema(schema: dict[str, Any] | str, body: StructuredOutputs) -> engine.Constraint:
    """The constraint of a JSON schema. One that comes as text is used as it is."""
    if isinstance(schema, str):
        return engine.Constraint("json_schema", schema)
    closed = schema if body.disable_additional_properties is False else closed_schema(schema)
    style = {"x-guidance": engine.ONE_LINE_STYLE} if body.disable_any_whitespace else {}
    return engine.Constraint("json_schema", json.dumps({**closed, **style}, ensure_ascii=False))
