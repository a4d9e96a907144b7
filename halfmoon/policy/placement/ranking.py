"""Cost of each worker for one prompt, and the choice among the cheapest, for each placement mode."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from halfmoon.policy.forecast.handover import HandoverPrediction
from halfmoon.policy.forecast.ttft import prefill_seconds
from halfmoon.policy.models.latency import Floats
from halfmoon.policy.values import (
    AdmissionTargets,
    DecodeLoads,
    DecodeReason,
    PlacementRequest,
    PrefillReason,
    TtftPrediction,
)
from halfmoon.policy.view.capabilities import Bools
from halfmoon.policy.view.cluster_view import ClusterView

PlacementMode = Literal["kvcache-centric", "cache-aware", "least-loaded", "random"]

PREDICTING_MODES: tuple[PlacementMode, ...] = ("kvcache-centric", "cache-aware")
"""Modes that rank workers by predicted TTFT."""

_TIE = 1.01  # predictions within a hundredth are ties: equal workers have slightly different models
_MOST = 0.5  # of the prompt: less than that is a shared beginning, not a conversation
_LEARNING_ERROR = 1.15  # two equal workers of one host were measured at 0.23 and 0.26 s per prompt, 13 % apart


class DecodeChoice(NamedTuple):
    """A decode worker, and what speaks for it."""

    row: int
    reason: DecodeReason


@dataclass(frozen=True, slots=True)
class Ranking:
    """Costs of one prompt, with an entry for each row of the view.

    Where costs are predictions, workers that meet the targets come first, and workers that decode at about the same
    learned speed count as equally fast.
    """

    view: ClusterView
    mode: PlacementMode
    request: PlacementRequest

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt."""
        return self.request.num_prompt_tokens

    @property
    def targets(self) -> AdmissionTargets:
        """The targets that apply."""
        return self.request.applicable_targets

    def best_prefill(self, ttft: TtftPrediction, rows: Bools, rng: random.Random) -> int:
        """Chooses among the rows that compute the prompt and hand it over."""
        return least(self._prefill_cost(ttft), rows, rng)

    def why_prefill(self, ttft: TtftPrediction, rows: Bools, row: int) -> PrefillReason:
        """Names what speaks for `row`, the best of `rows`: what it has or loads of the prompt, or else its queue."""
        if np.count_nonzero(rows) == 1:
            return "only"
        if self.mode == "random":
            return "random"
        if self.mode == "least-loaded" or not self.view.capabilities.knows_prefills:
            return "least_loaded"
        cached, queue_s = ttft.cached_tokens, ttft.queue_s
        if ttft.fetched_tokens[row] > cached[row]:
            return "loaded"
        if cached[row] > np.minimum.reduce(cached[rows]):
            return "cached"
        return "shortest_queue" if queue_s[row] < np.maximum.reduce(queue_s[rows]) else "least_ttft"

    def best_elsewhere(self, ttft: TtftPrediction, rows: Bools, row: int, rng: random.Random) -> int | None:
        """Chooses among those rows on other hosts than `row`.

        None if there is none, if `row` is not one of `rows`, or if the mode does not use predictions.
        """
        cost, hosts = self._prefill_cost(ttft), self.view.hosts[: self.view.num_rows]
        others = rows & (hosts != hosts[row])
        is_wanted = cost is ttft.seconds and rows[row] and np.logical_or.reduce(others)
        return least(cost, others, rng) if is_wanted else None

    def best_decode(
        self, loads: DecodeLoads, handover: HandoverPrediction, rows: Bools, rng: random.Random
    ) -> DecodeChoice:
        """Chooses among the rows that decode prompts of other workers, preferring those with room for this one now.

        The hand-over counts as a part of the gaps of the answer. A row that has most of the prompt keeps the
        conversation while no other is clearly better (`stays`); of rows about equally good, the one that has most is
        chosen (`most_held`).
        """
        reason: DecodeReason = "only" if np.count_nonzero(rows) == 1 else "least_cost"
        tbt_s = predict_tbt(self.view, loads, self.request.context_tokens())
        cost = self._decode_cost(tbt_s, loads)
        rows = self._with_room(rows)
        if cost is tbt_s:
            rows = _preferring(rows, _within(tbt_s, self.targets.tbt_s))
            known = self.view.capabilities
            cost = cost if known.is_one_step_time_of_decode else self._with_step_time_ties(tbt_s, rows)
            cost = cost + handover.exposed_s / self.request.num_gaps
        if self.mode in ("least-loaded", "random"):
            return DecodeChoice(least(cost, rows, rng), "random" if self.mode == "random" else "least_loaded")
        held = handover.held_tokens
        stays = rows & (held >= _MOST * self.num_tokens) & (cost <= np.minimum.reduce(cost[rows]) * _LEARNING_ERROR)
        if np.logical_or.reduce(stays):
            rows, cost, reason = stays, -held, "only" if reason == "only" else "stays"
        cheapest = _about_least(cost, rows)
        most = cheapest[held[cheapest] == np.maximum.reduce(held[cheapest])]
        if len(most) < len(cheapest) and reason == "least_cost":
            reason = "most_held"
        return DecodeChoice(int(most[rng.randrange(len(most))]), reason)

    def best_of_any(
        self, ttft: TtftPrediction, loads: DecodeLoads, prefill: Bools, decode: Bools, both: Bools, rng: random.Random
    ) -> int:
        """Chooses the row for the prompt where rows of `both` would keep the request.

        The TBT of a row of `both` is its own, that of a row of `prefill` is that of the best decode worker. TBT breaks
        ties of TTFT.
        """
        known, tbt_s = self.view.capabilities, predict_tbt(self.view, loads, self.request.context_tokens())
        cost, weight, rows = self._prefill_cost(ttft), self._decode_cost(tbt_s, loads), prefill | both
        if cost is ttft.seconds:
            cost = cost if known.is_one_speed else with_speed_ties(cost, self._uncached_prefill_s(), both)
            answer_tbt_s = _decode_of_each(tbt_s, decode, both)
            in_time = _within(ttft.seconds, self.targets.ttft_s) & _within(answer_tbt_s, self.targets.tbt_s)
            rows = _preferring(rows, in_time)
        if weight is tbt_s:
            weight = weight if known.is_one_step_time_of_both else self._with_step_time_ties(tbt_s, both)
        cheapest = np.zeros_like(rows)
        cheapest[_about_least(cost, rows)] = True
        return least(_decode_of_each(weight, decode, both), cheapest, rng)

    def _prefill_cost(self, ttft: TtftPrediction) -> Floats:
        if self.mode == "random":
            return np.zeros(self.view.num_rows)
        waiting = self.view.column("waiting_prefill_tokens")
        if self.mode == "least-loaded":
            return waiting
        if not self.view.capabilities.knows_prefills:
            return waiting - ttft.cached_tokens
        return ttft.seconds

    def _decode_cost(self, tbt_s: Floats, loads: DecodeLoads) -> Floats:
        if self.mode == "random":
            return np.zeros(self.view.num_rows)
        if self.mode == "least-loaded" or not self.view.capabilities.knows_steps:
            return loads.batch
        return tbt_s

    def _uncached_prefill_s(self) -> Floats:
        """Seconds to compute the whole prompt on each row."""
        return prefill_seconds(
            self.view, np.zeros(self.view.num_rows), float(self.num_tokens), self.request.most_seen.prompt
        )

    def _with_step_time_ties(self, tbt_s: Floats, rows: Bools) -> Floats:
        idle = np.zeros(self.view.num_rows)
        alone_s = predict_tbt(self.view, DecodeLoads(idle, idle), self.request.context_tokens())
        return with_speed_ties(tbt_s, alone_s, rows)

    def _with_room(self, rows: Bools) -> Bools:
        """Rows with free memory for the prompt, as far as it is kept, and a token; all rows if none has it, since one
        may by then.
        """
        free_tokens = self.view.column("free_blocks") * self.view.column("block_tokens")
        return _preferring(rows, free_tokens >= self.request.context_tokens() + 1)


