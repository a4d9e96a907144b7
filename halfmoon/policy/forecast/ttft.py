"""TTFT of a prompt on each worker: queue, restore from whoever has its prefix, prefill of the rest.

Mooncake, Algorithm 1. A transfer costs the latency of its link, what is on its way there already, and its bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from halfmoon.policy.forecast.restore_plan import until_step_s
from halfmoon.policy.models.latency import Floats
from halfmoon.policy.values import PlacementRequest, TtftPrediction
from halfmoon.policy.view.capabilities import Bools
from halfmoon.policy.view.cluster_view import ClusterView
from halfmoon.policy.view.fetch_costs import FetchCosts

Waits = Callable[[Floats, Floats], Floats]
"""Maps the reported queue and the prompt's own prefill time of each row to the time until the prefill starts."""

MAX_SOURCES = 4  # workers that a request names; the stores of the pool come on top
_LEAST_S = 1e-30  # that a token takes: a divisor above 0
_MOST_HOLDERS = 4  # that every row is compared for; those with the longest prefixes


class _Rows(NamedTuple):
    """Successive rows of the view. Columns are [num_rows]."""

    first: int
    coefficients: Floats  # [3, num_rows]
    block_tokens: Floats
    max_blocks: Floats  # of the prompt: whole ones that leave at least one token to compute
    local: Floats  # tokens cached, in such blocks
    usual_s_per_token: Floats
    step_tokens: Floats
    layer_passes: Floats
    most_seen: float  # by each token of the prompt


class _Prefixes(NamedTuple):
    """What rows may load. Matrices are [num_sources, num_rows]: numpy is quick along the longer side."""

    sources: NDArray[np.int64]  # [num_sources] holders
    reachable: Floats  # tokens of the prefix at each of them
    wanted: Bools  # whether the row loads from there if that is faster than computing
    most_of_reader: NDArray[np.int64]  # [num_sources] blocks that it would hold for one at once
    costs: FetchCosts


