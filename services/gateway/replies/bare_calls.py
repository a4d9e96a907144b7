"""Parses outputs that are either text or nothing but calls, without any mark: Llama's two styles."""

from __future__ import annotations

import ast
import json
import re
import warnings
from typing import Any

from services.gateway.replies.call_parts import ParsedPart, call_part, first_call

_PYTHON_TAG = "<|python_tag|>"
_BEGUN_CALL = re.compile(r'\{\s*(?:\Z|"type"\s*:\s*"function"\s*(?:\Z|,)|"(?:name|parameters|function)"\s*(?:\Z|:))')
_SEPARATORS = re.compile(r"[; \n]*")
_JSON_NAMES = {"true": True, "false": False, "null": None}


class Llama3Calls:
    """Parses calls as JSON objects, separated by semicolons."""

    def __init__(self) -> None:
        self._begin = ""  # the characters that decide
        self._held: list[str] = []
        self._is_text = False

    def push(self, text: str) -> list[ParsedPart]:
        """Returns text at once, and calls at the end."""
        if self._is_text:
            return [text] if text else []
        self._held.append(text)
        if len(self._begin) < len(_PYTHON_TAG):
            self._begin = (self._begin + text).lstrip()[: len(_PYTHON_TAG)]
        if self._begin.startswith("{") or _PYTHON_TAG.startswith(self._begin):
            return []
        self._is_text = True
        return [self._rest()]

    def flush(self, *, is_cut_off: bool) -> list[ParsedPart]:
        """Returns all calls, or the text if it is not a list of calls."""
        held, calls, at = self._rest(), list[ParsedPart](), 0
        rest = held.strip().removeprefix(_PYTHON_TAG).strip()
        while at < len(rest):
            call, end = first_call(rest, at)
            if call is None:
                return calls if is_cut_off and _BEGUN_CALL.match(rest, at) else [held]
            calls.append(call_part(len(calls), call))
            separators = _SEPARATORS.match(rest, end)
            at = end if separators is None else separators.end()
        return calls

    def _rest(self) -> str:
        held, self._held = "".join(self._held), []
        return held


_MAX_NAME_CHARS = 256
_MAX_DEPTH = 64
_CLOSING = re.compile(r"\s*\]")
_BEGUN_NAME = re.compile(r"\s*(?:[^\W\d][\w.]*\s*)?")
_NAME = re.compile(r"\s*[^\W\d][\w.]*\s*")
_SIGNS = {  # what matters in arguments, by the quotation marks around it
    "": re.compile(r"""'{3}|"{3}|(?P<undecided>(?:'{1,2}|"{1,2})\Z)|['"()\[\]{}]"""),
    **{mark: re.compile(rf"\\.|{mark}|\n|(?P<undecided>\\\Z)", re.DOTALL) for mark in "'\""},
    **{mark * 3: re.compile(rf"\\.|{mark}{{3}}|(?P<undecided>(?:\\|{mark}+)\Z)", re.DOTALL) for mark in "'\""},
}


