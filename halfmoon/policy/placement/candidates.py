"""Why a prompt was placed where it was: the best prefill workers, and the parts of the TTFT of each."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from halfmoon.policy.forecast.ttft import prefill_seconds
from halfmoon.policy.values import Placement, TtftPrediction
from halfmoon.policy.view.cluster_view import ClusterView


class Candidate(NamedTuple):
    """The predicted TTFT of one worker, as the sum of three parts."""

    worker_id: str
    queue_s: float
    restore_s: float  # after the queue, until the fetched part of the prefix is there
    compute_s: float
    cached_tokens: int
    fetched_tokens: int
    transfer_s: float = 0.0  # of loading what is not computed meanwhile; hidden as far as the queue lasts

    @property
    def ttft_s(self) -> float:
        """Predicted TTFT, from now."""
        return self.queue_s + self.restore_s + self.compute_s


def ranked_candidates(
    view: ClusterView,
    num_prompt_tokens: int,
    ttft: TtftPrediction,
    limit: int,
    placement: Placement | None = None,
    most_seen: float = math.inf,
) -> list[Candidate]:
    """The `limit` workers with the least predicted TTFT, and in any case the chosen one, as predicted in its placement.

    `ttft` is the prediction that the placement was ranked by, `most_seen` what each token of the prompt sees at most.
    """
    num_rows = view.num_rows
    chosen = () if placement is None else (placement.prefill.worker_id,)
    present = view.can_prefill[:num_rows] | view.can_do_both[:num_rows]
    if placement is not None and placement.disaggregation not in (None, "off"):
        present |= view.capabilities.may_keep
    seconds = np.where(present, ttft.seconds, np.inf)
    best = np.argsort(seconds, kind="stable")[: min(limit, int(present.sum()))]
    rows = dict.fromkeys([*best.tolist(), *view.rows_of(chosen)])
    known = ttft.cached_tokens + ttft.fetched_tokens
    compute_s = prefill_seconds(view, known, float(num_prompt_tokens), most_seen)
    columns = np.stack((ttft.seconds, ttft.queue_s, compute_s, ttft.cached_tokens, ttft.fetched_tokens))
    candidates = [
        Candidate(
            view.worker(row).worker_id,
            queue_s,
            max(all_s - queue_s - own_s, 0.0),
            own_s,
            int(cached),
            int(more),
            ttft.transfer_s_of(row),
        )
        for row, (all_s, queue_s, own_s, cached, more) in zip(rows, columns[:, list(rows)].T.tolist(), strict=True)
    ]
    return candidates if placement is None else [_refined(candidate, placement) for candidate in candidates]


def _refined(candidate: Candidate, placement: Placement) -> Candidate:
    """The candidate with the refined prediction, if it was chosen."""
    if candidate.worker_id != placement.prefill.worker_id:
        return candidate
    restore_s = min(candidate.restore_s, placement.prefill_s)
    return candidate._replace(queue_s=placement.queue_s, restore_s=restore_s, compute_s=placement.prefill_s - restore_s)
