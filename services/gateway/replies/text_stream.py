"""Tokens to text: detokenizer, then stop strings. Knows nothing of HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from halfmoon.pb.types_pb2 import LENGTH, NOT_FINISHED, STOP, FinishReason, Token
from services.gateway.replies.stop_strings import StopStrings

Ending = Literal["stop", "length"]

_ENDINGS: dict[FinishReason.ValueType, Ending] = {STOP: "stop", LENGTH: "length"}


class PushesText(Protocol):
    """halfmoon.engine.text.tokenizer.Detokenizer."""

    def push(self, token_id: int) -> str:
        """Returns the text that became certain with this token."""

    def flush(self) -> str:
        """Returns what is left."""


class Decodes(Protocol):
    """halfmoon.engine.text.tokenizer.Tokenizer, as far as replies use it."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids."""

    def part_bytes(self, token_id: int) -> bytes | None:
        """The bytes of a token that is part of a character; None if they cannot be told."""


@dataclass(frozen=True, slots=True)
class TextPiece:
    """What some tokens yield: certain text and the end."""

    text: str
    tokens: tuple[Token, ...]  # including the one that ended the sequence
    finish_reason: Ending | None  # None: the output goes on
    stop_reason: str | int | None = None  # the stop string or stop token that ended it

    @property
    def content(self) -> tuple[Token, ...]:
        """The tokens with content: without an end-of-sequence or stop token."""
        return tuple(token for token in self.tokens if token.finish_reason != STOP)


def joined(pieces: Sequence[TextPiece]) -> TextPiece:
    """Joins consecutive pieces."""
    return TextPiece(
        text="".join(piece.text for piece in pieces),
        tokens=tuple(token for piece in pieces for token in piece.tokens),
        finish_reason=pieces[-1].finish_reason,
        stop_reason=pieces[-1].stop_reason,
    )


class TextStream:
    """Owns one output's text on its way out, and the number of its tokens."""

    def __init__(
        self,
        detokenizer: PushesText,
        stops: Sequence[str],
        stop_token_ids: Sequence[int] = (),
        *,
        keep_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """With `keep_stop`, a stop string is part of the text. `stop_token_ids` are reported as the stop reason.

        No stop string ends the text within the first `min_tokens`; it may begin there.
        """
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops, keep=keep_stop)
        self._stop_token_ids = frozenset(stop_token_ids)
        self._min_tokens = min_tokens
        self.num_tokens = 0
        self.finish_reason: Ending | None = None

    def push(self, tokens: Sequence[Token]) -> TextPiece:
        """Takes tokens up to the last one, or up to the one that completes a stop string; ignores the rest.

        A token that ends the sequence (finish reason STOP: end-of-sequence or a stop token) has no text.
        """
        text, num_taken = "", 0
        for token in tokens:
            num_taken += 1
            may_end = self.num_tokens + num_taken > self._min_tokens
            if token.finish_reason != STOP:
                text += self._stops.push(self._detokenizer.push(token.token_id), may_end=may_end)
            if self._stops.matched is None and token.finish_reason != NOT_FINISHED:
                text += self._stops.push(self._detokenizer.flush(), may_end=may_end)
                text += self._stops.flush()
                self.finish_reason = _ENDINGS[token.finish_reason]
            if self._stops.matched is not None:
                self.finish_reason = "stop"
            if self.finish_reason is not None:
                break
        self.num_tokens += num_taken
        return TextPiece(text, tuple(tokens[:num_taken]), self.finish_reason, self._stop_reason(tokens))

    def _stop_reason(self, tokens: Sequence[Token]) -> str | int | None:
        if self._stops.matched is not None:
            return self._stops.matched
        last = tokens[-1]
        return last.token_id if last.finish_reason == STOP and last.token_id in self._stop_token_ids else None
