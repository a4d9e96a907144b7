"""The response and the chunks of /v1/completions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from halfmoon.pb.types_pb2 import PromptLogprob, Token
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
        prompt_logprobs_of: PromptLogprobsOf = lambda _: (),
    ) -> None:
        self._head = {"id": f"cmpl-{request_id}", "object": "text_completion", "created": created, "model": model}
        self._tokenizer = tokenizer
        self._options = options
        self._prompts = prompts
        self._prompt_texts = prompt_texts
        self._per_prompt = per_prompt
        self._prompt_logprobs_of = prompt_logprobs_of
        self._num_chars: defaultdict[int, int] = defaultdict(int)  # by choice: characters of all its tokens so far

    @property
    def repeats(self) -> bool:
        """True if chunks carry nothing but text."""
        return self._options.only_text

    def opening(self, index: int) -> list[dict[str, Any]]:
        """A chunk with the prompt, if its text or its token ids are requested."""
        if not (self._prompt_texts or self._options.token_ids):
            return []
        choice = self._choice(index, TextPiece("", (), None), has_prompt=True)
        return [{**self._head, "choices": [choice]}]

    def chunks(self, index: int, piece: TextPiece) -> list[dict[str, Any]]:
        """At most one chunk."""
        if piece.finish_reason is None and not self._options.shows(piece):
            return []
        return [self._chunk(index, piece)]

    def frame(self, chunk: dict[str, Any], usage: UsageNow) -> dict[str, Any]:
        """Adds the usage, if requested."""
        return framed(chunk, usage, self._options)

    def closing(self, usage: Usage) -> list[dict[str, Any]]:
        """A chunk with usage and timing, without choices, if requested."""
        return closing_chunks(self._head, usage, self._options)

    def failed(self, error: dict[str, Any]) -> dict[str, Any]:
        """The error unchanged."""
        return error

    def whole(self, outputs: Sequence[Output], usage: Usage) -> dict[str, Any]:
        """The response with all choices."""
        choices = [self._choice(output.index, output.piece, has_prompt=True) for output in outputs]
        return {**self._head, "choices": choices, "usage": usage.as_dict(), **usage.timed()}

    def _chunk(self, index: int, piece: TextPiece) -> dict[str, Any]:
        return {**self._head, "choices": [self._choice(index, piece)]}

    def _choice(self, index: int, piece: TextPiece, *, has_prompt: bool = False) -> dict[str, Any]:
        """`has_prompt`: it begins with what is wanted of the prompt."""
        number = index // self._per_prompt
        echo = self._prompt_texts[number] if has_prompt and self._prompt_texts else ""
        entries = [_of_token(token) for token in piece.tokens]
        if has_prompt and self._prompt_texts and self._options.logprobs:
            entries = [*_of_prompt(self._prompts[number], self._prompt_logprobs_of(number)), *entries]
        logprobs = self._logprobs(index, entries) if self._options.logprobs else None
        choice = {"index": index, "text": echo + piece.text, "logprobs": logprobs, **ending(piece)}
        choice |= token_ids(piece, self._options)
        return {**choice, **self._of_prompt(number)} if has_prompt else choice

    def _of_prompt(self, number: int) -> dict[str, Any]:
        prompt, options = self._prompts[number], self._options
        logprobs = prompt_logprobs(prompt, self._prompt_logprobs_of(number), self._tokenizer, options)
        return {**prompt_token_ids(prompt, options), **logprobs}

    def _logprobs(self, index: int, entries: Sequence[_Entry]) -> dict[str, Any]:
        texts = [self._tokenizer.decode([entry.token_id]) for entry in entries]
        offsets = []
        for text in texts:
            offsets.append(self._num_chars[index])
            self._num_chars[index] += len(text)
        return {
            "tokens": [self._name(entry.token_id) for entry in entries],
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [self._tops(entry) for entry in entries],
            "text_offset": offsets,
        }

    def _tops(self, entry: _Entry) -> dict[str, float] | None:
        """Log-probabilities by text, that of the token itself, too. Of two with the same text the likelier is kept."""
        if entry.logprob is None:
            return None
        tops: dict[str, float] = {}
        for token_id, logprob in (*entry.tops, (entry.token_id, entry.logprob)):
            tops.setdefault(self._name(token_id), logprob)
        return tops

    def _name(self, token_id: int) -> str:
        """A token in the lists, also one that is no text: the last one may have ended the output."""
        text = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return token_name(text, token_id, self._options)


class _Entry(NamedTuple):
    """What is known of one token, of the prompt or of the output."""

    token_id: int
    logprob: float | None = None  # None: the first one of a prompt
    tops: Sequence[tuple[int, float]] = ()


def _of_token(token: Token) -> _Entry:
    return _Entry(token.token_id, token.logprob, [(top.token_id, top.logprob) for top in token.top_logprobs])


def _of_prompt(prompt: Sequence[int], known: Sequence[PromptLogprob]) -> list[_Entry]:
    entries = [_Entry(prompt[0])]
    for token_id, one in zip(prompt[1:], known, strict=True):
        entries.append(_Entry(token_id, one.logprob, [(top.token_id, top.logprob) for top in one.top_logprobs]))
    return entries
