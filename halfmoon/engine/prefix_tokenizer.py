"""A text that is tokenized from its beginning, as far as somebody wants to know it."""

from __future__ import annotations

from array import array
from typing import NamedTuple

from halfmoon.engine.piece_tokens import PieceTokens
from halfmoon.engine.text_pieces import least_tokens, pieces_of

_MOST_RECALLED = 8_192  # tokens at once: a millisecond
_LONGEST_PIECE = 4_096  # characters, which are tokenized at once; a text with longer ones is read to there


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
        """Without `pieces` it cannot be read."""
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
        """Tokenizes until so many tokens more are there, not counting some thousands that are remembered; less at its
        end."""
        if self._pieces is None:
            return
        num_before = len(self.token_ids)
        for piece in self._left:
            found = self._pieces.recall(piece, self._salt)
            if found is None:
                (found,) = self._pieces.learn([piece], self._salt)
                num_tokens -= len(found)
            self.token_ids.extend(found)
            self._num_read += len(piece)
            if num_tokens <= 0 or len(self.token_ids) - num_before > _MOST_RECALLED:
                return
        if not self.is_whole and self._num_read == len(self._text):
            self.is_whole = True
            self.token_ids.extend(self._after)

    def least_tokens(self) -> int:
        """The whole text has no fewer."""
        if self._pieces is None:
            return 1
        if self._num_words is None:
            self._num_words = least_tokens(self._text)
        num_left = self._num_words - least_tokens(self._text[: self._num_read + 1])  # with the space after a cut
        return max(len(self.token_ids) + num_left, 1)
