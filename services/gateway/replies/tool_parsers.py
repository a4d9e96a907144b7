"""Tool calls in the text of a model, found while it streams. The result never depends on where the pieces are cut.

Arguments of a named tool stream as they come; other calls come out when they are whole, and so are right.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from services.gateway.replies.stop_strings import StopStrings

ToolFormat = Literal["hermes", "llama3_json"]
"""How a model writes calls: `<tool_call>{"name", "arguments"}</tool_call>`, or nothing but {"name", "parameters"}."""

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"


@dataclass(frozen=True, slots=True)
class CallPart:
    """A piece of one call; the first piece of a call has its id and name."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


Found = str | CallPart


class ToolParser(Protocol):
    """Takes text, gives content and calls."""

    def push(self, text: str) -> list[Found]:
        """What is certain now."""
        ...

    def flush(self) -> list[Found]:
        """What is left when the text has ended."""
        ...


NewToolParser = Callable[[], ToolParser]


def format_of_template(template: str | None) -> ToolFormat | None:
    """How a model with this chat template writes calls; None when it knows of no tools, or in no way we know."""
    if template is None or "tools" not in template:
        return None
    if _OPEN in template:
        return "hermes"
    return "llama3_json" if '"parameters"' in template else None


class NamedCall:
    """The whole output is the arguments of one function."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._begun = False

    def push(self, text: str) -> list[Found]:
        """The text, as a part of the call."""
        if not text:
            return []
        if self._begun:
            return [CallPart(0, text)]
        self._begun = True
        return [CallPart(0, text, _call_id(), self._name)]

    def flush(self) -> list[Found]:
        """Nothing is held."""
        return []


class RequiredCalls:
    """The whole output is a JSON list of calls."""

    def __init__(self) -> None:
        self._held = ""
        self._num_calls = 0

    def push(self, text: str) -> list[Found]:
        """The calls that are whole now."""
        self._held += text
        found: list[Found] = []
        while True:
            self._held = self._held.lstrip("[, \n]")
            call, end = _first_object(self._held)
            if call is None:
                return found
            found.append(_call_part(self._num_calls, call))
            self._num_calls += 1
            self._held = self._held[end:]

    def flush(self) -> list[Found]:
        """A call that was cut off comes as text."""
        held, self._held = self._held, ""
        return [held] if held else []


class HermesCalls:
    """Calls stand between tags, text before and after them."""

    def __init__(self) -> None:
        self._text = StopStrings([_OPEN])
        self._inside: str | None = None  # the text after the opening tag
        self._after_call = False  # white space there is nobody's
        self._num_calls = 0

    def push(self, text: str) -> list[Found]:
        """Text that is certainly no tag, and calls that are whole."""
        found: list[Found] = []
        while text or self._inside is not None:
            if self._inside is None:
                content, rest = self._before_tag(text)
                found += [content] if content else []
                if rest is None:
                    break
                self._inside, text = rest, ""
            self._inside += text
            body, closing, text = self._inside.partition(_CLOSE)
            if not closing:
                break
            found.append(self._call(body))
            self._inside = None
            self._after_call = True
        return found

    def flush(self) -> list[Found]:
        """A call without its closing tag counts if it is whole."""
        if self._inside is None:
            held = self._text.flush()
            return [held] if held else []
        body, self._inside = self._inside, None
        return [self._call(body, closed=False)]

    def _before_tag(self, text: str) -> tuple[str, str | None]:
        """The text that is out, and what follows the tag, if it has come."""
        if self._after_call:
            text = text.lstrip()
            self._after_call = not text
        held = self._text.pending + text
        content = self._text.push(text)
        if self._text.matched is None:
            return content, None
        self._text = StopStrings([_OPEN])
        return content, held[len(content) + len(_OPEN) :]

    def _call(self, body: str, *, closed: bool = True) -> Found:
        call, _ = _first_object(body.strip())
        if call is None:
            return f"{_OPEN}{body}{_CLOSE if closed else ''}"
        self._num_calls += 1
        return _call_part(self._num_calls - 1, call)


class Llama3Calls:
    """An output that begins as a call holds nothing but calls, apart by semicolons."""

    def __init__(self) -> None:
        self._held = ""
        self._is_text = False

    def push(self, text: str) -> list[Found]:
        """Text at once, calls at the end."""
        if self._is_text:
            return [text] if text else []
        self._held += text
        begin = self._held.lstrip()
        if not begin or begin.startswith("{") or _PYTHON_TAG.startswith(begin[: len(_PYTHON_TAG)]):
            return []
        self._is_text = True
        held, self._held = self._held, ""
        return [held]

    def flush(self) -> list[Found]:
        """All calls, or the text if it is no list of them."""
        held, self._held = self._held, ""
        rest, found = held.strip().removeprefix(_PYTHON_TAG).strip(), list[Found]()
        while rest:
            call, end = _first_object(rest)
            if call is None:
                return [held]
            found.append(_call_part(len(found), call))
            rest = rest[end:].lstrip("; \n")
        return found


PARSERS: dict[ToolFormat, NewToolParser] = {"hermes": HermesCalls, "llama3_json": Llama3Calls}


def _first_object(text: str) -> tuple[dict[str, Any] | None, int]:
    """The call that `text` begins with, if it is whole, and where it ends."""
    try:
        found, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return None, 0
    is_call = isinstance(found, dict) and isinstance(found.get("name"), str)
    return (found, end) if is_call else (None, 0)


def _call_part(index: int, call: dict[str, Any]) -> CallPart:
    arguments = call.get("arguments", call.get("parameters", {}))
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return CallPart(index, text, _call_id(), call["name"])


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"
