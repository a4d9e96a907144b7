"""Parses the channels in which gpt-oss writes: reasoning, answer and calls, each a message with a header.

    <|channel|>analysis<|message|>THOUGHT<|end|><|start|>assistant<|channel|>final<|message|>ANSWER<|return|>
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{ARGUMENTS}<|call|>

The template has written `<|start|>assistant`. Source of the format: OpenAI's harmony response format, 2025.
"""

from __future__ import annotations

import re
from typing import Literal

from services.gateway.replies.call_parts import ParsedPart, ReasoningPart, call_part, first_object
from services.gateway.replies.stop_strings import StopStrings

_CHANNEL, _MESSAGE = "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
HARMONY_MARKS = frozenset((_CHANNEL, _MESSAGE, "<|constrain|>", *_ENDS))
ANSWER_HEADER = f"{_CHANNEL}final{_MESSAGE}"
"""With it behind a prompt, the output is the answer alone."""

_FUNCTION = re.compile(r"\bto=functions\.([\w.-]+)")

_Section = Literal["header", "reasoning", "answer", "call"]


class HarmonyMessages:
    """Owns the section that is open, and what is held of it: headers and calls are read whole."""

    def __init__(self, *, is_shown: bool = True) -> None:
        """is_shown: False drops the reasoning."""
        self._is_shown = is_shown
        self._section: _Section = "header"
        self._until = StopStrings([_MESSAGE])  # what ends the section
        self._held: list[str] = []
        self._name = ""  # of the function that is called
        self._written: set[_Section] = set()
        self._is_next = False  # text of a second message begins on a line of its own
        self._num_calls = 0

    def push(self, text: str) -> list[ParsedPart]:
        """Returns reasoning, answer and whole calls, as far as they are certain."""
        parts: list[ParsedPart] = []
        while text:
            held = self._until.pending + text
            before, mark = self._until.push(text), self._until.matched
            text = "" if mark is None else held[len(before) + len(mark) :]
            parts += self._written_out(before)
            if mark is not None:
                parts += self._call() if self._section == "call" else []
                self._turn()
        return parts

    def flush(self, *, is_cut_off: bool) -> list[ParsedPart]:
        """Returns what is left at the end of the text; a text without any header is the answer."""
        rest = self._written_out(self._until.flush())
        if self._section == "call":
            return [] if is_cut_off else self._call()
        held = "".join(self._held)
        return [held] if self._section == "header" and held and not self._written and _CHANNEL not in held else rest

    def _written_out(self, text: str) -> list[ParsedPart]:
        if self._section in ("header", "call"):
            self._held.append(text)
            return []
        if not text or (self._section == "reasoning" and not self._is_shown):
            return []
        text, self._is_next = f"\n{text}" if self._is_next else text, False
        return [text if self._section == "answer" else ReasoningPart(text)]

    def _turn(self) -> None:
        """Goes on behind a mark."""
        if self._section != "header":
            self._section, self._until, self._held = "header", StopStrings([_MESSAGE]), []
            return
        header = "".join(self._held)
        function, channel = _FUNCTION.search(header), header.rpartition(_CHANNEL)[2].lstrip()
        if function is not None:
            self._section, self._name = "call", function[1]
        else:
            self._section = "reasoning" if channel.startswith("analysis") or "to=" in header else "answer"
        self._is_next = self._section in self._written
        self._written.add(self._section)
        self._until, self._held = StopStrings(_ENDS), []

    def _call(self) -> list[ParsedPart]:
        body = "".join(self._held).strip()
        arguments, _ = first_object(body)
        if arguments is None:
            return [body] if body else []
        self._num_calls += 1
        return [call_part(self._num_calls - 1, {"name": self._name, "arguments": arguments})]
