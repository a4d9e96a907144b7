"""Placement: which prefill and which decode worker serve a request. Mooncake's Algorithm 1, and its baselines."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from halfmoon.errors import InvalidRequest, Unavailable
from halfmoon.policy.admission.feedback import AdmissionTargets
from halfmoon.policy.forecast.decode_forecast import DecodeLoad, DecodeLoads
from halfmoon.policy.models.latency import Floats
from halfmoon.policy.placement.ranking import PlacementMode, Ranking
from halfmoon.policy.placement.ttft import TtftPrediction, predict_ttft
from halfmoon.policy.view.capabilities import RoleMasks
from halfmoon.policy.view.cluster_view import ClusterView, WorkerView

NO_TARGETS = AdmissionTargets(None, None)
NOTHING_CACHED: NDArray[np.int64] = np.zeros(1, dtype=np.int64)  # depths where no block is known

_RETRY_AFTER_MS = 1_000  # a worker that joins or drains takes about a second to show


class ContextLengthExceeded(InvalidRequest):
    """Prompt and output together are longer than the model's context, or than any worker's KV memory."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The two workers of a request; one worker of role `both` is both halves. Seconds are predictions, from now."""

    prefill: WorkerView
    decode: WorkerView
    ttft_s: float = 0.0
    tbt_s: float = 0.0
    cached_tokens: int = 0
    fetched_tokens: int = 0  # of the prefix, from the worker's store or else the best holder
    queue_s: float = 0.0  # of `ttft_s`: until the prefill worker begins with it
    overhead_s: float = 0.0  # of `ttft_s`: beside queue and prefill
    work_s: float = 0.0  # restoring and computing it, on a worker that does nothing else
    behind_s: float = 0.0  # computing what the prefill worker has left when its token is there
    ranked_by: TtftPrediction | None = field(default=None, compare=False, repr=False)  # of all workers

    @property
    def decode_address(self) -> str:
        """Where the prefill worker sends the KV; empty when it keeps it."""
        return "" if self.is_colocated else self.decode.address

    @property
    def prefill_s(self) -> float:
        """Of `ttft_s`: from the beginning on the prefill worker to the token."""
        return max(self.ttft_s - self.queue_s - self.overhead_s, 0.0)

    @property
    def is_colocated(self) -> bool:
        """Whether one worker does it all."""
        return self.prefill.worker_id == self.decode.worker_id


@dataclass(frozen=True, slots=True)
class PlacementRules:
    """How workers are chosen.

    - kvcache-centric: least predicted TTFT, prefixes fetched where that pays; then least predicted TBT. Of workers that
      do both halves those that meet both targets go first, and of equal TTFTs the least TBT counts.
    - cache-aware: the same without fetching from other workers. What a worker restores from its store always counts.
    - least-loaded: fewest prompt tokens waiting; fewest requests.
    - random: any that can.
    """

    mode: PlacementMode = "kvcache-centric"
    balancing_threshold: float = 2.0  # best prefix / local prefix above which the best is fetched

    @property
    def fetching_threshold(self) -> float | None:
        """None where nothing is fetched."""
        return self.balancing_threshold if self.mode == "kvcache-centric" else None


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """What is to be placed: a prompt that may grow by `max_tokens`, with no part of it on a worker in `exclude`."""

    num_prompt_tokens: int
    max_tokens: int
    exclude: tuple[str, ...] = ()
    fetch_factor: float = 1.0  # of the time that fetching KV takes: below 1 at a lower precision
    priority: int = 0  # smaller goes first
    least_tokens: int = 0  # that the answer will have
    targets: AdmissionTargets = NO_TARGETS  # that it should meet where it can

    @property
    def judged_targets(self) -> AdmissionTargets:
        """One token has no gap."""
        return self.targets if self.max_tokens > 1 else replace(self.targets, tbt_s=None)


