"""The TTFT that a prompt would have on each worker: queue, restore, prefill of the rest (Mooncake, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from halfmoon.policy.cluster_view import ClusterView
from halfmoon.policy.latency import Floats


class TtftPrediction(NamedTuple):
    """For every row of the cluster view."""

    seconds: Floats  # from now; of rows without a prefill worker it means nothing
    cached_tokens: Floats  # that the worker need not compute or fetch
    fetched_tokens: Floats  # of the prefix, to be brought from the best holder
    queue_s: Floats  # of `seconds`: until the worker begins with this prompt


Waits = Callable[[Floats, Floats], Floats]
"""By what each row said that it has to compute, and what it would take for the prompt: seconds until it begins."""


class _Prefixes(NamedTuple):
    local: Floats  # tokens that each row has itself
    best: float  # tokens that the best holder anywhere has


def predict_ttft(
    view: ClusterView,
    num_prompt_tokens: int,
    depths: NDArray[np.int64],
    now_s: float,
    balancing_threshold: float | None,
    fetch_factor: float = 1.0,
    waits: Waits | None = None,
) -> TtftPrediction:
    """Predictions for a prompt whose blocks are held to `depths` ([holder number], and a last 0 for -1).

    Where another holder's prefix is more than `balancing_threshold` times the local one (any prefix is, where there
    is none), it is fetched if that is quicker than computing, at `fetch_factor` of the usual time a token. With None
    nothing is fetched. `waits` knows what is ahead of the prompt; without it that is what each worker said last.
    """
    num_rows = view.num_rows
    reported_s = np.maximum(view.column("prefill_free_s") - now_s, 0.0)
    prefixes = _prefixes(view, num_prompt_tokens, depths)
    prefill_s = prefill_seconds(view, prefixes.local, float(num_prompt_tokens))
    queue_s = waits(reported_s, prefill_s) if waits else reported_s
    computed_s = queue_s + prefill_s
    nothing = np.zeros(num_rows)
    if balancing_threshold is None or prefixes.best == 0:
        return TtftPrediction(computed_s, prefixes.local, nothing, queue_s)
    may_fetch = np.isfinite(view.column("fetch_s_per_token")) & (prefixes.best > balancing_threshold * prefixes.local)
    if not may_fetch.any():
        return TtftPrediction(computed_s, prefixes.local, nothing, queue_s)
    restored_s = _restore_s(view, prefixes, queue_s, fetch_factor)
    best = np.full(num_rows, prefixes.best)
    fetched_s = restored_s + prefill_seconds(view, best, float(num_prompt_tokens))
    fetches = may_fetch & (fetched_s < computed_s)
    seconds = np.where(fetches, fetched_s, computed_s)
    return TtftPrediction(seconds, prefixes.local, np.where(fetches, prefixes.best - prefixes.local, 0.0), queue_s)


def _prefixes(view: ClusterView, num_prompt_tokens: int, depths: NDArray[np.int64]) -> _Prefixes:
    """Whole blocks, and at least one token is left to compute."""
    block_tokens = view.column("block_tokens")
    most = (num_prompt_tokens - 1) // np.maximum(block_tokens, 1)
    held = depths[np.minimum(view.holders[: view.num_rows], len(depths) - 1)]
    local = np.minimum(held, most) * block_tokens
    best = np.minimum(depths.max(), most) * block_tokens
    return _Prefixes(local, float(best.max(initial=0.0)))


def prefill_seconds(view: ClusterView, cached: Floats, num_tokens: float) -> Floats:
    """Seconds to compute the tokens after `cached` ones, up to `num_tokens`, on every row."""
    a, b, c = view.prefill_coefficients[: view.num_rows].T
    new = num_tokens - cached
    seconds: Floats = a + b * new + c * new * (cached + new / 2)
    return seconds


def _restore_s(view: ClusterView, prefixes: _Prefixes, queue_s: Floats, fetch_factor: float) -> Floats:
    """Until the best prefix is on each row: loading begins now, computing after the queue, as in `restore.py`."""
    _, b, c = view.prefill_coefficients[: view.num_rows].T
    fetch_s = view.column("fetch_s_per_token") * fetch_factor
    gamma = np.where(np.isfinite(fetch_s), fetch_s, 0.0)
    missing = np.maximum(prefixes.best - prefixes.local, 0.0)
    alpha = b + c * prefixes.local
    ahead_s = np.maximum(gamma * missing - queue_s, 0.0)
    slope = alpha + gamma
    reach = slope + np.sqrt(slope**2 + 2 * c * ahead_s)
    computed = np.divide(2 * ahead_s, reach, out=np.zeros_like(reach), where=reach > 0)
    loaded_s = gamma * (missing - np.minimum(computed, missing))
    restored: Floats = np.maximum(queue_s, loaded_s)  # where something is computed, both end at once
    return restored
