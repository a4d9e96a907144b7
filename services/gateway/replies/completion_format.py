"""The response and the chunks of /v1/completions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from halfmoon.pb.types_pb2 import Token
from services.gateway.replies.reply_format import (
    STREAM_END,
    Output,
    ReplyOptions,
    Usage,
    UsageNow,
    ending,
    framed,
    prompt_token_ids,
    token_ids,
    token_name,
)
from services.gateway.replies.text_stream import Decodes, TextPiece


class CompletionFormat:
    """Owns how far each choice's text has come. A prompt, and its text in `echoes`, is for `per_prompt` choices."""

    end = STREAM_END

    def __init__(
        self,
        request_id: str,
        model: str,
        created: int,
        tokenizer: Decodes,
        options: ReplyOptions,
        prompts: Sequence[Sequence[int]],
        echoes: Sequence[str] = (),
        per_prompt: int = 1,
    ) -> None:
        self._head = {"id": f"cmpl-{request_id}", "object": "text_completion", "created": created, "model": model}
        self._tokenizer = tokenizer
        self._options = options
        self._prompts = prompts
        self._echoes = echoes
        self._per_prompt = per_prompt
        self._num_chars: defaultdict[int, int] = defaultdict(int)  # by choice, of all its tokens so far

    @property
    def repeats(self) -> bool:
        """Whatever the text is."""
        return self._options.only_text

    def opening(self, index: int) -> list[dict[str, Any]]:
        """The prompt, if it is echoed or its token ids are wanted."""
        if not (self._echoes or self._options.token_ids):
            return []
        choice = self._choice(index, TextPiece(self._echo(index), (), (), None))
        return [{**self._head, "choices": [{**choice, **self._prompt_ids(index)}]}]

    def chunks(self, index: int, piece: TextPiece) -> list[dict[str, Any]]:
        """At most one chunk."""
        if piece.finish_reason is None and not self._options.of(piece):
            return []
        return [self._chunk(index, piece)]

    def frame(self, chunk: dict[str, Any], usage: UsageNow) -> dict[str, Any]:
        """With the usage, if it is wanted."""
        return framed(chunk, usage, self._options)

    def closing(self, usage: Usage) -> list[dict[str, Any]]:
        """The usage, without choices."""
        if self._options.usage == "none":
            return []
        return [{**self._head, "choices": [], "usage": usage.as_dict()}]

    def failed(self, error: dict[str, Any]) -> dict[str, Any]:
        """The error as it is."""
        return error

    def whole(self, outputs: Sequence[Output], usage: Usage) -> dict[str, Any]:
        """All choices."""
        choices = [
            {**self._choice(one.index, one.piece, self._echo(one.index)), **self._prompt_ids(one.index)}
            for one in outputs
        ]
        return {**self._head, "choices": choices, "usage": usage.as_dict()}

    def _echo(self, index: int) -> str:
        return self._echoes[index // self._per_prompt] if self._echoes else ""

    def _prompt_ids(self, index: int) -> dict[str, Any]:
        return prompt_token_ids(self._prompts[index // self._per_prompt], self._options)

    def _chunk(self, index: int, piece: TextPiece) -> dict[str, Any]:
        return {**self._head, "choices": [self._choice(index, piece)]}

    def _choice(self, index: int, piece: TextPiece, echo: str = "") -> dict[str, Any]:
        logprobs = self._logprobs(index, piece.tokens) if self._options.logprobs else None
        choice = {"index": index, "text": echo + piece.text, "logprobs": logprobs, **ending(piece)}
        return {**choice, **token_ids(piece, self._options)}

    def _logprobs(self, index: int, tokens: Sequence[Token]) -> dict[str, Any]:
        texts = [self._tokenizer.decode([token.token_id]) for token in tokens]
        offsets = []
        for text in texts:
            offsets.append(self._num_chars[index])
            self._num_chars[index] += len(text)
        tops = [self._tops(token) for token in tokens]
        names = [token_name(text, token.token_id, self._options) for text, token in zip(texts, tokens, strict=True)]
        return {
            "tokens": names,
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": tops if any(tops) else None,
            "text_offset": offsets,
        }

    def _tops(self, token: Token) -> dict[str, float]:
        """By text; of two tokens that look the same the likelier one is kept."""
        tops: dict[str, float] = {}
        for top in token.top_logprobs:
            tops.setdefault(
                token_name(self._tokenizer.decode([top.token_id]), top.token_id, self._options), top.logprob
            )
        return tops
