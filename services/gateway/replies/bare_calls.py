"""Parses outputs that are either text or nothing but calls, without any mark: Llama's two styles."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Iterator
from typing import Any

from services.gateway.replies.call_parts import ParsedPart, call_part, first_call

_PYTHON_TAG = "<|python_tag|>"
_BEGUN_CALL = re.compile(r'\{\s*"name"\s*:')
_JSON_NAMES = {"true": True, "false": False, "null": None}


class Llama3Calls:
    """Parses calls as JSON objects, separated by semicolons."""

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
            call, end = first_call(rest)
            if call is None:
                return calls if is_cut_off and _BEGUN_CALL.match(rest) else [held]
            calls.append(call_part(len(calls), call))
            rest = rest[end:].lstrip("; \n")
        return calls


class PythonicCalls:
    """Parses calls as a list in Python, `[name(argument=value), ...]`, one by one."""

    def __init__(self) -> None:
        self._raw = ""  # what has become neither a call nor text
        self._one = ""  # of that, the call that has begun
        self._is_open = False  # inside the list
        self._is_text = False
        self._depth = 0  # of brackets within the call
        self._quote = ""  # around the characters that come
        self._is_escaped = False
        self._num_calls = 0
        self._is_blank = False  # white space after the list is dropped

    def push(self, text: str) -> list[ParsedPart]:
        """Returns text that is certainly no list of calls at once, and calls that are whole."""
        parts: list[ParsedPart] = []
        for at, character in enumerate(text):
            if self._is_text:
                rest = text[at:].lstrip() if self._is_blank else text[at:]
                self._is_blank = self._is_blank and not rest
                return [*parts, rest] if rest else parts
            parts += self._take(character)
        return parts

    def flush(self, *, is_cut_off: bool) -> list[ParsedPart]:
        """Returns as text what is not a call."""
        raw, self._raw = self._raw, ""
        return [raw] if raw and not (is_cut_off and self._is_open) else []

    def _take(self, character: str) -> Iterator[ParsedPart]:
        self._raw += character
        if not self._is_open:
            self._is_open = character == "["
            self._is_text = not (self._is_open or character.isspace())
            if self._is_text:
                yield self._as_text()
        elif not self._quote and not self._depth and character in ",]":
            yield from self._ended(character)
        else:
            self._one += character
            self._follow(character)

    def _follow(self, character: str) -> None:
        """Notes whether the next character is in a text or in brackets."""
        if self._quote:
            ends = character == self._quote and not self._is_escaped
            self._is_escaped = character == "\\" and not self._is_escaped
            self._quote = "" if ends else self._quote
        elif character in "\"'":
            self._quote = character
        else:
            self._depth += (character in "([{") - (character in ")]}")

    def _ended(self, character: str) -> Iterator[ParsedPart]:
        one, self._one = self._one.strip(), ""
        call = _python_call(one)
        if call is None:
            self._is_text = True
            yield self._as_text()
            return
        self._raw, self._is_open = "", character == ","
        self._is_text = self._is_blank = character == "]"
        self._num_calls += 1
        yield call_part(self._num_calls - 1, call)

    def _as_text(self) -> str:
        raw, self._raw = self._raw, ""
        return raw


def _python_call(source: str) -> dict[str, Any] | None:
    """The call that an expression is; None if it is none, or has other than named and literal arguments."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of escapes that a model writes
            node = ast.parse(source, mode="eval").body
        if not isinstance(node, ast.Call) or node.args or not isinstance(node.func, ast.Name | ast.Attribute):
            return None
        name = ast.unparse(node.func)
        arguments = {word.arg: _literal(word.value) for word in node.keywords if word.arg is not None}
        return {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False, allow_nan=False)}
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _JSON_NAMES:
        return _JSON_NAMES[node.id]
    return ast.literal_eval(node)
