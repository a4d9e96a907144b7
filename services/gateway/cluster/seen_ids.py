"""Which clients' ids a gateway has seen: what it has not seen, and nobody else can have, needs no search."""

from __future__ import annotations

_MAX_IDS = 1 << 17  # about 20 MB


class SeenIds:
    """Owns the latest ids, and the time from which on it has all of them. Pure: time is an argument."""

    def __init__(self, started_s: float, max_ids: int = _MAX_IDS) -> None:
        self._max_ids = max_ids
        self._whole_since_s = started_s
        self._seen_s: dict[bytes, float] = {}  # by id, the latest last

    def note(self, key: bytes, now_s: float) -> bool:
        """Notes an id, and returns whether it was seen before."""
        was_seen = self._seen_s.pop(key, None) is not None
        self._seen_s[key] = now_s
        if len(self._seen_s) > self._max_ids:
            self._whole_since_s = self._seen_s.pop(next(iter(self._seen_s)))
        return was_seen

    def has_all_since(self, at_s: float) -> bool:
        """Whether every id that came to this gateway since then is here."""
        return self._whole_since_s <= at_s
