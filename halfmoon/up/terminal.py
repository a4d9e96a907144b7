"""The terminal of `halfmoon up`, which may be a file on a full disk, or a window that is gone."""

from __future__ import annotations

import io
from contextlib import suppress
from typing import TextIO

from rich.console import Console


class _UnfailingStream(io.TextIOBase):
    """Passes text on to a stream. Text that cannot be written is lost."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The stream's encoding."""
        return self._stream.encoding

    def isatty(self) -> bool:
        """Whether the stream is a terminal."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """The stream's file descriptor."""
        return self._stream.fileno()

    def write(self, text: str) -> int:
        """Writes text, or loses it."""
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flushes the stream as far as that is possible."""
        with suppress(OSError):
            self._stream.flush()


def unfailing_console(stream: TextIO) -> Console:
    """Returns a console whose methods never raise because the stream cannot be written."""
    return Console(file=_UnfailingStream(stream))  # type: ignore[arg-type]
