"""What a parser of a model's text returns: text, reasoning, and tool calls or parts of them."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class CallPart:
    """A part of one call. The first part has the id and the name."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """A part of what the model wrote before its answer."""

    text: str


ParsedPart = str | CallPart | ReasoningPart


class ToolParser(Protocol):
    """Takes text, and returns content and calls."""

    def push(self, text: str) -> list[ParsedPart]:
        """Returns the parts that have become certain."""
        ...

    def flush(self, *, is_cut_off: bool) -> list[ParsedPart]:
        """Returns what is left at the end of the text. A call that was cut off in the middle is left out."""
        ...


NewToolParser = Callable[[], ToolParser]


def first_object(text: str) -> tuple[dict[str, Any] | None, int]:
    """The JSON object at the start of `text`, if it is whole, and where it ends; not of NaN or infinity."""
    try:
        value, end = json.JSONDecoder(parse_constant=_finite, parse_float=_finite).raw_decode(text)
    except (ValueError, RecursionError):
        return None, 0
    return (value, end) if isinstance(value, dict) else (None, 0)


def first_call(text: str) -> tuple[dict[str, Any] | None, int]:
    """Likewise, an object with a name."""
    value, end = first_object(text)
    return (value, end) if value is not None and isinstance(value.get("name"), str) else (None, 0)


def call_part(index: int, call: Mapping[str, Any]) -> CallPart:
    """A whole call."""
    arguments = call.get("arguments", call.get("parameters", {}))
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return CallPart(index, _writable(text), new_call_id(), _writable(call["name"]))


def _writable(text: str) -> str:
    """The text with half characters, which a model may write as escapes (`\\ud800`), replaced: UTF-8 has none."""
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")


def _finite(number: str) -> float:
    if math.isfinite(value := float(number)):
        return value
    raise ValueError(f"JSON does not have the number {number}")


def new_call_id() -> str:
    """A random id."""
    return f"call_{secrets.token_hex(12)}"
