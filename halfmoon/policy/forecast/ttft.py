"""TTFT of a prompt on each worker: queue, restore from whoever has its prefix, prefill of the rest.

Mooncake, Algorithm 1. A transfer costs the latency of its link, what is on its way there already, and its bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from halfmoon.policy.models.latency import Floats
from halfmoon.policy.values import PlacementRequest, TtftPrediction
from halfmoon.policy.view.capabilities import Bools
from halfmoon.policy.view.cluster_view import ClusterView
from halfmoon.policy.view.fetch_costs import FetchCosts

Waits = Callable[[Floats, Floats], Floats]
"""Maps the reported queue and the prompt's own prefill time of each row to the time until the prefill starts."""

_MOST_HOLDERS = 4  # that every row is compared for; those with the longest prefixes


class _Rows(NamedTuple):
    """Successive rows of the view. Columns are [num_rows, 1]."""

    first: int
    coefficients: Floats  # [num_rows, 3]
    block_tokens: Floats
    max_blocks: Floats  # of the prompt
    local: Floats  # tokens cached
    usual_s_per_token: Floats  # [num_rows]


class _Prefixes(NamedTuple):
    """What rows may load. Matrices are [num_rows, num_sources]."""

    sources: NDArray[np.int64]  # [num_sources] holders
    reachable: Floats  # tokens of the prefix at each of them
    wanted: Bools  # whether the row loads from there if that is faster than computing
    is_store: Bools  # [num_sources]
    costs: FetchCosts


class _Restored(NamedTuple):
    """Loading what is missing, with what comes first computed meanwhile. Matrices are [num_rows, num_sources]."""

    seconds: Floats  # until the reachable prefix is there
    transfer_s: Floats  # of the part that is loaded


def predict_ttft(
    view: ClusterView,
    request: PlacementRequest,
    balancing_threshold: float | None,
    now_s: float,
    waits: Waits | None = None,
) -> TtftPrediction:
    """Predicts the TTFT on every row.

    A worker loads what it lacks from the best source, if that is faster than computing it: a store, or another worker
    whose prefix is more than `balancing_threshold` times as long as its own (always true of an empty one). With None it
    loads from stores alone. `waits` predicts the queue ahead of the prompt; by default the queue is what each worker
    reported.
    """
    num_rows, num_prompt_tokens = view.num_rows, request.num_prompt_tokens
    reported_s = np.maximum(view.column("prefill_free_s") - now_s, 0.0)
    local = _local(view, num_prompt_tokens, request.cached_blocks)
    prefill_s = prefill_seconds(view, local, float(num_prompt_tokens))
    queue_s = waits(reported_s, prefill_s) if waits else reported_s
    computed_s = queue_s + prefill_s
    rows = _rows(view, num_prompt_tokens, local, slice(num_rows))
    prefixes = _prefixes(view, request, rows, balancing_threshold)
    nothing = np.zeros(num_rows)
    if prefixes is None or not np.logical_or.reduce(prefixes.wanted, axis=None):
        return TtftPrediction(computed_s, local, nothing, queue_s)
    restored = _restored(rows, prefixes, queue_s[:, None])
    fetched_s = _fetched_s(rows, num_prompt_tokens, prefixes, restored)
    each, best = np.arange(num_rows), np.argmin(fetched_s, axis=1)
    fetches = fetched_s[each, best] < computed_s
    return TtftPrediction(
        np.where(fetches, fetched_s[each, best], computed_s),
        local,
        np.where(fetches, prefixes.reachable[each, best] - local, nothing),
        queue_s,
        np.where(fetches, prefixes.sources[best], -1),
        np.where(fetches, restored.transfer_s[each, best], nothing),
    )


def best_sources(
    view: ClusterView,
    row: int,
    request: PlacementRequest,
    balancing_threshold: float | None,
    queue_s: float,
    limit: int,
) -> list[int]:
    """The holders from which one row would soonest have the prefix, best first; none that has no more than the row.

    All holders are compared, where `predict_ttft` looks at a few.
    """
    local = _local(view, request.num_prompt_tokens, request.cached_blocks)
    rows = _rows(view, request.num_prompt_tokens, local, slice(row, row + 1))
    prefixes = _prefixes(view, request, rows, balancing_threshold, has_all=True)
    if prefixes is None:
        return []
    restored = _restored(rows, prefixes, np.full((1, 1), queue_s))
    (seconds,) = _fetched_s(rows, request.num_prompt_tokens, prefixes, restored)
    order = np.argsort(seconds, kind="stable")[:limit]
    return [int(prefixes.sources[at]) for at in order if np.isfinite(seconds[at])]


def _local(view: ClusterView, num_prompt_tokens: int, cached_blocks: NDArray[np.int64]) -> Floats:
    """Tokens cached on each row, in whole blocks that leave at least one token to compute."""
    if not cached_blocks.any():  # the common case where prompts share little
        return np.zeros(view.num_rows)
    block_tokens = view.column("block_tokens")
    local: Floats = np.minimum(
        _held(view.holders[: view.num_rows], cached_blocks), _max_blocks(view, num_prompt_tokens)
    )
    return local * block_tokens


