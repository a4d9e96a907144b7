"""Tokenizes a text from its beginning, only as far as needed."""

from __future__ import annotations

from array import array
from typing import NamedTuple

from halfmoon.engine.text.piece_tokens import PieceTokens
from halfmoon.engine.text.text_pieces import least_tokens, pieces_of

_MOST_RECALLED = 8_192  # tokens per call: a millisecond
_LONGEST_PIECE = 4_096  # characters tokenized in one go; a text is read up to the first longer piece


class Around(NamedTuple):
    """The tokens that a tokenizer puts around every text."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()


NOTHING_AROUND = Around()


class PrefixTokenizer:
    """Owns the leading tokens of one text, and how far they reach."""

    def __init__(
        self, text: str, pieces: PieceTokens | None, around: Around = NOTHING_AROUND, salt: bytes = b""
    ) -> None:
        """Without `pieces` the text cannot be tokenized in part: `read_on` does nothing."""
        self.token_ids = array("I", around.before)
        self.is_whole = False
        self._text = text
        self._pieces = pieces
        self._salt = salt
        self._left = pieces_of(text, _LONGEST_PIECE) if pieces else iter(())
        self._num_read = 0  # characters
        self._num_words: int | None = None
        self._after = around.after

    def read_on(self, num_tokens: int) -> None:
        """Tokenizes `num_tokens` more tokens, or up to the text's end.

        Some thousands of remembered tokens are not counted.
        """
        if self._pieces is None:
            return
        num_before = len(self.token_ids)
        for piece in self._left:
            token_ids = self._pieces.recall(piece, self._salt)
            if token_ids is None:
                (token_ids,) = self._pieces.learn([piece], self._salt)
                num_tokens -= len(token_ids)
            self.token_ids.extend(token_ids)
            self._num_read += len(piece)
            if num_tokens <= 0 or len(self.token_ids) - num_before > _MOST_RECALLED:
                return
        if not self.is_whole and self._num_read == len(self._text):
            self.is_whole = True
            self.token_ids.extend(self._after)

    def least_tokens(self) -> int:
        """Lower bound on the tokens of the whole text."""
        if self._pieces is None:
            return 1
        if self._num_words is None:
            self._num_words = least_tokens(self._text)
        num_left = self._num_words - least_tokens(self._text[: self._num_read + 1])  # with the space after a cut
        return max(len(self.token_ids) + num_left, 1)
