"""Workers that left a moment ago: the console shows them until they are back, or forgotten."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_REMEMBERED_S = 120.0
_MOST = 256


class RecentlyLeft:
    """Owns who was a member a moment ago and is none now. Has no clock."""

    def __init__(self) -> None:
        self._present: dict[str, str] = {}
        self._left: dict[str, tuple[str, float]] = {}  # role, when

    def note(self, present: Mapping[str, str], now_s: float) -> None:
        """Who is a member now, with the roles."""
        for worker_id in self._present.keys() - present.keys():
            self._left[worker_id] = (self._present[worker_id], now_s)
        self._left = {
            worker_id: (role, left_s)
            for worker_id, (role, left_s) in list(self._left.items())[-_MOST:]
            if worker_id not in present and now_s - left_s < _REMEMBERED_S
        }
        self._present = dict(present)

    def shown(self, now_s: float) -> list[dict[str, Any]]:
        """As JSON has it."""
        return [
            {"worker_id": worker_id, "role": role, "left_s_ago": now_s - left_s}
            for worker_id, (role, left_s) in self._left.items()
        ]
