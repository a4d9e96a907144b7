"""What no simulation can exceed: rates that follow from the latency models alone, and targets that none can meet."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from halfmoon.plan.goodput import Goal
from halfmoon.sim.cluster import BatchLimits
from halfmoon.sim.latency import LatencyModel
from halfmoon.sim.workload import Floats, Workload

NO_LIMIT = 1e6  # requests a second: where nothing has to be computed


class RateBound(NamedTuple):
    """Requests a second: of a run without end, and of the workload's, whose last requests may be done after it."""

    steady_per_s: float
    most_per_s: float


def prefill_bound_per_s(model: LatencyModel, workload: Workload, goal: Goal, limits: BatchLimits) -> RateBound:
    """Of one worker. Those who meet TTFT are at least the attainment's share, and all computed by the last arrival's.

    Each token takes what it does in the best batch there can be; what a prefix cache without end has is not computed.
    """
    new = _uncached(workload)
    pair_s = min(piece.model.c for piece in model.prefill)
    work_s: Floats = _least_token_s(model, limits) * new + pair_s * new**2 / 2
    return _bound(work_s, goal.targets.ttft_s or np.inf, goal)


def decode_bound_per_s(model: LatencyModel, workload: Workload, goal: Goal, limits: BatchLimits) -> RateBound:
    """Of one worker.

    Tokens a second are concave in the batch, so those of the mean batch bound the mean; and by Little's law a step of
    the mean batch of those who meet TPOT takes at most TPOT.
    """
    tpot_s = goal.gap_s
    least_context = float(_smallest(workload.prompt_tokens.astype(np.float64), goal.attainment).mean())
    most = min(limits.max_running, max(int(model.kv_tokens / least_context), 1))
    batches = np.unique(np.geomspace(1, most, 64).astype(int)).tolist()
    best_per_s = 0.0
    for batch, following in zip(batches, [*batches[1:], most], strict=True):
        base_s, slope_s = model.cycle(batch)
        if base_s + slope_s * batch * least_context > tpot_s:
            break
        after_s, after_slope_s = model.cycle(following)
        speeds = (
            batch / (base_s + slope_s * batch * least_context),
            following / (after_s + after_slope_s * following * least_context),
        )
        best_per_s = max(best_per_s, *speeds)
    if best_per_s == 0.0:
        return RateBound(0.0, 0.0)
    tokens = workload.output_tokens.astype(np.float64) - 1
    drain_s = float(tokens.max()) * tpot_s if np.isfinite(tpot_s) else np.inf
    return _bound(tokens / best_per_s, drain_s + (goal.targets.ttft_s or np.inf), goal)


def _bound(work_s: Floats, after_s: float, goal: Goal) -> RateBound:
    """Where the smallest works that must be done are done `after_s` the last arrival."""
    all_s = float(_smallest(work_s, goal.attainment).sum())
    num = len(work_s)
    return RateBound(*(min(num / left_s, NO_LIMIT) if left_s > 0 else NO_LIMIT for left_s in (all_s, all_s - after_s)))


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
