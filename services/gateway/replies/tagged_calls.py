"""Finds calls that a model marks, between texts: as Hermes and Qwen write them, Qwen3-Coder, DeepSeek, and Mistral."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from services.gateway.replies.call_parts import ObjectEnd, ParsedPart, call_part, first_call, first_object, json_or_text
from services.gateway.replies.stop_strings import StopStrings

_SLICE_CHARS = 1_024


class CallMarks(NamedTuple):
    """How a model marks each call."""

    open: str
    close: str
    read: Callable[[str], dict[str, Any] | None]  # a call from what is between them
    around: tuple[str, ...] = ()  # marks outside of calls
    can_end_open: bool = True  # the body says itself whether it is whole
    has_object: bool = True  # the body has a JSON object; a closing mark in a string of it is text


_DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"


def _read_deepseek(body: str) -> dict[str, Any] | None:
    """`NAME<sep>{...}` (V3.1), or `function<sep>NAME`, a line's end, and the arguments in a fence (V3, R1)."""
    left, _, right = body.partition(_DEEPSEEK_SEPARATOR)
    name, fence, rest = right.partition("```json\n")
    name, arguments = (name, rest.strip().removesuffix("```")) if fence else (left, right)
    value, _ = first_object(arguments.strip())
    return None if value is None else {"name": name.strip(), "arguments": value}


HERMES = CallMarks("<tool_call>", "</tool_call>", lambda body: first_call(body.strip())[0])
DEEPSEEK = CallMarks(
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    _read_deepseek,
    ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
)


Parameters = Mapping[str, Mapping[str, Any]]
"""The JSON schema of the parameters of each function."""

