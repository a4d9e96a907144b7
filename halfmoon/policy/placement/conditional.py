"""Conditional disaggregation: whether a decode worker computes a prompt itself instead of receiving its KV."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from halfmoon.policy.models.chunk_length import chunk_s, chunk_target_s, decodes_with_targets
from halfmoon.policy.models.latency import Floats
from halfmoon.policy.placement.forecast import Forecast
from halfmoon.policy.values import DecodeLoads, Disaggregation, Placement, PlacementRequest, TtftPrediction
from halfmoon.policy.view.capabilities import Bools
from halfmoon.policy.view.cluster_view import ClusterView

ConditionalMode = Literal["off", "failover", "auto", "strict"]
"""When decode workers compute prompts.

- off: never.
- failover: only of requests that lost a worker, by the rules of `auto`; these apply to them in `strict`, too.
- auto: if the answer then begins sooner, and no request that decodes there becomes slower than its class allows.
- strict: only if besides the rest of the prompt fits one step, and prompts slow the others by at most a twentieth.
"""

KeepingMode = Literal["off", "auto", "strict"]
"""The mode that applies to one request."""

DEFAULT_MODE: ConditionalMode = "failover"  # of gateways, as the planner simulates them

_MOST_TRIED = 3  # decode workers that are examined closely
_TIE = 0.01  # share of the least TTFT within which decode workers are equal
_LONGEST_STEP = 4.0  # of a step without prompts: a step with a chunk, where no class has a TBT target
MOST_SHARE: Mapping[str, float] = {"auto": 0.25, "strict": 0.05}  # of prompts in a worker's time, beside neighbours
_FULL = 0.9  # share of memory and of places in the batch in use
_MOSTLY_CACHED = 0.5  # share of the prompt


class Choice(NamedTuple):
    """`kept` is the prefill on the decode worker in `row`; both None if the prompt goes to a prefill worker."""

    reason: Disaggregation
    row: int | None = None
    kept: Placement | None = None


@dataclass(frozen=True, slots=True)
class ConditionalDisaggregation:
    """Compares the best prefill worker of one prompt with the decode workers."""

    view: ClusterView
    request: PlacementRequest
    mode: KeepingMode
    forecast: Forecast
    now_s: float

    def choose(
        self,
        decodes: Bools,
        ttft: TtftPrediction,
        loads: DecodeLoads,
        elsewhere: Placement,
        refined: Callable[[int], Placement],
        rng: random.Random,
    ) -> Choice:
        """Chooses between `elsewhere`, on a prefill worker, and the best of `decodes` for the whole request.

        Staying saves the hand-over: `auto` counts the gap that this one or a usual one costs. `loads` are those when
        the prefill `elsewhere` ends; `refined` predicts the prefill on a row step by step.
        """
        if self.mode == "off":
            return Choice("off")
        view, num_tokens = self.view, self.request.num_prompt_tokens
        rows = decodes & view.capabilities.may_keep
        if not np.logical_or.reduce(rows):
            return Choice("unknown")
        rows &= self._with_room()
        if not np.logical_or.reduce(rows):
            return Choice("no_room")
        is_handover_seen = self.mode == "auto" and self.request.max_tokens > 1
        handover_s = self.forecast.handover_s(elsewhere, 2) if is_handover_seen else 0.0
        limit_s = elsewhere.ttft_s + handover_s
        estimates_s = elsewhere.overhead_s + self._among_decodes(ttft, loads)
        reason: Disaggregation = "not_faster"
        for row in _soonest(estimates_s, rows, rng):
            if estimates_s[row] >= limit_s:
                break
            kept = refined(row)
            if kept.ttft_s >= limit_s:
                continue
            new_tokens = max(num_tokens - kept.cached_tokens - kept.fetched_tokens, 1)
            if self.mode == "strict" and new_tokens > kept.prefill.chunk_tokens:
                reason = "not_short"
            elif self._spares_others(row, kept, new_tokens, limit_s - kept.ttft_s):
                return Choice(_why_kept(kept, num_tokens, new_tokens), row, kept)
            else:
                reason = "neighbours"
        return Choice(reason)

    def _with_room(self) -> Bools:
        """Rows [num_rows] that are not nearly full: where those are, the cluster lacks decode workers."""
        view = self.view
        free_tokens = view.column("free_blocks") * view.column("block_tokens") - self.request.num_prompt_tokens
        has_memory = free_tokens > (1 - _FULL) * view.column("total_tokens")
        has_places: Bools = view.column("num_requests") < _FULL * view.column("max_running")
        return has_memory & has_places

    def _among_decodes(self, ttft: TtftPrediction, loads: DecodeLoads) -> Floats:
        """TTFT on every row [num_rows], whose chunks share steps with the decodes there."""
        view = self.view
        new_tokens = np.maximum(self.request.num_prompt_tokens - ttft.cached_tokens - ttft.fetched_tokens, 1)
        num_steps = np.ceil(new_tokens / np.maximum(view.column("chunk_tokens"), 1))
        d, e, f = view.step_coefficients[: view.num_rows].T
        tbt_s = np.where(loads.batch > 0, d + e * loads.batch + f * loads.context_tokens, 0.0)
        step_s = view.column("tokens_per_step") * tbt_s
        seconds: Floats = ttft.seconds + num_steps * step_s
        return seconds

    def _spares_others(self, row: int, kept: Placement, new_tokens: int, gained_s: float) -> bool:
        """Whether the requests that decode there, and this one after its first token, keep their pace.

        No step may take longer than the least TBT target of them all; without any, than a few steps without prompts,
        or, for a failover, than a step and what it gains, `gained_s`: failovers are rare, and their clients wait.
        Prompts may take only a certain share of the worker's time.
        """
        worker, model, num_tokens = kept.prefill, kept.prefill.step_model, self.request.num_prompt_tokens
        neighbours = self.forecast.neighbours(self.view, row, self.now_s + kept.ttft_s, self.now_s)
        load, target_s = neighbours.load, neighbours.tbt_target_s
        if self.request.max_tokens > 1:
            target_s = min(target_s, self.request.tbt_target_s)
        if model.seconds(load.batch + 1, load.context_tokens + self.request.context_tokens()) > target_s:
            return False
        if not load.batch:
            return True
        waiting_tokens = float(self.view.column("waiting_prefill_tokens")[row])
        bound_s = chunk_target_s(target_s, worker.role)
        beside = decodes_with_targets(load.batch, load.context_tokens, (bound_s,))
        most = worker.chunk_rule.tokens(worker.chunk_tokens, worker.step_tokens, beside, num_tokens - new_tokens)
        chunk_tokens = min(new_tokens + waiting_tokens, most)
        known_tokens = max(num_tokens - chunk_tokens, 0)
        added_s = worker.prefill_model.seconds(chunk_tokens, known_tokens)
        if worker.chunk_rule.is_known:
            added_s = chunk_s(worker.prefill_model, worker.whole_step_model, chunk_tokens, known_tokens)
        step_s = worker.whole_step_model.seconds(load.batch, load.context_tokens)
        longest_s = target_s
        if target_s == math.inf:
            longest_s = max(_LONGEST_STEP * step_s, step_s + gained_s if self.request.is_failover else 0.0)
        share = (kept.work_s + neighbours.prompts_s) / neighbours.mean_life_s
        return step_s + added_s <= longest_s and share <= MOST_SHARE[self.mode]


def _soonest(seconds: Floats, rows: Bools, rng: random.Random) -> list[int]:
    """The few rows with the least time; equal ones in random order."""
    among = np.roll(rows.nonzero()[0], -rng.randrange(len(rows)))
    among_s = seconds[among]
    least_s = np.minimum.reduce(among_s)
    ties = np.floor((among_s - least_s) / max(_TIE * least_s, 1e-9))
    return [int(row) for row in among[np.argsort(ties, kind="stable")[:_MOST_TRIED]]]


def _why_kept(kept: Placement, num_tokens: int, new_tokens: int) -> Disaggregation:
    """Names what lets the decode worker be quicker: its cache, the pool, a short rest, or the queues elsewhere."""
    if kept.cached_tokens >= _MOSTLY_CACHED * num_tokens:
        return "kept_cached"
    if kept.cached_tokens + kept.fetched_tokens >= _MOSTLY_CACHED * num_tokens:
        return "kept_loaded"
    return "kept_short" if new_tokens <= kept.prefill.chunk_tokens else "kept_idle"
