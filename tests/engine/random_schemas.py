"""JSON schemas at random, whose values are bounded: a model that says anything still comes to an end."""

from __future__ import annotations

from random import Random
from typing import Any

_NAMES = ("name", "age", "city", "tags", "size", "kind", "note", "price", "ok", "items", "größe")
_LEAVES: tuple[dict[str, Any], ...] = (
    {"type": "boolean"},
    {"type": "null"},
    {"type": "integer", "minimum": -20, "maximum": 300},
    {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.25},
    {"type": "string", "maxLength": 12},
    {"type": "string", "pattern": "^[a-z]{2,5}-[0-9]{1,3}$"},
    {"type": "string", "format": "date"},
    {"enum": ["red", "grün", "blue", 4, None]},
    {"const": "fixed"},
)


def random_schema(rng: Random, depth: int = 0) -> dict[str, Any]:
    """An object outside, and up to two levels of objects, arrays and choices inside."""
    kind = "object" if depth == 0 else rng.choice(["leaf", "leaf", "object", "array", "any"])
    if kind == "leaf" or depth > 2:
        return rng.choice(_LEAVES)
    if kind == "array":
        return {"type": "array", "items": random_schema(rng, depth + 1), "minItems": rng.randint(0, 1), "maxItems": 2}
    if kind == "any":
        return {"anyOf": [random_schema(rng, depth + 1) for _ in range(2)]}
    names = rng.sample(_NAMES, rng.randint(1, 3))
    required = [name for name in names if rng.random() < 0.7]
    properties = {name: random_schema(rng, depth + 1) for name in names}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
