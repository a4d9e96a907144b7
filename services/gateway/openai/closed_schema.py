"""JSON schemas whose objects have the properties that they name, and no others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

_MORE_PROPERTIES = frozenset(
    ("additionalProperties", "patternProperties", "unevaluatedProperties", "allOf", "anyOf", "oneOf", "$ref", "if")
)
_COMPOSING = frozenset(("allOf", "not", "if", "dependentSchemas"))


def closed_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema, with objects that have no other properties than it names, unless it says so.

    What follows the result follows the schema, too. Objects that further schemas apply to stay as they are: those may
    name some. So do definitions if any part of the schema composes others: closed ones may fit nothing together.
    """
    is_composed = any(map(_composes, _objects(schema)))
    closed: dict[str, Any] = _closed(schema, ("properties",) if is_composed else ("properties", "$defs", "definitions"))
    return closed


def _composes(schema: dict[str, Any]) -> bool:
    if "oneOf" in schema and "discriminator" not in schema:
        return True
    return bool(_COMPOSING & schema.keys()) or ("$ref" in schema and "properties" in schema)


def _objects(schema: Any) -> Iterator[dict[str, Any]]:
    """All objects of a schema, itself included."""
    todo = [schema]
    while todo:
        value = todo.pop()
        if isinstance(value, dict):
            yield value
            todo.extend(value.values())
        elif isinstance(value, list):
            todo.extend(value)


def _closed(schema: Any, tables: Sequence[str]) -> Any:
    """tables: keys whose values have schemas by name."""
    if not isinstance(schema, dict):
        return schema
    closed = dict(schema)
    for name in tables:
        if isinstance(schema.get(name), dict):
            closed[name] = {key: _closed(value, tables) for key, value in schema[name].items()}
    for name in ("items", "additionalProperties"):
        closed |= {name: _closed(schema[name], tables)} if name in schema else {}
    if isinstance(schema.get("properties"), dict) and not _MORE_PROPERTIES & schema.keys():
        closed["additionalProperties"] = False
    return closed
