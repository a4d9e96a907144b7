"""TTFT of a prompt on each worker: queue, restore, prefill of the rest (Mooncake, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from halfmoon.policy.models.latency import Floats
from halfmoon.policy.values import PlacementRequest, TtftPrediction
from halfmoon.policy.view.capabilities import Bools
from halfmoon.policy.view.cluster_view import ClusterView

Waits = Callable[[Floats, Floats], Floats]
"""Maps the reported queue and the prompt's own prefill time of each row to the time until the prefill starts."""


class _Prefixes(NamedTuple):
    local: Floats  # tokens cached on each row
    reachable: Floats  # tokens in each row's store; for rows without one, tokens on the best holder
    may_fetch: Bools  # rows that load the missing part if that is faster than computing it


def predict_ttft(
    view: ClusterView,
    request: PlacementRequest,
    balancing_threshold: float | None,
    now_s: float,
    waits: Waits | None = None,
) -> TtftPrediction:
    """Predicts the TTFT on every row.

    A worker with a store restores what it lacks if that is faster than computing; it does so by itself. A worker
    without one fetches the best holder's prefix if that is more than `balancing_threshold` times as long as its own
    (always true of an empty one), at `request.fetch_factor` times the usual time per token; with None it never
    fetches. `waits` predicts the queue ahead of the prompt; by default the queue is what each worker reported.
    """
    num_rows, num_prompt_tokens = view.num_rows, request.num_prompt_tokens
    reported_s = np.maximum(view.column("prefill_free_s") - now_s, 0.0)
    prefixes = _prefixes(view, num_prompt_tokens, request.cached_blocks, balancing_threshold)
    prefill_s = prefill_seconds(view, prefixes.local, float(num_prompt_tokens))
    queue_s = waits(reported_s, prefill_s) if waits else reported_s
    computed_s = queue_s + prefill_s
    nothing = np.zeros(num_rows)
    if not np.logical_or.reduce(prefixes.may_fetch):
        return TtftPrediction(computed_s, prefixes.local, nothing, queue_s)
    factors = np.where(view.store_holders[:num_rows] < 0, request.fetch_factor, 1.0)  # a store serves its own precision
    restored_s = _restore_s(view, prefixes, queue_s, factors)
    fetched_s = restored_s + prefill_seconds(view, prefixes.reachable, float(num_prompt_tokens))
    fetches = prefixes.may_fetch & (fetched_s < computed_s)
    seconds = np.where(fetches, fetched_s, computed_s)
    fetched = np.where(fetches, prefixes.reachable - prefixes.local, nothing)
    from_workers = bool((prefixes.may_fetch & (view.store_holders[:num_rows] < 0)).any())
    return TtftPrediction(seconds, prefixes.local, fetched, queue_s, from_workers)


def _prefixes(
    view: ClusterView, num_prompt_tokens: int, cached_blocks: NDArray[np.int64], balancing_threshold: float | None
) -> _Prefixes:
    """Prefixes in whole blocks that leave at least one token to compute."""
    if not cached_blocks.any():  # the common case where prompts share little
        nothing = np.zeros(view.num_rows)
        return _Prefixes(nothing, nothing, np.zeros(view.num_rows, dtype=np.bool_))
    block_tokens = view.column("block_tokens")
    max_blocks = (num_prompt_tokens - 1) // np.maximum(block_tokens, 1)
    local = np.minimum(_held(view.holders[: view.num_rows], cached_blocks), max_blocks) * block_tokens
    stores = view.store_holders[: view.num_rows]
    in_store = np.minimum(_held(stores, cached_blocks), max_blocks) * block_tokens
    best = (np.minimum(cached_blocks.max(), max_blocks) * block_tokens).max(initial=0.0)
    fetchable = np.zeros_like(local, dtype=np.bool_)
    if balancing_threshold is not None:
        fetchable = best > balancing_threshold * local
    wanted = np.where(stores >= 0, in_store > local, fetchable)
    can_fetch = np.isfinite(view.column("fetch_s_per_token"))
    return _Prefixes(local, np.where(stores >= 0, in_store, best), wanted & can_fetch)


def _held(holders: NDArray[np.int64], cached_blocks: NDArray[np.int64]) -> NDArray[np.int64]:
    """Number of leading blocks on each of these holders."""
    held: NDArray[np.int64] = cached_blocks[np.minimum(holders, len(cached_blocks) - 1)]
    return held


def prefill_seconds(view: ClusterView, cached: Floats, num_tokens: float) -> Floats:
    """Seconds to compute a prompt of `num_tokens` on every row, `cached` [num_rows] of which need no computing."""
    a, b, c = view.prefill_coefficients[: view.num_rows].T
    new = num_tokens - cached
    seconds: Floats = a + b * new + c * new * (cached + new / 2)
    return seconds


def _restore_s(view: ClusterView, prefixes: _Prefixes, queue_s: Floats, fetch_factors: Floats) -> Floats:
    """Seconds until the reachable prefix is on each row: loading starts now, computing after the queue.

    The same meeting point as in `placement/restore_plan.py`.
    """
    _, b, c = view.prefill_coefficients[: view.num_rows].T
    fetch_s = view.column("fetch_s_per_token") * fetch_factors
    gamma = np.where(np.isfinite(fetch_s), fetch_s, 0.0)
    missing = np.maximum(prefixes.reachable - prefixes.local, 0.0)
    alpha = b + c * prefixes.local
    ahead_s = np.maximum(gamma * missing - queue_s, 0.0)
    slope = alpha + gamma
    reach = slope + np.sqrt(slope**2 + 2 * c * ahead_s)
    computed = np.divide(2 * ahead_s, reach, out=np.zeros_like(reach), where=reach > 0)
    loaded_s = gamma * (missing - np.minimum(computed, missing))
    restored_s: Floats = np.maximum(queue_s, loaded_s)  # where part is computed, both sides end at once
    return restored_s
