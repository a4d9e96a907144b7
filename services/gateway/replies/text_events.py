"""Events of nothing but text, without encoding anew what is the same in all of them."""

from __future__ import annotations

from json.encoder import encode_basestring_ascii

from services.gateway.replies.event_body import sse
from services.gateway.replies.reply_format import ReplyFormat, Usage
from services.gateway.replies.text_stream import TextPiece

_MARK = "\0"
_QUOTED_MARK = encode_basestring_ascii(_MARK).encode()
_NO_USAGE = Usage(0, 0, 0)


class TextEvents:
    """Owns, for each choice, what comes before and after the text in its events."""

    def __init__(self, shape: ReplyFormat) -> None:
        self._shape = shape
        self._around: dict[int, tuple[bytes, bytes]] = {}

    def of(self, index: int, text: str) -> bytes:
        """The event of a text of choice `index`, for a shape that `repeats`."""
        around = self._around.get(index)
        if around is None:
            around = self._around[index] = self._split(index)
        return b"%b%b%b" % (around[0], encode_basestring_ascii(text).encode(), around[1])

    def _split(self, index: int) -> tuple[bytes, bytes]:
        """By an example: the text comes after all else that a client or a model may have named."""
        (chunk,) = self._shape.chunks(index, TextPiece(_MARK, (), (), None))
        before, mark, after = sse(self._shape.frame(chunk, lambda: _NO_USAGE)).rpartition(_QUOTED_MARK)
        assert mark
        return before, after
