"""The TTFT that a prompt would have on each worker: queue, restore, prefill of the rest (Mooncake, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from halfmoon.policy.models.latency import Floats
from halfmoon.policy.view.capabilities import Bools
from halfmoon.policy.view.cluster_view import ClusterView


class TtftPrediction(NamedTuple):
    """For every row of the cluster view."""

    seconds: Floats  # from now; of rows without a prefill worker it means nothing
    cached_tokens: Floats  # that the worker need not compute or fetch
    fetched_tokens: Floats  # of the prefix, to be brought from the worker's store or else the best holder
    queue_s: Floats  # of `seconds`: until the worker begins with this prompt
    may_fetch: bool = False  # whether it may be quicker for anybody to fetch from another worker; a store is none


Waits = Callable[[Floats, Floats], Floats]
"""By what each row said that it has to compute, and what it would take for the prompt: seconds until it begins."""


class _Prefixes(NamedTuple):
    local: Floats  # tokens that each row has itself
    reachable: Floats  # tokens that each row's store has; of rows without one those that the best holder has
    may_fetch: Bools  # whether the row would load what it lacks of them, if that were quicker


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

    What a worker lacks and its store has is restored if that is quicker than computing: workers do so by themselves.
    A worker without a store fetches the best holder's prefix where it is more than `balancing_threshold` times the
    local one (any prefix is, where there is none), at `fetch_factor` of the usual time a token, and with None nothing.
    `waits` knows what is ahead of the prompt; without it that is what each worker said last.
    """
    num_rows = view.num_rows
    reported_s = np.maximum(view.column("prefill_free_s") - now_s, 0.0)
    prefixes = _prefixes(view, num_prompt_tokens, depths, balancing_threshold)
    prefill_s = prefill_seconds(view, prefixes.local, float(num_prompt_tokens))
    queue_s = waits(reported_s, prefill_s) if waits else reported_s
    computed_s = queue_s + prefill_s
    nothing = np.zeros(num_rows)
    if not np.logical_or.reduce(prefixes.may_fetch):
        return TtftPrediction(computed_s, prefixes.local, nothing, queue_s)
    factors = np.where(view.store_holders[:num_rows] < 0, fetch_factor, 1.0)  # what a store has, it has as it is
    restored_s = _restore_s(view, prefixes, queue_s, factors)
    fetched_s = restored_s + prefill_seconds(view, prefixes.reachable, float(num_prompt_tokens))
    fetches = prefixes.may_fetch & (fetched_s < computed_s)
    seconds = np.where(fetches, fetched_s, computed_s)
    fetched = np.where(fetches, prefixes.reachable - prefixes.local, nothing)
    from_workers = bool((prefixes.may_fetch & (view.store_holders[:num_rows] < 0)).any())
    return TtftPrediction(seconds, prefixes.local, fetched, queue_s, from_workers)


def _prefixes(
    view: ClusterView, num_prompt_tokens: int, depths: NDArray[np.int64], balancing_threshold: float | None
) -> _Prefixes:
    """Whole blocks, and at least one token is left to compute."""
    if not depths.any():  # most often, where prompts share little
        nothing = np.zeros(view.num_rows)
        return _Prefixes(nothing, nothing, np.zeros(view.num_rows, dtype=np.bool_))
    block_tokens = view.column("block_tokens")
    most = (num_prompt_tokens - 1) // np.maximum(block_tokens, 1)
    local = np.minimum(_held(view.holders[: view.num_rows], depths), most) * block_tokens
    stores = view.store_holders[: view.num_rows]
    in_store = np.minimum(_held(stores, depths), most) * block_tokens
    best = (np.minimum(depths.max(), most) * block_tokens).max(initial=0.0)
    fetchable = np.zeros_like(local, dtype=np.bool_)
    if balancing_threshold is not None:
        fetchable = best > balancing_threshold * local
    wanted = np.where(stores >= 0, in_store > local, fetchable)
    can_fetch = np.isfinite(view.column("fetch_s_per_token"))
    return _Prefixes(local, np.where(stores >= 0, in_store, best), wanted & can_fetch)


def _held(holders: NDArray[np.int64], depths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Leading blocks that each of these holders has."""
    found: NDArray[np.int64] = depths[np.minimum(holders, len(depths) - 1)]
    return found


def prefill_seconds(view: ClusterView, cached: Floats, num_tokens: float) -> Floats:
    """Seconds to compute the tokens after `cached` ones, up to `num_tokens`, on every row."""
    a, b, c = view.prefill_coefficients[: view.num_rows].T
    new = num_tokens - cached
    seconds: Floats = a + b * new + c * new * (cached + new / 2)
    return seconds


def _restore_s(view: ClusterView, prefixes: _Prefixes, queue_s: Floats, fetch_factors: Floats) -> Floats:
    """Until the reachable prefix is on each row: loading begins now, computing after the queue, as in `restore.py`."""
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
    restored: Floats = np.maximum(queue_s, loaded_s)  # where something is computed, both end at once
    return restored
