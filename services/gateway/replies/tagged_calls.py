"""Finds calls that a model marks, between texts: as Hermes and Qwen write them, DeepSeek, and Mistral."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from services.gateway.replies.call_parts import ParsedPart, call_part, first_call, first_object
from services.gateway.replies.stop_strings import StopStrings


class CallMarks(NamedTuple):
    """How a model marks each call."""

    open: str
    close: str
    read: Callable[[str], dict[str, Any] | None]  # a call from what is between them
    around: tuple[str, ...] = ()  # marks outside of calls


def _read_deepseek(body: str) -> dict[str, Any] | None:
    """`NAME<sep>{...}` (V3.1), or `function<sep>NAME`, a line's end, and the arguments in a fence (V3, R1)."""
    left, _, right = body.partition("<｜tool▁sep｜>")
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


class TaggedCalls:
    """Parses calls between marks, with text before and after them."""

    def __init__(self, marks: CallMarks) -> None:
        self._marks = marks
        self._text = StopStrings([marks.open, *marks.around])
        self._inside: str | None = None  # the text after the opening mark
        self._after_call = False  # white space there is dropped
        self._num_calls = 0

    def push(self, text: str) -> list[ParsedPart]:
        """Returns text that is certainly no mark, and calls that are whole."""
        parts: list[ParsedPart] = []
        while text or self._inside is not None:
            if self._inside is None:
                content, mark, text = self._before_mark(text)
                parts += [content] if content else []
                if mark is None:
                    break
                if mark != self._marks.open:
                    continue
                self._inside = ""
            self._inside += text
            body, closing, text = self._inside.partition(self._marks.close)
            if not closing:
                break
            parts.append(self._call(body))
            self._inside = None
            self._after_call = True
        return parts

    def flush(self, *, is_cut_off: bool) -> list[ParsedPart]:
        """Returns a whole call even without its closing mark."""
        if self._inside is None:
            held = self._text.flush()
            return [held] if held else []
        body, self._inside = self._inside, None
        part = self._call(body, closed=False)
        return [] if is_cut_off and isinstance(part, str) else [part]

    def _before_mark(self, text: str) -> tuple[str, str | None, str]:
        """Returns the text before a mark, the mark if it has come, and what follows it."""
        if self._after_call:
            text = text.lstrip()
            self._after_call = not text
        held = self._text.pending + text
        content, mark = self._text.push(text), self._text.matched
        if mark is None:
            return content, None, ""
        self._text = StopStrings([self._marks.open, *self._marks.around])
        return content, mark, held[len(content) + len(mark) :]

    def _call(self, body: str, *, closed: bool = True) -> ParsedPart:
        call = self._marks.read(body)
        if call is None:
            return f"{self._marks.open}{body}{self._marks.close if closed else ''}"
        self._num_calls += 1
        return call_part(self._num_calls - 1, call)


class CallList:
    """Parses an output that is a JSON list of calls."""

    def __init__(self) -> None:
        self._held = ""
        self._num_calls = 0

    def push(self, text: str) -> list[ParsedPart]:
        """Returns the calls that have become whole."""
        self._held += text
        parts: list[ParsedPart] = []
        while "}" in text:  # otherwise no call has become whole
            self._held = self._held.lstrip("[], \n")
            call, end = self._first()
            if call is None:
                break
            parts.append(call_part(self._num_calls, call))
            self._num_calls += 1
            self._held = self._held[end:]
        return parts

    def flush(self, *, is_cut_off: bool) -> list[ParsedPart]:
        """Returns as text what is not a call."""
        held, self._held = self._held.strip("[], \n"), ""
        return [held] if held and not is_cut_off else []

    def _first(self) -> tuple[dict[str, Any] | None, int]:
        """The call that the held text begins with, if it is whole, and where it ends."""
        return first_call(self._held)


_MISTRAL_MARK = "[TOOL_CALLS]"
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

    def _first(self) -> tuple[dict[str, Any] | None, int]:
        if self._held.startswith("{"):
            return super()._first()
        named = _MISTRAL_NAME.match(self._held)
        if named is None:
            return None, 0
        arguments, end = first_object(self._held[named.end() :])
        return (None, 0) if arguments is None else ({"name": named[1], "arguments": arguments}, named.end() + end)
