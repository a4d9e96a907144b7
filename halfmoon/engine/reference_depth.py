"""How deep the references of a schema or a grammar lead: llguidance follows them by recursion, on the thread's stack.

It follows each reference once, so recursive schemas and rules are fine. The order in which it does so is not known
here, so a constraint that passes may still lead too deep: only a process that may end alone finds out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from halfmoon.engine.request import Constraint
from halfmoon.errors import InvalidRequest

MOST_LEVELS = 250  # a quarter of what overflows a stack of 8 MiB
_REFERENCES = "$ref", "$dynamicRef", "$recursiveRef"
_NAMES = "$anchor", "$dynamicAnchor", "$id"
_SHELVES = "$defs", "definitions"  # used only by reference
_TEXTS = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|#[^\n]*|/(?:\\.|[^/\\\n])+/')
_CHARACTERS = re.compile(r"\[(?:\\.|[^\]\\])*\]")  # of GBNF; Lark has optional parts in brackets
_DEFINED = re.compile(r"^[ \t]*[?!]*([A-Za-z_][\w-]*)[^:\n|\"/]*?(?:::=|:)", re.MULTILINE)
_NAME = re.compile(r"[A-Za-z_][\w-]*")


def check_reference_depth(constraint: Constraint) -> None:
    """Raises InvalidRequest for references that lead more than `MOST_LEVELS` levels deep, and for too deep JSON."""
    if constraint.kind == "json_schema":
        depth = _schema_depth(constraint.source)
    elif constraint.kind == "grammar":
        depth = _grammar_depth(constraint.source)
    else:
        return
    if depth > MOST_LEVELS:
        raise InvalidRequest(
            f"the {constraint.kind.replace('_', ' ')} cannot be used: its references lead more than {MOST_LEVELS} "
            "levels deep; write some of them out"
        )


def _schema_depth(source: str) -> int:
    try:
        schema = json.loads(source)
    except RecursionError as error:
        raise InvalidRequest("the json schema cannot be used: it is nested too deeply") from error
    except ValueError:
        return 0  # llguidance says what is wrong
    named = _names(schema)

    def references(name: str) -> list[str]:
        target = named.get(name, _MISSING) if name in named else _at_pointer(schema, name)
        return [
            value for part in _parts(target, skip=_SHELVES) for key, value in part.items() if _is_reference(key, value)
        ]

    return _depth("#", references)


_MISSING: Mapping[str, Any] = {}


def _is_reference(key: str, value: Any) -> bool:
    return key in _REFERENCES and isinstance(value, str)


def _parts(value: Any, skip: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """All objects in a JSON value, but those under the keys `skip`."""
    left = [value]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            yield part
            left += [inner for key, inner in reversed(part.items()) if key not in skip]
        elif isinstance(part, list):
            left += reversed(part)


def _names(schema: Any) -> dict[str, Any]:
    """The parts of a schema that have a name, by the references that lead to them."""
    named: dict[str, Any] = {}
    for part in _parts(schema):
        for key in _NAMES:
            if isinstance(name := part.get(key), str):
                named[name if key == "$id" else f"#{name}"] = part
    return named


def _at_pointer(schema: Any, reference: str) -> Any:
    """What the JSON pointer of a reference leads to."""
    part = schema
    for step in reference.partition("#")[2].split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(part, dict):
            part = part.get(step)
        elif isinstance(part, list) and step.isdecimal() and int(step) < len(part):
            part = part[int(step)]
        else:
            return None
    return part


def _grammar_depth(source: str) -> int:
    text = _TEXTS.sub(" ", source)
    if "::=" in text:
        text = _CHARACTERS.sub(" ", text)
    starts = list(_DEFINED.finditer(text))
    ends = [*(one.start() for one in starts), len(text)][1:]
    rules = {one[1]: text[one.end() : end] for one, end in zip(starts, ends, strict=True)}

    def references(name: str) -> list[str]:
        return [other for other in _NAME.findall(rules[name]) if other in rules]

    return max((_depth(root, references) for root in ("start", "root") if root in rules), default=0)


def _depth(root: str, references: Callable[[str], Iterable[str]]) -> int:
    """The depth of a depth-first search from `root`, which is 0 levels deep; each name is entered once."""
    seen, path, depth = {root}, [iter(references(root))], 0
    while path:
        for name in path[-1]:
            if name not in seen:
                seen.add(name)
                path.append(iter(references(name)))
                depth = max(depth, len(path) - 1)
                break
        else:
            path.pop()
    return depth
