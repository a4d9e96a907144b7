"""Finds tool calls in a model's text while it streams. The result does not depend on where the pieces are cut.

The arguments of a named tool stream as they come. Other calls come out whole, and are therefore valid.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Literal

from services.gateway.replies.bare_calls import Llama3Calls, PythonicCalls
from services.gateway.replies.call_parts import CallPart, NewToolParser, ParsedPart, ToolParser, new_call_id
from services.gateway.replies.harmony import HARMONY_MARKS, HarmonyMessages
from services.gateway.replies.tagged_calls import (
    DEEPSEEK,
    DEEPSEEK_MARKS,
    HERMES,
    MISTRAL_MARKS,
    MistralCalls,
    Parameters,
    TaggedCalls,
    coder_calls,
)

ToolFormat = Literal["hermes", "qwen3_coder", "llama3_json", "pythonic", "mistral", "deepseek", "harmony"]
"""How a model writes calls: in tags, as bare JSON, as a list in Python, or with own special tokens."""

PARSERS: Mapping[ToolFormat, NewToolParser] = {
    "hermes": partial(TaggedCalls, HERMES),
    "qwen3_coder": partial(coder_calls, {}),
    "deepseek": partial(TaggedCalls, DEEPSEEK),
    "mistral": MistralCalls,
    "pythonic": PythonicCalls,
    "llama3_json": Llama3Calls,
    "harmony": HarmonyMessages,
}

MARKS: Mapping[str | None, frozenset[str]] = {
    "mistral": MISTRAL_MARKS,
    "deepseek": DEEPSEEK_MARKS,
    "harmony": HARMONY_MARKS,
}
"""Special tokens of some formats: without a text of theirs no call would be found."""

_SIGNS: Mapping[str, ToolFormat] = {
    "<|channel|>": "harmony",
    "<parameter=": "qwen3_coder",
    HERMES.open: "hermes",
    DEEPSEEK.open: "deepseek",
    "[TOOL_CALLS]": "mistral",
    "[func_name1(": "pythonic",
    '"parameters"': "llama3_json",
}


def parser_of(tool_format: ToolFormat, parameters: Parameters) -> NewToolParser:
    """The parser of a format. One whose values have no types takes them from the functions' parameters."""
    return partial(coder_calls, parameters) if tool_format == "qwen3_coder" else PARSERS[tool_format]


def format_of_template(template: str | None, forced: ToolFormat | None = None) -> ToolFormat | None:
    """The tool format of a chat template, `forced` if it has a place for tools; None without, or for an unknown one."""
    if template is None or "tools" not in template:
        return None
    return forced or next((form for sign, form in _SIGNS.items() if sign in template), None)


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
        return [CallPart(0, text, new_call_id(), self._name)]

    def flush(self, *, is_cut_off: bool) -> list[ParsedPart]:
        """Returns nothing: no text is held back."""
        return []


class FirstCall:
    """Leaves out all calls but the first."""

    def __init__(self, parser: ToolParser) -> None:
        self._parser = parser

    def push(self, text: str) -> list[ParsedPart]:
        """Returns the parser's parts without further calls."""
        return _without_more_calls(self._parser.push(text))

    def flush(self, *, is_cut_off: bool) -> list[ParsedPart]:
        """Likewise."""
        return _without_more_calls(self._parser.flush(is_cut_off=is_cut_off))


def _without_more_calls(parts: list[ParsedPart]) -> list[ParsedPart]:
    return [part for part in parts if not isinstance(part, CallPart) or part.index == 0]
