"""Whether a prefix is copied to where it will be asked for (Mooncake, section 6.2). No I/O, no clock.

To a store: without a copy, each use near a store moves the prefix there from another one; a copy moves it once. So a
prefix is copied once it was lately asked for at least twice near a store that lacks it: that many uses are to be
expected until the count has halved, and the copy is there before the next one.

To a worker, where the pool has no store: the next such prompt shall find a holder that is not busy, and the prefix
outlive the loss of a worker.

Both are bounded by a rate of bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Literal, NamedTuple

import numpy as np

from halfmoon.policy.values import Placement, PlacementRequest
from halfmoon.policy.view.capabilities import Bools
from halfmoon.policy.view.cluster_view import ClusterView

MIN_USES = 1.5  # near a store, decayed: a second use within about four minutes of the first
MIN_USES_OF_WORKERS = 4.5  # the fifth use in a while: a copy takes a worker's memory from other prefixes
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

    def is_hot(self, num_uses: float, least: float = MIN_USES) -> bool:
        """Whether a prefix is asked for often enough."""
        return num_uses >= least

    def decide(self, target: str, prefix: int, missing_bytes: float, now_s: float) -> CopyDecision:
        """Decides on one use of a hot prefix (the key of its last block), and counts the copy if there is to be one.

        missing_bytes: of the prefix that the target lacks and others have. A copy larger than what may be copied at
        once is made when nothing else was copied for a while.
        """
        self._save_up(now_s)
        if missing_bytes <= 0:
            return "here"
        if now_s - self._asked_s.get((target, prefix), -_AGAIN_S) < _AGAIN_S:
            return "asked"
        if self._allowance_bytes < min(missing_bytes, _BURST_S * self._bytes_per_s):
            return "bandwidth"
        self._allowance_bytes -= missing_bytes
        self._asked_s[target, prefix] = now_s
        self._asked_s.move_to_end((target, prefix))
        if len(self._asked_s) > _REMEMBERED:
            self._asked_s.popitem(last=False)
        return "copy"

    def _save_up(self, now_s: float) -> None:
        since_s = 0.0 if self._counted_s is None else max(0.0, now_s - self._counted_s)
        self._counted_s = now_s
        most = _BURST_S * self._bytes_per_s
        self._allowance_bytes = min(most, self._allowance_bytes + since_s * self._bytes_per_s)


class NextHolder(NamedTuple):
    """The worker that should have a prefix next."""

    row: int  # of the view
    num_blocks: int  # of the prefix, of which it lacks some
    num_missing: int


def next_holder(
    view: ClusterView, request: PlacementRequest, placement: Placement, same_kv: Bools | None = None
) -> NextHolder | None:
    """The least busy worker without the prefix of a prompt that was just placed, if all that have it are busier.

    None if the next such prompt finds a holder about as free, or nobody that has room can load the prefix.
    same_kv: rows whose blocks are of the kind that the prompt was placed with; None: all.
    """
    chosen, num_rows, ttft = view.row(placement.prefill.worker_id), view.num_rows, placement.ranked_by
    if chosen is None or ttft is None:
        return None
    holders, same = view.holders[:num_rows], np.ones(num_rows, dtype=np.bool_) if same_kv is None else same_kv
    most = (request.num_prompt_tokens - 1) // max(placement.prefill.block_tokens, 1)
    served = np.append(view.fetch_links.serving(request.cached_blocks), 0)
    num_blocks = min(int(served[np.minimum(holders, len(served) - 1)][same].max(initial=0)), most)
    if not num_blocks:
        return None
    held = request.cached_blocks[np.minimum(holders, len(request.cached_blocks) - 1)]
    rows = (view.can_prefill[:num_rows] | view.can_do_both[:num_rows]) & same
    has = rows & (held >= num_blocks)
    has[chosen] = True  # soon
    busy_s = ttft.queue_s.copy()
    busy_s[chosen] = placement.ttft_s
    has_room = view.column("free_blocks") >= num_blocks - held
    lacking_s = np.where(rows & ~has & has_room & np.isfinite(view.column("fetch_s_per_token")), busy_s, np.inf)
    row = int(np.argmin(lacking_s))
    if lacking_s[row] >= np.minimum.reduce(busy_s[has]):
        return None
    return NextHolder(row, num_blocks, num_blocks - int(held[row]))
