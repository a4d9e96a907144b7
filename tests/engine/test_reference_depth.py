"""References that lead too deep are refused by name; recursion is not deep."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from halfmoon.engine.constraint import check_constraint
from halfmoon.engine.reference_depth import MOST_LEVELS, check_reference_depth
from halfmoon.engine.request import Constraint
from halfmoon.errors import InvalidRequest

Wrap = Callable[[Any], Any]

WRAPS: dict[str, Wrap] = {
    "plain": lambda inner: inner,
    "items": lambda inner: {"type": "array", "items": inner},
    "prefixItems": lambda inner: {"type": "array", "prefixItems": [inner]},
    "anyOf": lambda inner: {"anyOf": [inner, {"type": "null"}]},
    "oneOf": lambda inner: {"oneOf": [inner, {"type": "string"}]},
    "allOf": lambda inner: {"allOf": [inner, {"type": ["null", "array"]}]},
    "properties": lambda inner: {"type": "object", "properties": {"a": inner}},
    "patternProperties": lambda inner: {"type": "object", "patternProperties": {"^a": inner}},
    "additionalProperties": lambda inner: {"type": "object", "additionalProperties": inner},
    "if": lambda inner: {"if": {"type": "null"}, "then": inner, "else": True},
}


def chain(wrap: Wrap, levels: int) -> Constraint:
    parts = {f"d{i}": wrap({"$ref": f"#/$defs/d{i + 1}"}) for i in range(levels - 1)}
    return schema_of({"$defs": {**parts, f"d{levels - 1}": {"type": "null"}}, "$ref": "#/$defs/d0"})


def schema_of(schema: Any) -> Constraint:
    return Constraint("json_schema", json.dumps(schema))


def arrays(name: Callable[[int], dict[str, str]], reference: Callable[[int], dict[str, str]]) -> Constraint:
    """1,500 arrays, each of the next one."""
    parts = {f"d{i}": {**name(i), "type": "array", "items": reference(i + 1)} for i in range(1_500)}
    return schema_of({"$defs": {**parts, "d1500": {**name(1_500), "type": "null"}}, **reference(0)})


DEEP = [
    *(pytest.param(chain(wrap, 1_500), id=name) for name, wrap in WRAPS.items()),
    pytest.param(arrays(lambda i: {"$anchor": f"a{i}"}, lambda i: {"$ref": f"#a{i}"}), id="$anchor"),
    pytest.param(arrays(lambda i: {"$id": f"http://x/{i}"}, lambda i: {"$ref": f"http://x/{i}"}), id="$id"),
    pytest.param(
        arrays(lambda i: {"$dynamicAnchor": f"a{i}"}, lambda i: {"$dynamicRef": f"#a{i}"}), id="$dynamicAnchor"
    ),
    pytest.param(arrays(lambda i: {}, lambda i: {"$ref": f"#/$defs/d{i % 1_500}"}), id="a long circle"),
    pytest.param(
        Constraint("grammar", "".join(f'r{i}: "a" r{i + 1}\n' for i in range(3_000)) + 'r3000: "b"\nstart: r0'),
        id="rules",
    ),
    pytest.param(
        Constraint("grammar", "start: T0\n" + "".join(f'T{i}: "a" T{i + 1}\n' for i in range(3_000)) + 'T3000: "b"'),
        id="terminals",
    ),
    pytest.param(
        Constraint(
            "grammar", "root ::= r0\n" + "".join(f"r{i} ::= [a-z] r{i + 1}\n" for i in range(999)) + 'r999 ::= "b"'
        ),
        id="GBNF",
    ),
]


@pytest.mark.parametrize("deep", DEEP)
def test_deep_references_are_refused_with_the_limit(deep: Constraint) -> None:
    with pytest.raises(InvalidRequest, match=f"references lead more than {MOST_LEVELS} levels deep"):
        check_reference_depth(deep)


@pytest.mark.parametrize("name", ["plain", "items", "anyOf", "allOf", "properties", "additionalProperties"])
def test_as_deep_as_is_allowed_can_be_used(name: str) -> None:
    check_constraint(chain(WRAPS[name], MOST_LEVELS))


@pytest.mark.parametrize(
    "recursive",
    [
        schema_of({"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}}),
        schema_of(
            {
                "$defs": {
                    "tree": {"type": "array", "items": {"$ref": "#/$defs/leaf"}},
                    "leaf": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/tree"}]},
                },
                "$ref": "#/$defs/tree",
            }
        ),
        Constraint("grammar", 'start: sum\nsum: item ("+" item)*\nitem: /[0-9]+/ | "(" sum ")"'),
        Constraint("grammar", 'root ::= list\nlist ::= "[" (item ("," item)*)? "]"\nitem ::= [a-z"]+ | list'),
    ],
)  # fmt: skip
def test_recursion_is_not_deep(recursive: Constraint) -> None:
    check_constraint(recursive)


def test_references_from_many_places_are_not_deep() -> None:
    names = [f"d{i}" for i in range(600)]
    check_reference_depth(
        schema_of(
            {
                "$defs": {name: {"type": "string"} for name in names},
                "properties": {name: {"$ref": f"#/$defs/{name}"} for name in names},
            }
        )
    )


def test_json_that_is_nested_too_deeply_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        check_reference_depth(Constraint("json_schema", "[" * 100_000))


def test_pointers_lead_into_lists_and_nowhere() -> None:
    for reference in ("#/prefixItems/0", "#/prefixItems/7", "#/prefixItems/x", "#/a~1b", "#/type/0/x", "http://x"):
        check_reference_depth(schema_of({"prefixItems": [{"type": "null"}], "a/b": {}, "$ref": reference}))
