"""The tokens of a text piece by piece; those of pieces that came lately are remembered.

What prompts begin with mostly came before: a system prompt, the earlier turns of a chat. That a piece came before shows
in the time it takes, so those of another salt are not known.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence

from halfmoon.engine.text_pieces import pieces_of

_MAX_PIECES = 32_768  # about 2 million tokens, in 25 MB
_MAX_PIECE_CHARS = 1_024  # longer ones are not worth their memory
_AT_ONCE = 64  # pieces that are tokenized in one go

Encode = Callable[[list[str]], list[Sequence[int]]]
"""Token ids of each of these texts by itself."""


class PieceTokens:
    """Owns the latest pieces and their tokens. Safe to use from several threads."""

    def __init__(self, encode: Encode, max_pieces: int = _MAX_PIECES) -> None:
        self._encode = encode
        self._max_pieces = max_pieces
        self._known: OrderedDict[tuple[bytes, str], array[int]] = OrderedDict()
        self._lock = threading.Lock()

    def recall(self, piece: str, salt: bytes = b"") -> Sequence[int] | None:
        """None where it is not remembered."""
        with self._lock:
            found = self._known.get((salt, piece))
            if found is not None:
                self._known.move_to_end((salt, piece))
        return found

    def learn(self, pieces: list[str], salt: bytes = b"") -> list[Sequence[int]]:
        """Tokenizes them."""
        tokens = self._encode(pieces)
        with self._lock:
            for piece, ids in zip(pieces, tokens, strict=True):
                if len(piece) <= _MAX_PIECE_CHARS:
                    self._known[salt, piece] = array("I", ids)
            while len(self._known) > self._max_pieces:
                self._known.popitem(last=False)
        return tokens

    def of_text(self, text: str, salt: bytes = b"") -> list[int]:
        """All of a text."""
        token_ids: list[int] = []
        new: list[str] = []
        for piece in pieces_of(text):
            found = self.recall(piece, salt)
            if found is None:
                new.append(piece)
            if found is not None or len(new) == _AT_ONCE:
                token_ids += self._learned(new, salt)
                new = []
            token_ids += found or ()
        return token_ids + self._learned(new, salt)

    def _learned(self, pieces: list[str], salt: bytes) -> list[int]:
        return [one for ids in self.learn(pieces, salt) for one in ids] if pieces else []
