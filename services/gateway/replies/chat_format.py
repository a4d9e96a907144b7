"""The response and the chunks of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from services.gateway.replies.call_parts import CallPart, NewToolParser, ParsedPart, ReasoningPart, ToolParser
from services.gateway.replies.logprob_entries import logprob_entries
from services.gateway.replies.reasoning import ReasoningSplitter
from services.gateway.replies.reply_format import (
    STREAM_END,
    Output,
    PromptLogprobsOf,
    ReplyOptions,
    Usage,
    UsageNow,
    closing_chunks,
    ending,
    framed,
    prompt_logprobs,
    prompt_token_ids,
    token_ids,
)
from services.gateway.replies.text_stream import Decodes, TextPiece
from services.gateway.replies.tool_parsers import NamedCall

CallIds = Callable[[int, int], str]
"""The id of a tool call, by its choice and its place among the calls of that."""


class ChatFormat:
    """Owns the tool calls found so far in each choice. One object a request."""

    end = STREAM_END

    def __init__(
        self,
        request_id: str,
        model: str,
        created: int,
        tokenizer: Decodes,
        options: ReplyOptions,
        prompt: Sequence[int],
        prompt_logprobs_of: PromptLogprobsOf = lambda _: (),
        new_tool_parser: NewToolParser | None = None,
        call_ids: CallIds | None = None,
    ) -> None:
        """`call_ids`: ids of tool calls that a repeat has, too; None: those of the parser, which are random."""
        self._head = {"id": f"chatcmpl-{request_id}", "created": created, "model": model}
        self._tokenizer = tokenizer
        self._options = options
        self._prompt = prompt
        self._prompt_ids = prompt_token_ids(prompt, options)
        self._prompt_logprobs_of = prompt_logprobs_of
        self._new_tool_parser = new_tool_parser
        self._call_ids = call_ids
        self._turns: dict[int, ToolTurn | None] = {}  # by choice

    @property
    def repeats(self) -> bool:
        """False if tool calls have to be found in the text."""
        return self._new_tool_parser is None and self._options.only_text

    def opening(self, index: int) -> list[dict[str, Any]]:
        """A chunk with the role alone."""
        delta = {"role": "assistant", "content": ""}
        role = self._chunk(index, {"delta": delta, "logprobs": None, "finish_reason": None})
        return [{**role, **self._prompt_ids}]

    def chunks(self, index: int, piece: TextPiece) -> list[dict[str, Any]]:
        """One chunk for each delta, and one with an empty delta at the end."""
        turn = self._turn(index)
        deltas = [{"content": piece.text}] if turn is None else turn.deltas(piece)
        chunks = []
        if self._options.shows(piece) or (turn is not None and deltas):
            extras = self._extras(piece)
            for delta in deltas or [{}]:
                chunks.append(self._chunk(index, {"delta": delta, **extras, "finish_reason": None}))
                extras = {"logprobs": None}  # they come once for a piece
        if piece.finish_reason is not None:
            chunks.append(self._chunk(index, {"delta": {}, "logprobs": None, **self._ending(piece, turn)}))
        return chunks

    def frame(self, chunk: dict[str, Any], usage: UsageNow) -> dict[str, Any]:
        """Adds the usage, if requested."""
        return framed(chunk, usage, self._options)

    def closing(self, usage: Usage) -> list[dict[str, Any]]:
        """A chunk with usage and timing, without choices, if requested."""
        return closing_chunks({**self._head, "object": "chat.completion.chunk"}, usage, self._options)

    def failed(self, error: dict[str, Any]) -> dict[str, Any]:
        """The error unchanged."""
        return error

    def whole(self, outputs: Sequence[Output], usage: Usage) -> dict[str, Any]:
        """The response with all choices."""
        choices = [self._choice(output) for output in outputs]
        head = {**self._head, "object": "chat.completion"}
        logprobs = prompt_logprobs(self._prompt, self._prompt_logprobs_of(0), self._tokenizer, self._options)
        return {**head, "choices": choices, "usage": usage.as_dict(), **usage.timed(), **self._prompt_ids, **logprobs}

    def _choice(self, output: Output) -> dict[str, Any]:
        piece, turn = output.piece, self._turn(output.index)
        content: dict[str, Any] = {"content": piece.text} if turn is None else turn.message(piece)
        message = {"role": "assistant", **content, "refusal": None}
        return {"index": output.index, "message": message, **self._extras(piece), **self._ending(piece, turn)}

    def _turn(self, index: int) -> ToolTurn | None:
        if index not in self._turns:
            self._turns[index] = new_turn(self._new_tool_parser, self._call_ids, index)
        return self._turns[index]

    def _ending(self, piece: TextPiece, turn: ToolTurn | None) -> dict[str, Any]:
        calls = turn is not None and turn.ends_in_calls and piece.finish_reason == "stop"
        return {**ending(piece), "finish_reason": "tool_calls"} if calls else ending(piece)

    def _chunk(self, index: int, choice: dict[str, Any]) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk", "choices": [{"index": index, **choice}]}

    def _extras(self, piece: TextPiece) -> dict[str, Any]:
        logprobs = None
        if self._options.logprobs:
            logprobs = {"content": logprob_entries(piece.content, self._tokenizer, self._options), "refusal": None}
        return {"logprobs": logprobs, **token_ids(piece, self._options)}


class ToolTurn:
    """Owns one choice's parser, of reasoning and tool calls, and whether it has found calls."""

    def __init__(self, parser: ToolParser, call_id: Callable[[int], str] | None = None) -> None:
        self._parser = parser
        self._call_id = call_id
        self.has_calls = False

    @property
    def ends_in_calls(self) -> bool:
        """Whether the finish reason is `tool_calls`. A named call ends like text, as with OpenAI."""
        parser = self._parser.answer if isinstance(self._parser, ReasoningSplitter) else self._parser
        return self.has_calls and not isinstance(parser, NamedCall)

    def deltas(self, piece: TextPiece) -> list[dict[str, Any]]:
        """The deltas of a piece, for a stream."""
        return [_delta(part) for part in self.parts(piece)]

    def message(self, piece: TextPiece) -> dict[str, Any]:
        """The message of a whole output."""
        parts = self.parts(piece)
        content = "".join(part for part in parts if isinstance(part, str))
        thoughts = "".join(part.text for part in parts if isinstance(part, ReasoningPart))
        calls = [_call(part) for part in parts if isinstance(part, CallPart)]
        message = {"content": content or None, "tool_calls": calls} if calls else {"content": content}
        return {**_reasoning(thoughts), **message} if thoughts else message

    def parts(self, piece: TextPiece) -> list[ParsedPart]:
        """What a piece yields: reasoning, content and calls."""
        parts = self._parser.push(piece.text)
        if piece.finish_reason is not None:
            parts += self._parser.flush(is_cut_off=piece.finish_reason == "length")
        self.has_calls |= any(isinstance(part, CallPart) for part in parts)
        return [self._named(part) if isinstance(part, CallPart) else part for part in parts]

    def _named(self, part: CallPart) -> CallPart:
        if part.id is None or self._call_id is None:
            return part
        return replace(part, id=self._call_id(part.index))


def new_turn(new_parser: NewToolParser | None, call_ids: CallIds | None, choice: int = 0) -> ToolTurn | None:
    """The turn of one choice; None without a parser, where all text is content."""
    if new_parser is None:
        return None
    return ToolTurn(new_parser(), None if call_ids is None else partial(call_ids, choice))


def _delta(part: ParsedPart) -> dict[str, Any]:
    if isinstance(part, str):
        return {"content": part}
    if isinstance(part, ReasoningPart):
        return _reasoning(part.text)
    if part.id is None:
        return {"tool_calls": [{"index": part.index, "function": {"arguments": part.arguments}}]}
    return {"tool_calls": [{"index": part.index, **_call(part)}]}


def _reasoning(text: str) -> dict[str, Any]:
    """Under both names that clients read."""
    return {"reasoning": text, "reasoning_content": text}


def _call(part: CallPart) -> dict[str, Any]:
    return {"id": part.id, "type": "function", "function": {"name": part.name, "arguments": part.arguments}}
