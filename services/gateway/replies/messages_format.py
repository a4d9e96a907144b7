"""The message and the events of /v1/messages, as Anthropic's clients read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic_core import from_json

from services.gateway.http.error_responses import anthropic_error
from services.gateway.replies.call_parts import CallPart, NewToolParser, ParsedPart, ReasoningPart
from services.gateway.replies.chat_format import CallIds, new_turn
from services.gateway.replies.reply_format import Output, Usage, UsageNow
from services.gateway.replies.text_stream import TextPiece


class MessagesFormat:
    """Owns one message: its parser of tool calls, the block that is open, and how it ended."""

    end = b""
    repeats = False

    def __init__(
        self, request_id: str, model: str, new_tool_parser: NewToolParser | None, call_ids: CallIds | None
    ) -> None:
        """`call_ids`: ids of tool calls that a repeat has, too; None: those of the parser, which are random."""
        self._head = {"id": f"msg_{request_id}", "type": "message", "role": "assistant", "model": model}
        self._turn = new_turn(new_tool_parser, call_ids)
        self._num_blocks = 0
        self._open: str | None = None  # the type of the block that is open
        self._ending: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}

    def opening(self, index: int) -> list[dict[str, Any]]:
        """The start of the message. `frame` adds its usage."""
        return [{"type": "message_start", "message": {**self._head, "content": [], **self._ending}}]

    def chunks(self, index: int, piece: TextPiece) -> list[dict[str, Any]]:
        """Blocks and their deltas; a block ends where another one begins."""
        events = [event for part in self._parts(piece) for event in self._events(part)]
        if piece.finish_reason is None:
            return events
        self._ending = self._ended(piece)
        return [*events, *self._close()]

    def frame(self, chunk: dict[str, Any], usage: UsageNow) -> dict[str, Any]:
        """Adds the prompt's usage to the start of the message."""
        if chunk["type"] != "message_start":
            return chunk
        return {**chunk, "message": {**chunk["message"], "usage": _usage(usage())}}

    def closing(self, usage: Usage) -> list[dict[str, Any]]:
        """Why the message ended, its usage, and its end."""
        return [
            {"type": "message_delta", "delta": self._ending, "usage": _usage(usage)},
            {"type": "message_stop"},
        ]

    def failed(self, error: dict[str, Any]) -> dict[str, Any]:
        """The error event."""
        return anthropic_error(error)

    def whole(self, outputs: Sequence[Output], usage: Usage) -> dict[str, Any]:
        """The message with all blocks."""
        piece = outputs[0].piece
        blocks = [_block(part) for part in _merged(self._parts(piece))]
        return {**self._head, "content": blocks, **self._ended(piece), "usage": _usage(usage)}

    def _parts(self, piece: TextPiece) -> Sequence[ParsedPart]:
        if self._turn is None:
            return [piece.text] if piece.text else []
        return self._turn.parts(piece)

    def _events(self, part: ParsedPart) -> list[dict[str, Any]]:
        if isinstance(part, str):
            begun = [] if self._open == "text" else self._begin({"type": "text", "text": ""})
            return [*begun, self._delta({"type": "text_delta", "text": part})] if part else []
        if isinstance(part, ReasoningPart):
            begun = [] if self._open == "thinking" else self._begin(_thinking(""))
            return [*begun, self._delta({"type": "thinking_delta", "thinking": part.text})]
        begun = []
        if part.id is not None:
            begun = self._begin({"type": "tool_use", "id": part.id, "name": part.name, "input": {}})
        return [*begun, self._delta({"type": "input_json_delta", "partial_json": part.arguments})]

    def _begin(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        closed = self._close()
        self._open = block["type"]
        self._num_blocks += 1
        return [*closed, {"type": "content_block_start", "index": self._num_blocks - 1, "content_block": block}]

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._num_blocks - 1, "delta": delta}

    def _close(self) -> list[dict[str, Any]]:
        if self._open is None:
            return []
        self._open = None
        return [{"type": "content_block_stop", "index": self._num_blocks - 1}]

    def _ended(self, piece: TextPiece) -> dict[str, Any]:
        if piece.finish_reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if self._turn is not None and self._turn.has_calls:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if isinstance(piece.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": piece.stop_reason}
        return {"stop_reason": "end_turn", "stop_sequence": None}


def _merged(parts: Sequence[ParsedPart]) -> list[ParsedPart]:
    """The parts, those of one text or of one thought in one."""
    merged: list[ParsedPart] = []
    for part in parts:
        last = merged[-1] if merged else None
        if isinstance(part, str) and isinstance(last, str):
            merged[-1] = last + part
        elif isinstance(part, ReasoningPart) and isinstance(last, ReasoningPart):
            merged[-1] = ReasoningPart(last.text + part.text)
        elif part:
            merged.append(part)
    return merged


def _block(part: ParsedPart) -> dict[str, Any]:
    if isinstance(part, CallPart):
        return {"type": "tool_use", "id": part.id, "name": part.name, "input": _input(part.arguments)}
    return {"type": "text", "text": part} if isinstance(part, str) else _thinking(part.text)


def _thinking(text: str) -> dict[str, Any]:
    """A block of reasoning. Nobody checks its signature."""
    return {"type": "thinking", "thinking": text, "signature": ""}


def _input(arguments: str) -> dict[str, Any]:
    """The arguments of a call; empty if they are no JSON object, which a call that was cut off may have."""
    try:
        value = from_json(arguments, allow_inf_nan=False)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
    }