def place(
    view: ClusterView,
    request: PlacementRequest,
    rules: PlacementRules,
    now_s: float,
    rng: random.Random,
    depths: NDArray[np.int64] = NOTHING_CACHED,
    loads_at: Callable[[float], DecodeLoads] | None = None,
    ranked_by: TtftPrediction | None = None,
    exactly: Callable[[Placement], Placement] | None = None,
    load_at: Callable[[int, float], DecodeLoad] | None = None,
) -> Placement:
    """The best placement. `depths` is `BlockIndex.match` of the prompt; `loads_at` predicts decode loads at a moment,
    `load_at` that of one row.
    `ranked_by` is the prediction for this request where somebody made it already; `exactly` says what the prefill of
    the chosen worker takes, before the decode worker for that moment is looked for. Ranking knows nothing of busy
    neighbours, `exactly` does: where it says that they cost more than another host would, it goes there.

    A decode worker with room for the prompt now goes before one without. Of workers that predict the same, chance
    takes one, so that equal workers share the load; of those that do both halves the one with the lighter load, before
    that. Without `loads_at` the present loads count. Raises Unavailable when a half is missing (now) and
    ContextLengthExceeded when no present worker can ever hold the request.
    """
    rows, num_tokens = _candidates(view, request), request.num_prompt_tokens
    ttft = ranked_by or predict_ttft(view, num_tokens, depths, now_s, rules.fetching_threshold, request.fetch_factor)
    ranking = Ranking(view, rules.mode, num_tokens, request.judged_targets)
    loads_at = loads_at or (lambda at_s: _present_loads(view))
    if np.logical_or.reduce(rows.both):
        begins_s = now_s + float(np.minimum.reduce(ttft.seconds[rows.prefill | rows.both]))
        prefill = ranking.best_of_any(ttft, loads_at(begins_s), rows.prefill, rows.decode, rows.both, rng)
    else:
        prefill = ranking.best_prefill(ttft, rows.prefill, rng)
    chosen = _prefilled(view, prefill, ttft)
    if exactly:
        chosen = exactly(chosen)
        elsewhere = None if chosen.prefill.contention <= 0 else ranking.best_elsewhere(ttft, rows.prefill, prefill, rng)
        if elsewhere is not None and ttft.seconds[elsewhere] < chosen.ttft_s - chosen.overhead_s:
            other = exactly(_prefilled(view, elsewhere, ttft))
            prefill, chosen = (elsewhere, other) if other.ttft_s < chosen.ttft_s else (prefill, chosen)
    begins_s = now_s + chosen.ttft_s
    if rows.both[prefill] and load_at:
        decode, load = prefill, load_at(prefill, begins_s)
    else:
        loads = loads_at(begins_s)
        decode = prefill if rows.both[prefill] else ranking.best_decode(loads, rows.decode, rng)
        load = DecodeLoad(float(loads.batch[decode]), float(loads.context_tokens[decode]))
    worker = view.worker(decode)
    tbt_s = worker.step_model.seconds(load.batch + 1, load.context_tokens + num_tokens)
    return replace(chosen, decode=worker, tbt_s=tbt_s)


def _prefilled(view: ClusterView, row: int, ttft: TtftPrediction) -> Placement:
    """On one worker so far."""
    worker = view.worker(row)
    return Placement(
        worker,
        worker,
        float(ttft.seconds[row]),
        cached_tokens=int(ttft.cached_tokens[row]),
        fetched_tokens=int(ttft.fetched_tokens[row]),
        queue_s=float(ttft.queue_s[row]),
        work_s=float(ttft.seconds[row] - ttft.queue_s[row]),
        ranked_by=ttft,
    )


def decodes_more(view: ClusterView, num_tokens: int, fewer_tokens: int) -> bool:
    """Whether somebody who decodes can hold `fewer_tokens`, prompt and answer, and not `num_tokens`."""
    capacity, num_rows = view.column("capacity_tokens"), view.num_rows
    decodes = view.can_decode[:num_rows] | view.can_do_both[:num_rows]
    return bool((decodes & (capacity >= fewer_tokens) & (capacity < num_tokens)).any())


def _candidates(view: ClusterView, request: PlacementRequest) -> RoleMasks:
    known = view.roster
    num_most = request.num_prompt_tokens + max(request.max_tokens, 1)
    if num_most <= known.least_capacity_tokens and known.is_complete and not request.exclude:  # most often
        return known.useful
    present, capacity = known.present, view.column("capacity_tokens")
    holds_prompt = capacity >= request.num_prompt_tokens + 1
    holds_all = capacity >= request.num_prompt_tokens + request.max_tokens
    fitting = RoleMasks(present.prefill & holds_prompt, present.decode & holds_all, present.both & holds_all)
    if not fitting.is_any:
        if view.missing:
            raise Unavailable(f"no {' and no '.join(view.missing)} is ready", retry_after_ms=_RETRY_AFTER_MS)
        raise ContextLengthExceeded(
            f"{request.num_prompt_tokens} tokens of prompt and {request.max_tokens} of output are more than any "
            f"worker can hold: together at most {_most(present, capacity)} tokens fit"
        )
    left = _without(fitting, view.rows_of(request.exclude)) if request.exclude else fitting
    return left.useful


def _without(fitting: RoleMasks, rows: list[int]) -> RoleMasks:
    allowed = np.ones(len(fitting.both), dtype=np.bool_)
    allowed[rows] = False
    left = RoleMasks(fitting.prefill & allowed, fitting.decode & allowed, fitting.both & allowed)
    if not left.is_any:
        raise Unavailable("every worker that could serve the request refused it", retry_after_ms=_RETRY_AFTER_MS)
    return left


def _most(present: RoleMasks, capacity: Floats) -> int:
    """The longest sequence that any pair holds."""
    prefill, decode, both = (float(capacity[rows].max(initial=0.0)) for rows in present)
    return int(max(min(prefill, decode), both))


def _present_loads(view: ClusterView) -> DecodeLoads:
    return DecodeLoads(view.column("num_requests"), view.column("context_in_use_tokens"))
