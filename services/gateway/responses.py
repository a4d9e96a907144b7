"""The response and chunk shapes of the two endpoints. Plain dicts in, JSON out; no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from halfmoon.pb.types_pb2 import Token
from services.gateway.intake import Encodes
from services.gateway.text_stream import TextPiece

_REPLACEMENT = "\ufffd"


def usage_of(prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """Token counts of one request."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a response carries besides its text."""

    logprobs: bool
    token_ids: bool

    def of(self, piece: TextPiece) -> bool:
        """Whether a chunk of `piece` says something, be its text empty."""
        return bool(piece.text or (self.logprobs and piece.tokens) or (self.token_ids and piece.token_ids))


class Shape(Protocol):
    """What differs between the endpoints. One object a request; pieces must be given in order."""

    def opening(self) -> dict[str, Any] | None:
        """The stream's first chunk, if the endpoint has one."""
        ...

    def chunks(self, piece: TextPiece) -> list[dict[str, Any]]:
        """Chunks for a piece; none for one that says nothing."""
        ...

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The chunk after the last one."""
        ...

    def whole(self, piece: TextPiece, usage: dict[str, Any]) -> dict[str, Any]:
        """The response without streaming."""
        ...


class ChatShape:
    """POST /v1/chat/completions."""

    def __init__(self, request_id: str, model: str, created: int, tokenizer: Encodes, wanted: Wanted) -> None:
        self._head = {"id": f"chatcmpl-{request_id}", "created": created, "model": model}
        self._tokenizer = tokenizer
        self._wanted = wanted

    def opening(self) -> dict[str, Any] | None:
        """The role comes first, alone."""
        return self._chunk({"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None})

    def chunks(self, piece: TextPiece) -> list[dict[str, Any]]:
        """Text and end are two chunks: the last one has an empty delta."""
        chunks = []
        if self._wanted.of(piece):
            extras = self._extras(piece)
            chunks.append(self._chunk({"delta": {"content": piece.text}, **extras, "finish_reason": None}))
        if piece.finish_reason is not None:
            chunks.append(self._chunk({"delta": {}, "logprobs": None, "finish_reason": piece.finish_reason}))
        return chunks

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """No choices."""
        return {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": usage}

    def whole(self, piece: TextPiece, usage: dict[str, Any]) -> dict[str, Any]:
        """One choice."""
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        choice = {"index": 0, "message": message, **self._extras(piece), "finish_reason": piece.finish_reason}
        return {**self._head, "object": "chat.completion", "choices": [choice], "usage": usage}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk", "choices": [{"index": 0, **choice}]}

    def _extras(self, piece: TextPiece) -> dict[str, Any]:
        logprobs = self._logprobs(piece.tokens) if self._wanted.logprobs else None
        return {"logprobs": logprobs, **_token_ids(piece, self._wanted)}

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any]:
        content = [
            {
                **self._entry(token.token_id, token.logprob),
                "top_logprobs": [self._entry(top.token_id, top.logprob) for top in token.top_logprobs],
            }
            for token in tokens
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._tokenizer.decode([token_id])
        whole = _REPLACEMENT not in text  # else a part of a character, whose bytes we cannot see
        return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if whole else None}


class CompletionShape:
    """POST /v1/completions."""

    def __init__(self, request_id: str, model: str, created: int, tokenizer: Encodes, wanted: Wanted) -> None:
        self._head = {"id": f"cmpl-{request_id}", "object": "text_completion", "created": created, "model": model}
        self._tokenizer = tokenizer
        self._wanted = wanted
        self._num_chars = 0  # of all tokens so far, for text_offset

    def opening(self) -> dict[str, Any] | None:
        """Nothing comes before the text."""
        return None

    def chunks(self, piece: TextPiece) -> list[dict[str, Any]]:
        """At most one chunk."""
        if piece.finish_reason is None and not self._wanted.of(piece):
            return []
        return [{**self._head, "choices": [self._choice(piece)]}]

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """No choices."""
        return {**self._head, "choices": [], "usage": usage}

    def whole(self, piece: TextPiece, usage: dict[str, Any]) -> dict[str, Any]:
        """One choice."""
        return {**self._head, "choices": [self._choice(piece)], "usage": usage}

    def _choice(self, piece: TextPiece) -> dict[str, Any]:
        logprobs = self._logprobs(piece.tokens) if self._wanted.logprobs else None
        choice = {"index": 0, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish_reason}
        return {**choice, **_token_ids(piece, self._wanted)}

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any]:
        texts = [self._tokenizer.decode([token.token_id]) for token in tokens]
        offsets = []
        for text in texts:
            offsets.append(self._num_chars)
            self._num_chars += len(text)
        tops = [self._tops(token) for token in tokens]
        return {
            "tokens": texts,
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": tops if any(tops) else None,
            "text_offset": offsets,
        }

    def _tops(self, token: Token) -> dict[str, float]:
        """By text; of two tokens that look the same the likelier one is kept."""
        tops: dict[str, float] = {}
        for top in token.top_logprobs:
            tops.setdefault(self._tokenizer.decode([top.token_id]), top.logprob)
        return tops


def _token_ids(piece: TextPiece, wanted: Wanted) -> dict[str, Any]:
    return {"token_ids": list(piece.token_ids)} if wanted.token_ids else {}