_CODER_PARAMETER = re.compile(r"<parameter=([^<>\n]*)>\n?(.*?)\n?(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)


def coder_calls(parameters: Parameters) -> TaggedCalls:
    """Parses Qwen3-Coder's calls: `<function=NAME>` and `<parameter=NAME>` with a value each, as text or as JSON."""
    read = partial(_read_coder, parameters)
    return TaggedCalls(CallMarks("<function=", "</function>", read, ("<tool_call>", "</tool_call>"), False, False))


def _read_coder(parameters: Parameters, body: str) -> dict[str, Any] | None:
    name, sign, rest = body.partition(">")
    name = name.strip()
    if not sign or not name:
        return None
    properties = parameters.get(name, {}).get("properties")
    schemas = properties if isinstance(properties, dict) else {}
    pairs = ((found[1].strip(), found[2]) for found in _CODER_PARAMETER.finditer(rest))
    return {"name": name, "arguments": {key: _typed(value, schemas.get(key)) for key, value in pairs}}


def _typed(value: str, schema: object) -> Any:
    """What the text of a value means by its schema: text if that allows it or is not known, else JSON if it is some."""
    kinds = _kinds(schema)
    if value == "null" and "null" in kinds:
        return None
    if not isinstance(schema, dict) or "string" in kinds or value in _items(schema.get("enum")):
        return value
    return json_or_text(_PYTHON_NAMES.get(value, value))


def _kinds(schema: object) -> set[str]:
    """The types that a schema names, itself or in its alternatives. Nobody has checked the schema."""
    kinds, pending = set[str](), [schema]
    while pending:
        part = pending.pop()
        if isinstance(part, dict):
            named = part.get("type")
            kinds.update(one for one in (*_items(named), named) if isinstance(one, str))
            pending += [*_items(part.get("anyOf")), *_items(part.get("oneOf"))]
    return kinds


def _items(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


_PYTHON_NAMES = {"True": "true", "False": "false", "None": "null"}


DEEPSEEK_MARKS = frozenset((DEEPSEEK.open, DEEPSEEK.close, _DEEPSEEK_SEPARATOR, *DEEPSEEK.around))


class TaggedCalls:
    """Parses calls between marks, with text before and after them."""

    def __init__(self, marks: CallMarks) -> None:
        self._marks = marks
        self._until = StopStrings([marks.open, *marks.around])  # the marks that may come next
        self._body: list[str] | None = None  # what has come after the opening mark
        self._object: ObjectEnd | None = None  # of the body, until the object has ended
        self._after_mark = False  # white space there is dropped
        self._num_calls = 0

    def push(self, text: str) -> list[ParsedPart]:
        """Returns text that is certainly no mark, and calls that are whole."""
        starts = range(0, len(text), _SLICE_CHARS)
        return [part for start in starts for part in self._take(text[start : start + _SLICE_CHARS])]

    def flush(self, *, is_cut_off: bool) -> list[ParsedPart]:
        """Returns a whole call even without its closing mark."""
        held = self._until.flush()
        if self._body is None:
            is_mark = is_cut_off and 2 * len(held) > len(self._marks.open)
            return [held] if held and not is_mark else []
        if self._object is not None and self._object.is_in_string:  # it never ends: marks in it count after all
            body = "".join([*self._body, held])
            self._marks = self._marks._replace(has_object=False)
            self._body, self._object, self._until = [], None, StopStrings([self._marks.close])
            return [*self.push(body), *self.flush(is_cut_off=is_cut_off)]
        part = self._call(held, closed=False)
        is_part = isinstance(part, str) or not self._marks.can_end_open
        return [] if is_cut_off and is_part else [part]

    def _take(self, text: str) -> Iterator[ParsedPart]:
        """Takes a short text, whose rest is copied after each mark."""
        while text:
            if self._after_mark and self._body is None:
                text = text.lstrip()
                self._after_mark = not text
            held = self._until.pending + text
            before, mark = self._until.push(text), self._until.matched
            text = "" if mark is None else held[len(before) + len(mark) :]
            if self._body is None and before:
                yield before
            elif self._body is not None:
                if self._is_in_string(before) and mark is not None:
                    self._body.append(before + mark)
                    self._until, mark = StopStrings([mark]), None
                elif mark is None:
                    self._body.append(before)
                else:
                    yield self._call(before)
            if mark is not None:
                self._after_mark = True
                opens = self._body is None and mark == self._marks.open
                self._until = StopStrings([self._marks.close] if opens else [self._marks.open, *self._marks.around])
                self._body = [] if opens else None
                self._object = ObjectEnd() if opens and self._marks.has_object else None

    def _is_in_string(self, piece: str) -> bool:
        """Whether the next piece of the body ends in a string of its JSON object."""
        if self._object is not None and self._object.find(piece, 0) is not None:
            self._object = None
        return self._object is not None and self._object.is_in_string

    def _call(self, end: str, *, closed: bool = True) -> ParsedPart:
        body = "".join([*(self._body or ()), end])
        call = self._marks.read(body)
        if call is None:
            return f"{self._marks.open}{body}{self._marks.close if closed else ''}"
        self._num_calls += 1
        return call_part(self._num_calls - 1, call)


class CallList:
    """Parses an output that is a JSON list of calls."""

    def __init__(self) -> None:
        self._held: list[str] = []  # since the last call
        self._head = ""  # before the object that has begun
        self._end: ObjectEnd | None = None  # of that; None: none has begun
        self._is_text = False
        self._num_calls = 0

    def push(self, text: str) -> list[ParsedPart]:
        """Returns the calls that have become whole, and what follows an object that is none."""
        parts: list[ParsedPart] = []
        at = 0
        while at < len(text):
            if self._is_text:
                return [*parts, text[at:]]
            start, end = at, None
            if self._end is None and (at := text.find("{", at)) >= 0:
                self._head = "".join([*self._held, text[start:at]])
                self._held, self._end, start = [], ObjectEnd(), at
            if self._end is not None:
                end = self._end.find(text, at)
            at = len(text) if end is None else end
            self._held.append(text[start:at])
            if end is not None:
                parts.append(self._whole())
        return parts

    def flush(self, *, is_cut_off: bool) -> list[ParsedPart]:
        """Returns as text what is not a call."""
        held = "".join([self._head, *self._held]).strip(_AROUND)
        return [held] if held and not is_cut_off else []

    def _whole(self) -> ParsedPart:
        head, body = self._head.lstrip(_AROUND), "".join(self._held)
        self._head, self._held, self._end = "", [], None
        call = self._read(head, body)
        self._is_text = call is None
        if call is None:
            return head + body
        self._num_calls += 1
        return call_part(self._num_calls - 1, call)

    def _read(self, head: str, body: str) -> dict[str, Any] | None:
        """The call that an object is, with what stands before it."""
        return None if head else first_call(body)[0]


_AROUND = "[], \n"  # what stands around the objects of a list
_MISTRAL_MARK = "[TOOL_CALLS]"
MISTRAL_MARKS = frozenset((_MISTRAL_MARK, "[CALL_ID]", "[ARGS]"))
_MISTRAL_NAME = re.compile(r"(?:\]?\s*\[?TOOL_CALLS\])?\s*([\w.-]+)(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*")


class MistralCalls(CallList):
    """Parses `[TOOL_CALLS]` with a list of calls after it, or (since 2025) with one call, `NAME[ARGS]{...}`, each."""

    def __init__(self) -> None:
        super().__init__()
        self._text: StopStrings | None = StopStrings([_MISTRAL_MARK])  # None: the mark has come

    def push(self, text: str) -> list[ParsedPart]:
        """Returns text before the mark, and calls that are whole."""
        if self._text is None:
            return super().push(text)
        held = self._text.pending + text
        content = self._text.push(text)
        parts: list[ParsedPart] = [content] if content else []
        if self._text.matched is None:
            return parts
        self._text = None
        return [*parts, *super().push(held[len(content) + len(_MISTRAL_MARK) :])]

    def flush(self, *, is_cut_off: bool) -> list[ParsedPart]:
        """Returns as text what is not a call."""
        if self._text is not None:
            held = self._text.flush()
            return [held] if held else []
        return super().flush(is_cut_off=is_cut_off)

    def _read(self, head: str, body: str) -> dict[str, Any] | None:
        named = _MISTRAL_NAME.fullmatch(head)
        if named is None:
            return super()._read(head, body)
        arguments, _ = first_object(body)
        return None if arguments is None else {"name": named[1], "arguments": arguments}
