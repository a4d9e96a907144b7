"""Objects have the properties that their schema names, and what follows the result follows the schema."""

from __future__ import annotations

from typing import Any

import pytest

from services.gateway.openai.closed_schema import closed_schema

NAMED: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string"}}}
CLOSED = {**NAMED, "additionalProperties": False}


def test_objects_are_closed_wherever_they_are() -> None:
    schema = {"properties": {"one": NAMED, "list": {"items": NAMED}}, "$defs": {"named": NAMED}, "required": []}
    closed = closed_schema(schema)
    assert closed == {
        "properties": {"one": CLOSED, "list": {"items": CLOSED}},
        "$defs": {"named": CLOSED},
        "required": [],
        "additionalProperties": False,
    }
    assert schema["$defs"] == {"named": NAMED}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {**NAMED, "additionalProperties": {"type": "integer"}},
        {**NAMED, "patternProperties": {"^x": True}},
        {**NAMED, "allOf": [{"properties": {"b": True}}]},
    ],
)
def test_what_may_have_more_stays_open(schema: dict[str, Any]) -> None:
    assert closed_schema(schema) == schema


@pytest.mark.parametrize(
    "part",
    [
        {"allOf": [{"$ref": "#/$defs/named"}, {"properties": {"b": True}}]},
        {"$ref": "#/$defs/named", "properties": {"b": True}},
        {"oneOf": [{"$ref": "#/$defs/named"}, {"type": "object"}]},
    ],
)
def test_definitions_that_are_composed_stay_open(part: dict[str, Any]) -> None:
    closed = closed_schema({"properties": {"part": part, "one": NAMED}, "$defs": {"named": NAMED}})
    assert closed["$defs"] == {"named": NAMED}
    assert closed["properties"] == {"part": part, "one": CLOSED}


def test_kinds_that_a_field_tells_apart_are_closed() -> None:
    kinds = {"oneOf": [{"$ref": "#/$defs/named"}], "discriminator": {"propertyName": "a"}}
    assert closed_schema({"properties": {"kind": kinds}, "$defs": {"named": NAMED}})["$defs"] == {"named": CLOSED}


def test_a_deep_schema_is_closed() -> None:
    schema = NAMED
    for _ in range(190):  # a body has at most about so many levels
        schema = {"items": schema}
    assert closed_schema(schema) != schema
