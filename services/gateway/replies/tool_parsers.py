"""Finds tool calls in a model's text while it streams. The result does not depend on where the pieces are cut.

The arguments of a named tool stream as they come. Other calls come out whole, and are therefore valid.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from services.gateway.replies.stop_strings import StopStrings

ToolFormat = Literal["hermes", "llama3_json"]
"""How a model writes calls: as `<tool_call>{"name", "arguments"}</tool_call>`, or as bare {"name", "parameters"}."""

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
_BEGUN_CALL = re.compile(r'\{\s*"name"\s*:')


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


def format_of_template(template: str | None) -> ToolFormat | None:
    """The tool format of a chat template; None if it has no tools, or an unknown format."""
    if template is None or "tools" not in template:
        return None
    if _OPEN in template:
        return "hermes"
    return "llama3_json" if '"parameters"' in template else None


class NamedCall:
    """Parses an output that is the arguments of one function."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._begun = False

    def push(self, text: str) -> list[ParsedPart]:
        """Returns the text as a part of the call."""
        if not text:
            return []
        if self._begun:
            return [CallPart(0, text)]
        self._begun = True
        return [CallPart(0, text, _call_id(), self._name)]

    def flush(self, *, is_cut_off: bool) -> list[ParsedPart]:
        """Returns nothing: no text is held back."""
        return []


class RequiredCalls:
    """Parses an output that is a JSON list of calls."""

    def __init__(self) -> None:
        self._held = ""
        self._num_calls = 0

    def push(self, text: str) -> list[ParsedPart]:
        """Returns the calls that have become whole."""
        self._held += text
        parts: list[ParsedPart] = []
        while True:
            self._held = self._held.lstrip("[, \n]")
            call, end = _first_object(self._held)
            if call is None:
                return parts
            parts.append(_call_part(self._num_calls, call))
            self._num_calls += 1
            self._held = self._held[end:]

    def flush(self, *, is_cut_off: bool) -> list[ParsedPart]:
        """Returns what is no call as text."""
        held, self._held = self._held, ""
        return [held] if held and not is_cut_off else []


class HermesCalls:
    """Parses calls between tags, with text before and after them."""

    def __init__(self) -> None:
        self._text = StopStrings([_OPEN])
        self._inside: str | None = None  # the text after the opening tag
        self._after_call = False  # white space there is dropped
        self._num_calls = 0

    def push(self, text: str) -> list[ParsedPart]:
        """Returns text that is certainly not a tag, and calls that are whole."""
        parts: list[ParsedPart] = []
        while text or self._inside is not None:
            if self._inside is None:
                content, rest = self._before_tag(text)
                parts += [content] if content else []
                if rest is None:
                    break
                self._inside, text = rest, ""
            self._inside += text
            body, closing, text = self._inside.partition(_CLOSE)
            if not closing:
                break
            parts.append(self._call(body))
            self._inside = None
            self._after_call = True
        return parts

    def flush(self, *, is_cut_off: bool) -> list[ParsedPart]:
        """Returns a whole call even without its closing tag."""
        if self._inside is None:
            held = self._text.flush()
            return [held] if held else []
        body, self._inside = self._inside, None
        part = self._call(body, closed=False)
        return [] if is_cut_off and isinstance(part, str) else [part]

    def _before_tag(self, text: str) -> tuple[str, str | None]:
        """Returns the text before an opening tag, and what follows the tag if it has come."""
        if self._after_call:
            text = text.lstrip()
            self._after_call = not text
        held = self._text.pending + text
        content = self._text.push(text)
        if self._text.matched is None:
            return content, None
        self._text = StopStrings([_OPEN])
        return content, held[len(content) + len(_OPEN) :]

    def _call(self, body: str, *, closed: bool = True) -> ParsedPart:
        call, _ = _first_object(body.strip())
        if call is None:
            return f"{_OPEN}{body}{_CLOSE if closed else ''}"
        self._num_calls += 1
        return _call_part(self._num_calls - 1, call)


class Llama3Calls:
    """Parses an output that is either text or nothing but calls, separated by semicolons."""

    def __init__(self) -> None:
        self._held = ""
        self._is_text = False

    def push(self, text: str) -> list[ParsedPart]:
        """Returns text at once, and calls at the end."""
        if self._is_text:
            return [text] if text else []
        self._held += text
        begin = self._held.lstrip()
        if not begin or begin.startswith("{") or _PYTHON_TAG.startswith(begin[: len(_PYTHON_TAG)]):
            return []
        self._is_text = True
        held, self._held = self._held, ""
        return [held]

    def flush(self, *, is_cut_off: bool) -> list[ParsedPart]:
        """Returns all calls, or the text if it is not a list of calls."""
        held, self._held = self._held, ""
        rest, calls = held.strip().removeprefix(_PYTHON_TAG).strip(), list[ParsedPart]()
        while rest:
            call, end = _first_object(rest)
            if call is None:
                return calls if is_cut_off and _BEGUN_CALL.match(rest) else [held]
            calls.append(_call_part(len(calls), call))
            rest = rest[end:].lstrip("; \n")
        return calls


PARSERS: dict[ToolFormat, NewToolParser] = {"hermes": HermesCalls, "llama3_json": Llama3Calls}


def _first_object(text: str) -> tuple[dict[str, Any] | None, int]:
    """The call at the start of `text`, if it is whole, and where it ends."""
    try:
        value, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return None, 0
    is_call = isinstance(value, dict) and isinstance(value.get("name"), str)
    return (value, end) if is_call else (None, 0)


def _call_part(index: int, call: dict[str, Any]) -> CallPart:
    arguments = call.get("arguments", call.get("parameters", {}))
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return CallPart(index, text, _call_id(), call["name"])


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"