def predict_tbt(view: ClusterView, loads: DecodeLoads, context_tokens: float) -> Floats:
    """Seconds of a decode step [num_rows] with one more request, of which it sees `context_tokens`."""
    d, e, f = view.step_coefficients[: view.num_rows].T
    seconds: Floats = d + e * (loads.batch + 1) + f * (loads.context_tokens + context_tokens)
    return seconds


def with_speed_ties(cost: Floats, unloaded_s: Floats, rows: Bools) -> Floats:
    """`cost`, with those of `rows` about as fast as the cheapest of them charged at its speed.

    Learned models of equal machines differ by more than the machines do; the one that seems faster would get nearly
    all requests. `unloaded_s` is the time of each idle row for the same work, 0 where unknown.
    """
    among = rows.nonzero()[0]
    among_s = unloaded_s[among]
    if np.logical_and.reduce(among_s == among_s[0]):  # the common case: equal models need no correction
        return cost
    best_s = among_s[np.argmin(cost[among])]
    ratio = np.divide(unloaded_s, best_s, out=np.zeros_like(unloaded_s), where=rows & (best_s > 0))
    is_tie = (ratio <= _LEARNING_ERROR) & (ratio >= 1 / _LEARNING_ERROR)
    tied: Floats = np.divide(cost, ratio, out=cost.copy(), where=is_tie)
    return tied


def least(cost: Floats, rows: Bools, rng: random.Random) -> int:
    """A random one of the rows with about the least cost."""
    cheapest = _about_least(cost, rows)
    return int(cheapest[rng.randrange(len(cheapest))])


def _about_least(cost: Floats, rows: Bools) -> NDArray[np.int64]:
    among = rows.nonzero()[0]
    costs = cost[among]
    least = np.minimum.reduce(costs)
    cheapest: NDArray[np.int64] = among[costs <= least + abs(least) * (_TIE - 1)]
    return cheapest


def _decode_of_each(decode: Floats, decoding: Bools, both: Bools) -> Floats:
    """Decode cost of a request by the row of its prefill: a row of `both` decodes itself, others hand over."""
    elsewhere = np.minimum.reduce(decode[decoding], initial=np.inf)
    return np.where(both, decode, elsewhere)


def _preferring(rows: Bools, wanted: Bools) -> Bools:
    """The rows that are wanted; all of them if none is."""
    preferred = rows & wanted
    return preferred if np.logical_or.reduce(preferred) else rows


def _within(seconds: Floats, target_s: float | None) -> Bools:
    return np.ones(len(seconds), dtype=np.bool_) if target_s is None else seconds <= target_s