class _Restored(NamedTuple):
    """Loading what is missing, with what comes first computed meanwhile. Matrices are [num_sources, num_rows]."""

    seconds: Floats  # until the reachable prefix is there
    transfer_s: Floats  # of the part that is loaded
    ready_s: Floats  # until the steps behind that part may begin


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
    rows = _rows(view, request, slice(num_rows))
    local = rows.local
    prefill_s = _compute_s(rows.coefficients, local, float(num_prompt_tokens), rows.most_seen)
    queue_s = waits(reported_s, prefill_s) if waits else reported_s
    computed_s = queue_s + prefill_s
    prefixes = _prefixes(view, request, rows, balancing_threshold)
    nothing = np.zeros(num_rows)
    if prefixes is None or not np.logical_or.reduce(prefixes.wanted, axis=None):
        return TtftPrediction(computed_s, local, nothing, queue_s)
    restored = _restored(rows, num_prompt_tokens, prefixes, queue_s)
    fetched_s = _fetched_s(rows, num_prompt_tokens, prefixes, restored)
    best = np.argmin(fetched_s, axis=0), np.arange(num_rows)
    least_s = fetched_s[best]
    fetches = least_s < computed_s
    return TtftPrediction(
        np.where(fetches, least_s, computed_s),
        local,
        np.where(fetches, prefixes.reachable[best] - local, nothing),
        queue_s,
        np.where(fetches, prefixes.sources[best[0]], -1),
        np.where(fetches, restored.transfer_s[best], nothing),
        np.where(fetches, restored.ready_s[best], nothing),
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
    rows = _rows(view, request, slice(row, row + 1))
    prefixes = _prefixes(view, request, rows, balancing_threshold, has_all=True)
    if prefixes is None:
        return []
    restored = _restored(rows, request.num_prompt_tokens, prefixes, np.full(1, queue_s))
    seconds = _fetched_s(rows, request.num_prompt_tokens, prefixes, restored)[:, 0]
    order = np.argsort(seconds, kind="stable")[:limit]
    return [int(prefixes.sources[at]) for at in order if np.isfinite(seconds[at])]


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
    sources = blocks.nonzero()[0]
    is_store = view.fetch_links.is_store(sources)
    if balancing_threshold is None:
        sources, is_store = sources[is_store], is_store[is_store]
    if not len(sources):
        return None
    if not has_all and len(sources) > _MOST_HOLDERS:
        few = _few(blocks[sources], is_store)
        sources, is_store = sources[few], is_store[few]
    reachable = np.minimum(blocks[sources, None], rows.max_blocks) * rows.block_tokens
    threshold = np.inf if balancing_threshold is None else balancing_threshold
    least = np.where(is_store, 1.0, max(threshold, 1.0))[:, None] * rows.local
    costs = view.fetch_links.costs(rows.usual_s_per_token, sources, rows.first)
    if request.is_failover:
        costs = _as_sent(view, rows.first, sources, costs)
    wanted = reachable > least
    wanted &= np.isfinite(costs.s_per_token)
    return _Prefixes(sources, reachable, wanted, view.fetch_links.most_of_reader(sources), costs)


def _few(blocks: NDArray[np.int64], is_store: Bools) -> list[int]:
    """The few that hold most, and the few best stores: a row's own store may be much nearer than all workers."""
    order = np.argsort(-blocks, kind="stable")
    stores = order[is_store[order]]
    return list(dict.fromkeys([*order[:_MOST_HOLDERS].tolist(), *stores[:_MOST_HOLDERS].tolist()]))


def _as_sent(view: ClusterView, first_row: int, sources: NDArray[np.int64], costs: FetchCosts) -> FetchCosts:
    """The costs, with links that were never loaded over as fast as the source has sent KV over them.

    Decode workers load from others after a failure alone, when prefill workers have long measured the way to them.
    """
    num_rows, s_per_token = costs.s_per_token.shape[1], costs.s_per_token.copy()
    unmeasured = ~view.fetch_links.is_measured(sources, first_row, num_rows) & np.isfinite(s_per_token)
    for at, source in enumerate(sources):
        for sender in np.flatnonzero(view.holders[: view.num_rows] == source).tolist():
            if view.links.has_measured(sender):
                sent = view.links.from_row(sender, view.num_rows).s_per_byte[first_row : first_row + num_rows]
                by_token = sent * view.worker(sender).kv_bytes_per_token
                s_per_token[at] = np.where(unmeasured[at], by_token, s_per_token[at])
    return costs._replace(s_per_token=s_per_token)


def _restored(rows: _Rows, num_prompt_tokens: int, prefixes: _Prefixes, queue_s: Floats) -> _Restored:
    """Loading starts now, computing after the queue, or all by layer. Rules as in `restore_plan.py`.

    queue_s: [num_rows].
    """
    _, b, c = rows.coefficients
    fetch_s = prefixes.costs.s_per_token
    gamma = np.where(np.isfinite(fetch_s), fetch_s, 0.0)
    missing = np.maximum(prefixes.reachable - rows.local, 0.0)
    alpha = b + c * rows.local
    ahead_s = np.maximum(gamma * missing + prefixes.costs.wait_s - queue_s, 0.0)
    slope = alpha + gamma
    reach = slope + np.sqrt(slope**2 + 2 * c * ahead_s)
    computed = 2 * ahead_s / np.maximum(reach, _LEAST_S)
    loaded = missing - np.minimum(computed, missing)
    is_loaded = loaded > 0
    transfer_s = np.where(is_loaded, prefixes.costs.wait_s + gamma * loaded, 0.0)
    compute_s = np.where(is_loaded, 0.0, missing * (alpha + c * missing / 2))  # nothing is worth loading
    met = _Restored(np.maximum(queue_s, transfer_s) + compute_s, transfer_s, transfer_s)
    if np.maximum.reduce(rows.layer_passes) < 2:
        return met
    until_s = np.where(computed > 0, met.seconds, transfer_s)  # nothing of a load waits for the queue
    return _or_by_layer(met, until_s, rows, num_prompt_tokens, prefixes, queue_s, gamma * missing)


def _or_by_layer(
    met: _Restored,
    until_s: Floats,
    rows: _Rows,
    num_prompt_tokens: int,
    prefixes: _Prefixes,
    queue_s: Floats,
    load_s: Floats,
) -> _Restored:
    """`met`, or loading all by layer where that is sooner than `until_s`, at which the prefix would be there."""
    next_tokens = np.minimum(num_prompt_tokens - prefixes.reachable, rows.step_tokens)
    step_s = _compute_s(rows.coefficients, prefixes.reachable, prefixes.reachable + next_tokens, rows.most_seen)
    wait_s, num_blocks = prefixes.costs.wait_s, (prefixes.reachable - rows.local) / np.maximum(rows.block_tokens, 1)
    is_held = num_blocks <= prefixes.most_of_reader[:, None]
    begin_s = until_step_s(until_s, wait_s, load_s, step_s, rows.layer_passes, is_held)
    is_by_layer = begin_s < until_s
    return _Restored(
        np.where(is_by_layer, np.maximum(queue_s, begin_s), met.seconds),
        np.where(is_by_layer, wait_s + load_s, met.transfer_s),
        np.where(is_by_layer, begin_s, met.ready_s),
    )


def prefill_seconds(view: ClusterView, cached: Floats, num_tokens: float, most_seen: float = math.inf) -> Floats:
    """Seconds to compute a prompt of `num_tokens` on every row, `cached` [num_rows] of which need no computing.

    Each token sees at most `most_seen`.
    """
    return _compute_s(view.prefill_coefficients[: view.num_rows].T, cached, num_tokens, most_seen)


def _fetched_s(rows: _Rows, num_prompt_tokens: int, prefixes: _Prefixes, restored: _Restored) -> Floats:
    """TTFT [num_sources, num_rows] with each source; inf where the row does not load from it."""
    rest_s = _compute_s(rows.coefficients, prefixes.reachable, float(num_prompt_tokens), rows.most_seen)
    return np.where(prefixes.wanted, restored.seconds + rest_s, np.inf)


def _compute_s(coefficients: Floats, cached: Floats, num_tokens: float | Floats, most_seen: float) -> Floats:
    a, b, c = coefficients
    new = num_tokens - cached
    seconds: Floats = a + b * new + c * new * (cached + new / 2)
    if most_seen < math.inf:  # as `num_pairs`
        before, end = np.maximum(cached - most_seen, 0.0), np.maximum(num_tokens - most_seen, 0.0)
        seconds -= c * (end**2 - before**2) / 2
    return seconds


def _rows(view: ClusterView, request: PlacementRequest, rows: slice) -> _Rows:
    block_tokens = view.column("block_tokens")[rows]
    max_blocks = np.floor((request.num_prompt_tokens - 1) / np.maximum(block_tokens, 1))  # `//` takes ten times as long
    local = np.minimum(_held(view.holders[: view.num_rows][rows], request.cached_blocks), max_blocks) * block_tokens
    return _Rows(
        rows.start or 0,
        view.prefill_coefficients[: view.num_rows][rows].T,
        block_tokens,
        max_blocks,
        local,
        view.column("fetch_s_per_token")[rows],
        view.column("step_tokens")[rows],
        view.column("layer_passes")[rows],
        request.most_seen.prompt,
    )


def _held(holders: NDArray[np.int64], cached_blocks: NDArray[np.int64]) -> NDArray[np.int64]:
    """Number of leading blocks on each of these holders."""
    held: NDArray[np.int64] = cached_blocks[np.minimum(holders, len(cached_blocks) - 1)]
    return held
