"""What no simulation can exceed: rates that follow from the latency models alone, and targets that none can meet."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from halfmoon.plan.search.goodput import Goal
from halfmoon.sim.cluster.cluster_spec import BatchLimits
from halfmoon.sim.latency_sources.latency_model import LatencyModel
from halfmoon.sim.workloads.workload import Floats, Workload

NO_LIMIT = 1e6  # requests a second: where nothing has to be computed


class RateBound(NamedTuple):
    """Requests a second of a run without end.

    - most_per_s: that no worker exceeds, whoever is late or refused.
    - typical_per_s: of one that is busy all the time and serves everybody, in the best batches there can be.
    """

    most_per_s: float
    typical_per_s: float


def prefill_bound_per_s(model: LatencyModel, workload: Workload, goal: Goal, limits: BatchLimits) -> RateBound:
    """Of one worker. Those who meet TTFT are at least the attainment's share, and all computed.

    Each token takes what it does in the best batch there can be; what a prefix cache without end has is not computed.
    """
    new = _uncached(workload)
    pair_s = min(piece.model.c for piece in model.prefill)
    work_s: Floats = _least_token_s(model, limits) * new + pair_s * new**2 / 2
    return RateBound(_rate_per_s(_smallest(work_s, goal.attainment).sum(), work_s), _rate_per_s(work_s.sum(), work_s))


def decode_bound_per_s(model: LatencyModel, workload: Workload, goal: Goal, limits: BatchLimits) -> RateBound:
    """Of one worker.

    Tokens a second are concave in the batch, so those of the mean batch bound the mean; and by Little's law a step of
    the mean batch of those who meet TPOT takes at most TPOT.
    """
    prompts, tokens = workload.prompt_tokens.astype(np.float64), workload.output_tokens.astype(np.float64) - 1
    least_context = float(_smallest(prompts, goal.attainment).mean())
    context = float(((prompts + tokens / 2) * tokens).sum() / max(tokens.sum(), 1.0)) or least_context
    most_per_s, typical_per_s = (_tokens_per_s(model, one, goal.gap_s, limits) for one in (least_context, context))
    least_tokens = _smallest(tokens, goal.attainment).sum()
    return RateBound(
        _rate_per_s(least_tokens / most_per_s, tokens) if most_per_s else 0.0,
        _rate_per_s(tokens.sum() / typical_per_s, tokens) if typical_per_s else 0.0,
    )


def _tokens_per_s(model: LatencyModel, context: float, gap_s: float, limits: BatchLimits) -> float:
    """The most that a worker decodes of sequences of so long a context, none of them slower than the gap."""
    most = min(limits.max_running, max(int(model.kv_tokens / max(context, 1.0)), 1))
    batches = np.unique(np.geomspace(1, most, 64).astype(int)).tolist()
    best_per_s = 0.0
    for batch, following in zip(batches, [*batches[1:], most], strict=True):
        base_s, slope_s = model.cycle(batch)
        if base_s + slope_s * batch * context > gap_s:
            break
        after_s, after_slope_s = model.cycle(following)
        speeds = (
            _speed(batch, base_s + slope_s * batch * context),
            _speed(following, after_s + after_slope_s * following * context),
        )
        best_per_s = max(best_per_s, *speeds)
    return best_per_s


def _speed(batch: int, step_s: float) -> float:
    return batch / step_s if step_s > 0 else NO_LIMIT


def _rate_per_s(busy_s: float, of: Floats) -> float:
    """Of as many requests as there are, served in so long."""
    return min(len(of) / float(busy_s), NO_LIMIT) if busy_s > 0 else NO_LIMIT


def _smallest(column: Floats, share: float) -> Floats:
    found: Floats = np.sort(column)[: max(int(np.floor(share * len(column))), 1)]
    return found


def _least_token_s(model: LatencyModel, limits: BatchLimits) -> float:
    most = float(limits.max_batch_tokens)
    sizes = {most} | {piece.least for piece in model.prefill if 0 < piece.least < most}
    return min(min(model.stage_s(one, 0, 0, 0), model.stage_s(np.nextafter(one, 0), 0, 0, 0)) / one for one in sizes)


def _uncached(workload: Workload) -> Floats:
    """Tokens of each prompt that nobody asked about before."""
    prompts = workload.prompt_tokens.astype(np.float64)
    prefixes = workload.prefixes
    if prefixes is None:
        return prompts
    is_repeated = np.ones(len(prefixes.ids), dtype=np.int64)
    is_repeated[np.unique(prefixes.ids, return_index=True)[1]] = 0
    repeated = np.diff(np.concatenate([[0], np.cumsum(is_repeated)])[prefixes.offsets])
    uncached: Floats = np.maximum(prompts - repeated * prefixes.block_tokens, 1.0)
    return uncached
