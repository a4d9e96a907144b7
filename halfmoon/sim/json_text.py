"""Parses JSON, strictly: a key that is written twice in one object is an error."""

from __future__ import annotations

import json
from typing import Any


def parsed_json(text: str) -> Any:
    """Parses a text of one document. Raises ValueError for any other text."""
    try:
        return json.loads(text, object_pairs_hook=_strict)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _strict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is written twice")
    return result
