"""Bounds that follow from the latency models alone: rates that no simulation exceeds, and targets that none can
meet.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from halfmoon.plan.search.goodput import Goal
from halfmoon.sim.cluster.cluster_spec import BatchLimits
from halfmoon.sim.latency_sources.latency_model import LatencyModel
from halfmoon.sim.worker.kept_kv import ALL_KV, KeptKV
from halfmoon.sim.workloads.workload import Floats, Workload

NO_LIMIT = 1e6  # requests per second, if nothing has to be computed


class RateBound(NamedTuple):
    """Requests per second of a run without end.

    - most_per_s: no worker exceeds this, however many requests are late or refused.
    - typical_per_s: a worker that is always busy and serves every request, in the best possible batches.
    """

    most_per_s: float
    typical_per_s: float


def prefill_bound_per_s(
    model: LatencyModel, workload: Workload, goal: Goal, limits: BatchLimits, kept: KeptKV = ALL_KV
) -> RateBound:
    """Bound of one prefill worker. At least the attainment's share of requests meets TTFT, and those are all computed.

    Each token takes the time that it takes in the best batch. Tokens that an infinite prefix cache would hold are free.
    """
    if model.ring is not None:  # at best each rank computes as much as it would alone
        alone = prefill_bound_per_s(replace(model, ring=None), workload, goal, limits, kept)
        return RateBound(*(min(one * model.ring.num_ranks, NO_LIMIT) for one in alone))
    new = _uncached(workload)
    pair_s = min(piece.model.c for piece in model.prefill)
    work_s: Floats = _least_token_s(model, limits) * new + pair_s * kept.pairs(new)
    return RateBound(_rate_per_s(_smallest(work_s, goal.attainment).sum(), work_s), _rate_per_s(work_s.sum(), work_s))


def decode_bound_per_s(
    model: LatencyModel, workload: Workload, goal: Goal, limits: BatchLimits, kept: KeptKV = ALL_KV
) -> RateBound:
    """Bound of one decode worker.

    Tokens per second are concave in the batch size, so the mean batch bounds their mean. By Little's law, a step of the
    mean batch of requests that meet TPOT takes at most TPOT.
    """
    prompts, tokens = workload.prompt_tokens.astype(np.float64), workload.output_tokens.astype(np.float64) - 1
    least_context = float(kept.seen(_smallest(prompts, goal.attainment)).mean())
    context = float((kept.seen(prompts + tokens / 2) * tokens).sum() / max(tokens.sum(), 1.0)) or least_context
    most_per_s, typical_per_s = (_tokens_per_s(model, one, goal.gap_s, limits) for one in (least_context, context))
    least_tokens = _smallest(tokens, goal.attainment).sum()
    return RateBound(
        _rate_per_s(least_tokens / most_per_s, tokens) if most_per_s else 0.0,
        _rate_per_s(tokens.sum() / typical_per_s, tokens) if typical_per_s else 0.0,
    )


def _tokens_per_s(model: LatencyModel, context: float, gap_s: float, limits: BatchLimits) -> float:
    """The highest token rate for sequences of mean length `context`, with no step longer than `gap_s`."""
    most = min(limits.max_running, max(int(model.kv_tokens / max(context, 1.0)), 1))
    batches = np.unique(np.geomspace(1, most, 64).astype(int)).tolist()
    best_per_s = 0.0
    for batch, following in zip(batches, [*batches[1:], most], strict=True):
        step_s = model.step_s(batch, batch * context)
        if step_s > gap_s:
            break
        after_s = model.step_s(following, following * context)
        best_per_s = max(best_per_s, _speed(batch, step_s), _speed(following, after_s))
    return best_per_s


def _speed(batch: int, step_s: float) -> float:
    return batch / step_s if step_s > 0 else NO_LIMIT


def _rate_per_s(busy_s: float, of: Floats) -> float:
    """Rate of the column's requests, served within `busy_s`."""
    return min(len(of) / float(busy_s), NO_LIMIT) if busy_s > 0 else NO_LIMIT


def _smallest(column: Floats, share: float) -> Floats:
    result: Floats = np.sort(column)[: max(int(np.floor(share * len(column))), 1)]
    return result


def _least_token_s(model: LatencyModel, limits: BatchLimits) -> float:
    most = float(limits.max_batch_tokens)
    sizes = {most} | {piece.least for piece in model.prefill if 0 < piece.least < most}
    return min(
        min(model.stage_s(size, 0, 0, 0), model.stage_s(np.nextafter(size, 0), 0, 0, 0)) / size for size in sizes
    )


def _uncached(workload: Workload) -> Floats:
    """Tokens of each prompt that no earlier prompt shares."""
    prompts = workload.prompt_tokens.astype(np.float64)
    prefixes = workload.prefixes
    if prefixes is None:
        return prompts
    is_repeated = np.ones(len(prefixes.ids), dtype=np.int64)
    is_repeated[np.unique(prefixes.ids, return_index=True)[1]] = 0
    repeated = np.diff(np.concatenate([[0], np.cumsum(is_repeated)])[prefixes.offsets])
    uncached: Floats = np.maximum(prompts - repeated * prefixes.block_tokens, 1.0)
    return uncached
