"""Tokenizes texts piece by piece and remembers the tokens of recent pieces.

Most of a prompt's beginning has been seen before: a system prompt, the earlier turns of a chat. Timing reveals that a
piece was seen, so pieces are remembered per salt.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence

from halfmoon.engine.text.text_pieces import pieces_of

_MAX_PIECES = 32_768  # about 2 million tokens, in 25 MB
_MAX_PIECE_CHARS = 1_024  # longer ones are not worth their memory
_AT_ONCE = 64  # pieces per tokenizer call

Encode = Callable[[list[str]], list[Sequence[int]]]
"""Tokenizes each of these texts on its own."""


class PieceTokens:
    """Owns the latest pieces and their tokens. Thread-safe."""

    def __init__(self, encode: Encode, max_pieces: int = _MAX_PIECES) -> None:
        self._encode = encode
        self._max_pieces = max_pieces
        self._known: OrderedDict[tuple[bytes, str], array[int]] = OrderedDict()
        self._lock = threading.Lock()

    def recall(self, piece: str, salt: bytes = b"") -> Sequence[int] | None:
        """The piece's tokens, or None if they are not remembered."""
        with self._lock:
            tokens = self._known.get((salt, piece))
            if tokens is not None:
                self._known.move_to_end((salt, piece))
        return tokens

    def learn(self, pieces: list[str], salt: bytes = b"") -> list[Sequence[int]]:
        """Tokenizes and remembers the pieces."""
        tokens = self._encode(pieces)
        with self._lock:
            for piece, ids in zip(pieces, tokens, strict=True):
                if len(piece) <= _MAX_PIECE_CHARS:
                    self._known[salt, piece] = array("I", ids)
            while len(self._known) > self._max_pieces:
                self._known.popitem(last=False)
        return tokens

    def of_text(self, text: str, salt: bytes = b"") -> list[int]:
        """Tokens of a whole text."""
        token_ids: list[int] = []
        new: list[str] = []
        for piece in pieces_of(text):
            known = self.recall(piece, salt)
            if known is None:
                new.append(piece)
            if known is not None or len(new) == _AT_ONCE:
                token_ids += self._learned(new, salt)
                new = []
            token_ids += known or ()
        return token_ids + self._learned(new, salt)

    def _learned(self, pieces: list[str], salt: bytes) -> list[int]:
        return [token_id for ids in self.learn(pieces, salt) for token_id in ids] if pieces else []