class PythonicCalls:
    """Parses calls as a list in Python, `[name(argument=value), ...]`, one by one. Each character is looked at once.

    What cannot be such a list becomes text as soon as that is certain.
    """

    def __init__(self) -> None:
        self._state = "begin"  # then name, arguments, after and ended for each call, and text
        self._raw: list[str] = []  # what has become neither a call nor text
        self._undecided = ""  # what follows that: the beginning of quotation marks or of an escape
        self._name = ""
        self._depth = 0  # of brackets within the call
        self._quote = ""  # around the characters that come
        self._num_calls = 0
        self._is_blank = False  # white space after the list is dropped

    def push(self, text: str) -> list[ParsedPart]:
        """Returns text that is certainly no list of calls at once, and calls that are whole."""
        parts: list[ParsedPart] = []
        text, self._undecided, at = self._undecided + text, "", 0
        while at < len(text) and not self._undecided and self._state != "text":
            start, at = at, self._read(text, at)
            self._raw.append(text[start:at])
            if self._state == "ended":
                parts.append(self._call(text[at - 1]))
            elif self._state == "closed":
                self._raw, self._state, self._is_blank = [], "text", True
            elif self._state == "text":
                parts.append(self._as_text())
        if self._state == "text":
            rest = text[at:].lstrip() if self._is_blank else text[at:]
            self._is_blank = self._is_blank and not rest
            parts.append(rest)
        return [part for part in parts if part]

    def flush(self, *, is_cut_off: bool) -> list[ParsedPart]:
        """Returns as text what is not a call."""
        raw, self._undecided = self._as_text() + self._undecided, ""
        is_open = self._state not in ("begin", "text")
        return [raw] if raw and not (is_cut_off and is_open) else []

    def _read(self, text: str, at: int) -> int:
        """Reads on in one state; returns where that ends."""
        if self._state == "name":
            return self._read_name(text, at)
        if self._state == "arguments":
            return self._read_arguments(text, at)
        while at < len(text) and text[at].isspace():
            at += 1
        if at < len(text) and self._state == "begin":
            self._state = "name" if text[at] == "[" else "text"
        elif at < len(text):
            self._state = "ended" if text[at] in ",]" else "text"
        return min(at + (self._state != "text"), len(text))

    def _read_name(self, text: str, at: int) -> int:
        if self._num_calls and not self._name.strip() and (closing := _CLOSING.match(text, at)):
            self._state = "closed"  # Python lets a list end with a comma
            return closing.end()
        end = text.find("(", at, at + _MAX_NAME_CHARS)
        stop = min(at + _MAX_NAME_CHARS, len(text)) if end < 0 else end
        self._name += text[at:stop]
        if len(self._name) > _MAX_NAME_CHARS or not (_BEGUN_NAME if end < 0 else _NAME).fullmatch(self._name):
            self._state = "text"
            return stop
        if end >= 0:
            self._name, self._state, self._depth = "", "arguments", 1
            stop += 1
        return stop

    def _read_arguments(self, text: str, at: int) -> int:
        while found := _SIGNS[self._quote].search(text, at):
            sign, at = found[0], found.end()
            if found.lastgroup == "undecided":
                self._undecided = sign
                return found.start()
            if self._quote:
                self._quote = "" if sign == self._quote else self._quote
                self._state = "text" if sign == "\n" else self._state
            elif sign in "([{":
                self._depth += 1
                self._state = "text" if self._depth > _MAX_DEPTH else self._state
            elif sign in ")]}":
                self._depth -= 1
                self._state = "arguments" if self._depth else "after"
            else:
                self._quote = sign
            if self._state != "arguments":
                return at
        return len(text)

    def _call(self, sign: str) -> ParsedPart:
        """The call that has been read up to the sign behind it, or its text."""
        raw = self._as_text()
        call = _python_call(raw[:-1].strip().removeprefix("["))
        self._state = "name" if call is not None and sign == "," else "text"
        if call is None:
            return raw
        self._is_blank = sign == "]"
        self._num_calls += 1
        return call_part(self._num_calls - 1, call)

    def _as_text(self) -> str:
        raw, self._raw = "".join(self._raw), []
        return raw


def _python_call(source: str) -> dict[str, Any] | None:
    """The call that an expression is; None if it is none, or has other than named and literal arguments."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of escapes that a model writes
            node = ast.parse(source.strip(), mode="eval").body
        if not isinstance(node, ast.Call) or node.args or not isinstance(node.func, ast.Name | ast.Attribute):
            return None
        arguments: dict[Any, Any] = {}
        for word in node.keywords:
            value = _literal(word.value)
            arguments.update(value if word.arg is None else {word.arg: value})
        if not all(isinstance(name, str) for name in arguments):
            return None
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        return {"name": ast.unparse(node.func), "arguments": text}
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _JSON_NAMES:
        return _JSON_NAMES[node.id]
    return ast.literal_eval(node)