def _prefixes(
    view: ClusterView,
    request: PlacementRequest,
    rows: _Rows,
    balancing_threshold: float | None,
    *,
    has_all: bool = False,
) -> _Prefixes | None:
    """What may be loaded from the few holders with the longest prefixes, or from all; None: nothing."""
    blocks = view.fetch_links.serving(request.cached_blocks)
    sources = np.flatnonzero(blocks)
    if balancing_threshold is None:
        sources = sources[view.fetch_links.is_store(sources)]
    if not len(sources):
        return None
    if not has_all and len(sources) > _MOST_HOLDERS:
        sources = sources[np.argsort(-blocks[sources], kind="stable")]
        sources = _with_stores(view, sources)
    reachable = np.minimum(blocks[sources][None, :], rows.max_blocks) * rows.block_tokens
    is_store = view.fetch_links.is_store(sources)
    threshold = np.inf if balancing_threshold is None else balancing_threshold
    least = np.where(is_store, 1.0, max(threshold, 1.0)) * rows.local
    costs = view.fetch_links.costs(rows.usual_s_per_token, sources, rows.first)
    wanted = (reachable > least) & np.isfinite(costs.s_per_token)
    return _Prefixes(sources, reachable, wanted, is_store, costs)


def _with_stores(view: ClusterView, sources: NDArray[np.int64]) -> NDArray[np.int64]:
    """The first few, and the few best stores: a row's own store may be much nearer than all workers."""
    stores = sources[view.fetch_links.is_store(sources)]
    return np.array(list(dict.fromkeys([*sources[:_MOST_HOLDERS].tolist(), *stores[:_MOST_HOLDERS].tolist()])))


def _restored(rows: _Rows, prefixes: _Prefixes, queue_s: Floats) -> _Restored:
    """Loading starts now, computing after the queue. The same meeting point as in `placement/restore_plan.py`.

    queue_s: [num_rows, 1].
    """
    _, b, c = (column[:, None] for column in rows.coefficients.T)
    fetch_s = prefixes.costs.s_per_token
    gamma = np.where(np.isfinite(fetch_s), fetch_s, 0.0)
    missing = np.maximum(prefixes.reachable - rows.local, 0.0)
    alpha = b + c * rows.local
    ahead_s = np.maximum(gamma * missing + prefixes.costs.wait_s - queue_s, 0.0)
    slope = alpha + gamma
    reach = slope + np.sqrt(slope**2 + 2 * c * ahead_s)
    computed = np.divide(2 * ahead_s, reach, out=np.zeros_like(reach), where=reach > 0)
    loaded = missing - np.minimum(computed, missing)
    transfer_s = np.where(loaded > 0, prefixes.costs.wait_s + gamma * loaded, 0.0)
    compute_s = np.where(loaded > 0, 0.0, alpha * missing + c * missing**2 / 2)  # nothing is worth loading
    return _Restored(np.maximum(queue_s, transfer_s) + compute_s, transfer_s)


def prefill_seconds(view: ClusterView, cached: Floats, num_tokens: float) -> Floats:
    """Seconds to compute a prompt of `num_tokens` on every row, `cached` [num_rows] of which need no computing."""
    return _compute_s(view.prefill_coefficients[: view.num_rows].T, cached, num_tokens)


def _fetched_s(rows: _Rows, num_prompt_tokens: int, prefixes: _Prefixes, restored: _Restored) -> Floats:
    """TTFT [num_rows, num_sources] with each source; inf where the row does not load from it."""
    rest_s = _compute_s(rows.coefficients.T[:, :, None], prefixes.reachable, float(num_prompt_tokens))
    return np.where(prefixes.wanted, restored.seconds + rest_s, np.inf)


def _compute_s(coefficients: Floats, cached: Floats, num_tokens: float) -> Floats:
    a, b, c = coefficients
    new = num_tokens - cached
    seconds: Floats = a + b * new + c * new * (cached + new / 2)
    return seconds


def _rows(view: ClusterView, num_prompt_tokens: int, local: Floats, rows: slice) -> _Rows:
    return _Rows(
        rows.start or 0,
        view.prefill_coefficients[: view.num_rows][rows],
        view.column("block_tokens")[rows, None],
        _max_blocks(view, num_prompt_tokens)[rows, None],
        local[rows, None],
        view.column("fetch_s_per_token")[rows],
    )


def _max_blocks(view: ClusterView, num_prompt_tokens: int) -> Floats:
    """Whole blocks of the prompt that leave at least one token to compute."""
    blocks: Floats = (num_prompt_tokens - 1) // np.maximum(view.column("block_tokens"), 1)
    return blocks


def _held(holders: NDArray[np.int64], cached_blocks: NDArray[np.int64]) -> NDArray[np.int64]:
    """Number of leading blocks on each of these holders."""
    held: NDArray[np.int64] = cached_blocks[np.minimum(holders, len(cached_blocks) - 1)]
    return held
