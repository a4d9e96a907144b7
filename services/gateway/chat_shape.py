"""The response and the chunks of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from halfmoon.pb.types_pb2 import Token
from services.gateway.served_model import Encodes
from services.gateway.shape import Output, Usage, Wanted, ending, framed, token_ids, token_name
from services.gateway.text_stream import TextPiece

_REPLACEMENT = "\ufffd"


class ChatShape:
    """One object a request."""

    def __init__(self, request_id: str, model: str, created: int, tokenizer: Encodes, wanted: Wanted) -> None:
        self._head = {"id": f"chatcmpl-{request_id}", "created": created, "model": model}
        self._tokenizer = tokenizer
        self._wanted = wanted

    def opening(self, index: int) -> list[dict[str, Any]]:
        """The role comes first, alone."""
        delta = {"role": "assistant", "content": ""}
        return [self._chunk(index, {"delta": delta, "logprobs": None, "finish_reason": None})]

    def chunks(self, index: int, piece: TextPiece) -> list[dict[str, Any]]:
        """Text and end are two chunks: the last one has an empty delta."""
        chunks = []
        if self._wanted.of(piece):
            extras = self._extras(piece)
            chunks.append(self._chunk(index, {"delta": {"content": piece.text}, **extras, "finish_reason": None}))
        if piece.finish_reason is not None:
            chunks.append(self._chunk(index, {"delta": {}, "logprobs": None, **ending(piece)}))
        return chunks

    def frame(self, chunk: dict[str, Any], usage: Usage) -> dict[str, Any]:
        """With the usage, if it is wanted."""
        return framed(chunk, usage, self._wanted)

    def closing(self, usage: Usage) -> list[dict[str, Any]]:
        """The usage, without choices."""
        if self._wanted.usage == "none":
            return []
        return [{**self._head, "object": "chat.completion.chunk", "choices": [], "usage": usage.as_dict()}]

    def whole(self, outputs: Sequence[Output], usage: Usage) -> dict[str, Any]:
        """All choices."""
        choices = [self._choice(one) for one in outputs]
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": usage.as_dict()}

    def _choice(self, output: Output) -> dict[str, Any]:
        message = {"role": "assistant", "content": output.piece.text, "refusal": None}
        return {"index": output.index, "message": message, **self._extras(output.piece), **ending(output.piece)}

    def _chunk(self, index: int, choice: dict[str, Any]) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk", "choices": [{"index": index, **choice}]}

    def _extras(self, piece: TextPiece) -> dict[str, Any]:
        logprobs = self._logprobs(piece.tokens) if self._wanted.logprobs else None
        return {"logprobs": logprobs, **token_ids(piece, self._wanted)}

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
        name = token_name(text, token_id, self._wanted)
        return {"token": name, "logprob": logprob, "bytes": list(text.encode()) if whole else None}
