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
    """Owns the length of each choice's text so far. Each prompt has `per_prompt` choices."""

    end = STREAM_END

    def __init__(
        self,
        request_id: str,
        model: str,
        created: int,
        tokenizer: Decodes,
        options: ReplyOptions,
        prompts: Sequence[Sequence[int]],
        prompt_texts: Sequence[str] = (),
        per_prompt: int = 1,
    ) -> None:
        self._head = {"id": f"cmpl-{request_id}", "object": "text_completion", "created": created, "model": model}
        self._tokenizer = tokenizer
        self._options = options
        self._prompts = prompts
        self._prompt_texts = prompt_texts
        self._per_prompt = per_prompt
        self._num_chars: defaultdict[int, int] = defaultdict(int)  # by choice: characters of all its tokens so far

    @property
    def repeats(self) -> bool:
        """True if chunks carry nothing but text."""
        return self._options.only_text

    def opening(self, index: int) -> list[dict[str, Any]]:
        """A chunk with the prompt, if its text or its token ids are requested."""
        if not (self._prompt_texts or self._options.token_ids):
            return []
        choice = self._choice(index, TextPiece(self._echo(index), (), (), None))
        return [{**self._head, "choices": [{**choice, **self._prompt_ids(index)}]}]

    def chunks(self, index: int, piece: TextPiece) -> list[dict[str, Any]]:
        """At most one chunk."""
        if piece.finish_reason is None and not self._options.shows(piece):
            return []
        return [self._chunk(index, piece)]

    def frame(self, chunk: dict[str, Any], usage: UsageNow) -> dict[str, Any]:
        """Adds the usage, if requested."""
        return framed(chunk, usage, self._options)

    def closing(self, usage: Usage) -> list[dict[str, Any]]:
        """A chunk with the usage and without choices, if requested."""
        if self._options.usage == "none":
            return []
        return [{**self._head, "choices": [], "usage": usage.as_dict()}]

    def failed(self, error: dict[str, Any]) -> dict[str, Any]:
        """The error unchanged."""
        return error

    def whole(self, outputs: Sequence[Output], usage: Usage) -> dict[str, Any]:
        """The response with all choices."""
        choices = [
            {**self._choice(output.index, output.piece, self._echo(output.index)), **self._prompt_ids(output.index)}
            for output in outputs
        ]
        return {**self._head, "choices": choices, "usage": usage.as_dict()}

    def _echo(self, index: int) -> str:
        return self._prompt_texts[index // self._per_prompt] if self._prompt_texts else ""

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
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _tops(self, token: Token) -> dict[str, float]:
        """Log-probabilities by text, that of the token itself, too. Of two with the same text the likelier is kept."""
        pairs = [*((top.token_id, top.logprob) for top in token.top_logprobs), (token.token_id, token.logprob)]
        tops: dict[str, float] = {}
        for token_id, logprob in pairs:
            tops.setdefault(token_name(self._tokenizer.decode([token_id]), token_id, self._options), logprob)
        return tops
