"""Shows text from outside literally: Streamlit reads Markdown, in which names could be images, links or formulas."""

from __future__ import annotations

import re

_MARKS = re.compile(r"([\\`*_\[\]<>#$:~|!&{}])")  # a backslash before each makes it literal
_LINKS = re.compile(r"(?<=http)(?=://)|(?<=https)(?=://)|(?<=www)(?=\.)|(?<=[\w.+-])(?=@)", re.IGNORECASE)
_NO_LINK = ":small[]"  # nothing to be seen; between two parts of an address it keeps them from becoming a link
_MAX_CHARS = 400


def plain(text: object, max_chars: int = _MAX_CHARS) -> str:
    """One line, shown literally and shortened to `max_chars` with an ellipsis."""
    return _NO_LINK.join(_MARKS.sub(r"\\\1", part) for part in _LINKS.split(shortened(text, max_chars)))


def shortened(text: object, max_chars: int) -> str:
    """One line of at most `max_chars` characters."""
    line = " ".join(str(text).split())
    return line if len(line) <= max_chars else line[: max_chars - 1] + "…"
