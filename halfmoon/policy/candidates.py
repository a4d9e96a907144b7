"""Why a prompt goes where it goes: the prefill workers that were looked at, and what each one's TTFT is made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from halfmoon.policy.cluster_view import ClusterView
from halfmoon.policy.ttft import Waits, predict_ttft, prefill_seconds


class Candidate(NamedTuple):
    """One worker's predicted TTFT: the sum of the three parts."""

    worker_id: str
    queue_s: float
    restore_s: float  # beyond the queue, until what is fetched of the prefix is there
    compute_s: float
    cached_tokens: int
    fetched_tokens: int

    @property
    def ttft_s(self) -> float:
        """From now."""
        return self.queue_s + self.restore_s + self.compute_s


def ranked_candidates(
    view: ClusterView,
    num_prompt_tokens: int,
    depths: NDArray[np.int64],
    now_s: float,
    balancing_threshold: float | None,
    limit: int,
    chosen: Sequence[str] = (),
    waits: Waits | None = None,
) -> list[Candidate]:
    """Of the workers that take prompts now the `limit` with the least predicted TTFT, and those in `chosen` anyway.

    The arguments are those of `predict_ttft`, with which `place` ranks them.
    """
    num_rows = view.num_rows
    ttft = predict_ttft(view, num_prompt_tokens, depths, now_s, balancing_threshold, waits=waits)
    present = view.can_prefill[:num_rows] | view.can_do_both[:num_rows]
    seconds = np.where(present, ttft.seconds, np.inf)
    best = np.argsort(seconds, kind="stable")[: min(limit, int(present.sum()))]
    rows = dict.fromkeys([*map(int, best), *sorted(view.rows_of(tuple(chosen)))])
    known = ttft.cached_tokens + ttft.fetched_tokens
    compute_s = prefill_seconds(view, known, float(num_prompt_tokens))
    return [
        Candidate(
            view.worker(row).worker_id,
            float(ttft.queue_s[row]),
            float(max(ttft.seconds[row] - ttft.queue_s[row] - compute_s[row], 0.0)),
            float(compute_s[row]),
            int(ttft.cached_tokens[row]),
            int(ttft.fetched_tokens[row]),
        )
        for row in rows
    ]
