"""Parts a model's reasoning from its answer while it streams: what is between <think> and </think> at the start."""

from __future__ import annotations

from services.gateway.replies.call_parts import ParsedPart, ReasoningPart, ToolParser
from services.gateway.replies.stop_strings import StopStrings

TAGS = _OPEN, _CLOSE = "<think>", "</think>"


def reasons(template: str | None) -> bool:
    """Whether models with this chat template write their reasoning in tags."""
    return template is not None and (_OPEN in template or _CLOSE in template)


def is_begun_by(prompt: str) -> bool:
    """Whether the output goes on inside the tags, because the template has written the first one."""
    return prompt.rstrip().endswith(_OPEN)


def is_ended_by(prompt: str) -> bool:
    """Whether the output is the answer, because the template has written both tags."""
    return prompt.rstrip().endswith(_CLOSE)


class ReasoningSplitter:
    """Owns how far the reasoning is; what follows it goes to the parser of tool calls, if there is one."""

    def __init__(self, answer: ToolParser | None, *, is_begun: bool, is_shown: bool) -> None:
        """is_shown: False drops the reasoning."""
        self.answer = answer
        self._is_shown = is_shown
        self._held = ""  # white space and the beginning of a tag, as long as it may become one
        self._is_open: bool | None = True if is_begun else None  # None: not decided yet
        self._end = StopStrings([_CLOSE])
        self._is_blank = is_begun  # white space after a tag is dropped

    def push(self, text: str) -> list[ParsedPart]:
        """Returns reasoning and what follows it, as far as they are certain."""
        if self._is_open is None:
            self._held += text
            begun = self._held.lstrip()
            if not begun.startswith(_OPEN) and _OPEN.startswith(begun):
                return []
            self._is_open = self._is_blank = begun.startswith(_OPEN)
            text, self._held = begun.removeprefix(_OPEN) if self._is_open else self._held, ""
        if not self._is_open:
            return self._answered(text)
        text = self._stripped(text)
        held = self._end.pending + text
        thought = self._end.push(text)
        if self._end.matched is None:
            return self._thought(thought)
        self._is_open, self._is_blank = False, True
        return [*self._thought(thought), *self._answered(held[len(thought) + len(_CLOSE) :])]

    def flush(self, *, is_cut_off: bool) -> list[ParsedPart]:
        """Returns what is left at the end of the text."""
        if self._is_open:
            return self._thought(self._end.flush())
        held, self._held = self._held, ""
        rest = self._answered(held)
        return rest if self.answer is None else [*rest, *self.answer.flush(is_cut_off=is_cut_off)]

    def _thought(self, text: str) -> list[ParsedPart]:
        return [ReasoningPart(text)] if text and self._is_shown else []

    def _answered(self, text: str) -> list[ParsedPart]:
        text = self._stripped(text)
        if self.answer is not None:
            return self.answer.push(text)
        return [text] if text else []

    def _stripped(self, text: str) -> str:
        if self._is_blank:
            text = text.lstrip()
            self._is_blank = not text
        return text
