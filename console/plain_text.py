"""Text that others wrote, as it is: Streamlit reads Markdown, in which names could be images, links or formulas."""

from __future__ import annotations

import re

_MARKS = re.compile(r"([\\`*_\[\]<>#$:~|!&{}])")  # with a backslash before it, each stands for itself
_MAX_CHARS = 400


def plain(text: object, max_chars: int = _MAX_CHARS) -> str:
    """In one line, shown letter by letter; what is longer ends with an ellipsis."""
    return _MARKS.sub(r"\\\1", shortened(text, max_chars))


def shortened(text: object, max_chars: int) -> str:
    """In one line, at most so long."""
    line = " ".join(str(text).split())
    return line if len(line) <= max_chars else line[: max_chars - 1] + "…"
