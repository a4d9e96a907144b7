"""Whether a prefix is copied to the store nearest to where it is asked for (Mooncake, section 6.2). No I/O, no clock.

Without a copy, each use near a store moves the prefix there from another one; a copy moves it once. So a prefix is
copied once it was lately asked for at least twice near a store that lacks it: that many uses are to be expected until
the count has halved, and the copy is there before the next one. Bounded by a rate of bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Literal

MIN_USES = 1.5  # decayed: a second use within about four minutes of the first
_AGAIN_S = 60.0  # between two requests for the same copy
_REMEMBERED = 1024  # requested copies
_BURST_S = 10.0  # of the rate: saved up while nothing is copied

CopyDecision = Literal["copy", "cold", "here", "asked", "bandwidth"]


class Replication:
    """Owns which copies were requested of late, and how many bytes may still be copied now."""

    def __init__(self, bytes_per_s: float) -> None:
        """bytes_per_s: most bytes of copies in the long run."""
        self._bytes_per_s = bytes_per_s
        self._allowance_bytes = _BURST_S * bytes_per_s
        self._counted_s: float | None = None
        self._asked_s: OrderedDict[tuple[str, int], float] = OrderedDict()

    def is_hot(self, num_uses: float) -> bool:
        """Whether a prefix is asked for often enough near a store."""
        return num_uses >= MIN_USES

    def decide(self, store: str, prefix: int, num_uses: float, missing_bytes: float, now_s: float) -> CopyDecision:
        """Decides on one use of a prefix (the key of its last block), and counts the copy if there is to be one.

        num_uses: decayed, near this store; missing_bytes: of the prefix that the store lacks and others have. A copy
        larger than what may be copied at once is made when nothing else was copied for a while.
        """
        self._save_up(now_s)
        if not self.is_hot(num_uses):
            return "cold"
        if missing_bytes <= 0:
            return "here"
        if now_s - self._asked_s.get((store, prefix), -_AGAIN_S) < _AGAIN_S:
            return "asked"
        if self._allowance_bytes < min(missing_bytes, _BURST_S * self._bytes_per_s):
            return "bandwidth"
        self._allowance_bytes -= missing_bytes
        self._asked_s[store, prefix] = now_s
        self._asked_s.move_to_end((store, prefix))
        if len(self._asked_s) > _REMEMBERED:
            self._asked_s.popitem(last=False)
        return "copy"

    def _save_up(self, now_s: float) -> None:
        since_s = 0.0 if self._counted_s is None else max(0.0, now_s - self._counted_s)
        self._counted_s = now_s
        most = _BURST_S * self._bytes_per_s
        self._allowance_bytes = min(most, self._allowance_bytes + since_s * self._bytes_per_s)
