"""A client's own words as they may be repeated: in an error, a log line, a row of the ledger."""

from __future__ import annotations

_MAX_CHARS = 200


def shortened(text: str, max_chars: int = _MAX_CHARS) -> str:
    """The text, cut off where it would be long."""
    return text if len(text) <= max_chars else text[:max_chars] + "…"
