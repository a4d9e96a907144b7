"""What a parser of a model's text returns: text, reasoning, and tool calls or parts of them."""

from __future__ import annotations

import json
import math
import re
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

    def flush(self, *, is_cut_off: bool) -> list[ParsedPart]:
        """Returns what is left at the end of the text. A call that was cut off in the middle is left out."""


NewToolParser = Callable[[], ToolParser]


class ObjectEnd:
    """Follows the text of a JSON object that comes in pieces, to find its end. Each character is looked at once."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_quoted = False
        self._is_escaped = False  # the next character is

    @property
    def is_in_string(self) -> bool:
        """Whether what has come ends within a string."""
        return self._is_quoted

    def find(self, text: str, start: int) -> int | None:
        """Where the object ends in the next piece, `text[start:]`; None if it goes on."""
        start += self._is_escaped and start < len(text)
        self._is_escaped = False
        while found := (_QUOTED if self._is_quoted else _BARE).search(text, start):
            start = found.end()
            match found[0]:
                case '"':
                    self._is_quoted = not self._is_quoted
                case "\\":
                    self._is_escaped = start == len(text)
                    start += 1
                case "{":
                    self._depth += 1
                case "}":
                    self._depth -= 1
                    if self._depth == 0:
                        return start
        return None


_BARE, _QUOTED = re.compile(r'["{}]'), re.compile(r'["\\]')


def first_object(text: str, start: int = 0) -> tuple[dict[str, Any] | None, int]:
    """The JSON object that begins at `start`, if it is whole, and where it ends; not of NaN or infinity."""
    try:
        value, end = _decoder().raw_decode(text, start)
    except (ValueError, RecursionError):
        return None, start
    return (value, end) if isinstance(value, dict) else (None, start)


def json_or_text(text: str) -> Any:
    """The JSON value that a text is; the text if it is none."""
    try:
        return _decoder().decode(text)
    except (ValueError, RecursionError):
        return text


def _decoder() -> json.JSONDecoder:
    return json.JSONDecoder(parse_constant=_finite, parse_float=_finite)


def first_call(text: str, start: int = 0) -> tuple[dict[str, Any] | None, int]:
    """Likewise, an object with a name, or OpenAI's `{"type": "function", "function": …}` around one."""
    value, end = first_object(text, start)
    if value is not None and isinstance(value.get("function"), dict):
        value = value["function"]
    return (value, end) if value is not None and isinstance(value.get("name"), str) else (None, start)


def call_part(index: int, call: Mapping[str, Any]) -> CallPart:
    """A whole call."""
    arguments = call.get("arguments", call.get("parameters"))
    arguments = {} if arguments is None else arguments
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
