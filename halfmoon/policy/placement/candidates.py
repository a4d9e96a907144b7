"""Why a prompt goes where it goes: the prefill workers that were looked at, and what each one's TTFT is made of."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from halfmoon.policy.placement.place import Placement
from halfmoon.policy.placement.ttft import TtftPrediction, prefill_seconds
from halfmoon.policy.view.cluster_view import ClusterView


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
    view: ClusterView, num_prompt_tokens: int, ttft: TtftPrediction, limit: int, placement: Placement | None = None
) -> list[Candidate]:
    """Of the workers that take prompts now the `limit` with the least predicted TTFT, and the chosen one anyway, whose
    queue is that of its placement. `ttft` is what the placement was ranked by.
    """
    num_rows = view.num_rows
    chosen = () if placement is None else (placement.prefill.worker_id,)
    present = view.can_prefill[:num_rows] | view.can_do_both[:num_rows]
    seconds = np.where(present, ttft.seconds, np.inf)
    best = np.argsort(seconds, kind="stable")[: min(limit, int(present.sum()))]
    rows = dict.fromkeys([*best.tolist(), *view.rows_of(chosen)])
    known = ttft.cached_tokens + ttft.fetched_tokens
    compute_s = prefill_seconds(view, known, float(num_prompt_tokens))
    figures = np.stack((ttft.seconds, ttft.queue_s, compute_s, ttft.cached_tokens, ttft.fetched_tokens))
    found = [
        Candidate(view.worker(row).worker_id, queue_s, max(all_s - queue_s - own_s, 0.0), own_s, int(cached), int(more))
        for row, (all_s, queue_s, own_s, cached, more) in zip(rows, figures[:, list(rows)].T.tolist(), strict=True)
    ]
    return found if placement is None else [_refined(one, placement) for one in found]


def _refined(candidate: Candidate, placement: Placement) -> Candidate:
    """The chosen one as it was predicted in the end."""
    if candidate.worker_id != placement.prefill.worker_id:
        return candidate
    restore_s = min(candidate.restore_s, placement.prefill_s)
    return candidate._replace(queue_s=placement.queue_s, restore_s=restore_s, compute_s=placement.prefill_s - restore_s)
