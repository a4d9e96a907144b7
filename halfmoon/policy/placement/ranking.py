"""What workers are ranked by for one prompt, and who is taken of the best: as each placement mode has it."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from halfmoon.policy.admission.feedback import AdmissionTargets
from halfmoon.policy.forecast.decode_forecast import DecodeLoads
from halfmoon.policy.models.latency import Floats
from halfmoon.policy.placement.speed_ties import with_speed_ties
from halfmoon.policy.placement.ttft import TtftPrediction, prefill_seconds
from halfmoon.policy.view.capabilities import Bools
from halfmoon.policy.view.cluster_view import ClusterView

PlacementMode = Literal["kvcache-centric", "cache-aware", "least-loaded", "random"]

_TIE = 1.01  # predictions that differ by a hundredth do not differ: equal workers have slightly different models


@dataclass(frozen=True, slots=True)
class Ranking:
    """The costs of one prompt: an entry for each row of the view.

    Where they are predictions, who meets the targets goes first, and workers that decode and are believed to be of
    about one speed are of one.
    """

    view: ClusterView
    mode: PlacementMode
    num_tokens: int  # of the prompt
    targets: AdmissionTargets

    def best_prefill(self, ttft: TtftPrediction, rows: Bools, rng: random.Random) -> int:
        """Of the rows that compute the prompt and hand it over."""
        return _least(self._prefill_cost(ttft), rows, rng)

    def best_elsewhere(self, ttft: TtftPrediction, rows: Bools, row: int, rng: random.Random) -> int | None:
        """Of those rows on other hosts than that of `row`, unless it does both halves, or the mode asks no predictions;
        None where there is none."""
        cost, hosts = self._prefill_cost(ttft), self.view.hosts[: self.view.num_rows]
        others = rows & (hosts != hosts[row])
        is_wanted = cost is ttft.seconds and rows[row] and np.logical_or.reduce(others)
        return _least(cost, others, rng) if is_wanted else None

    def best_decode(self, loads: DecodeLoads, rows: Bools, rng: random.Random) -> int:
        """Of the rows that decode what others computed; of those with room for the prompt now, where there are any."""
        tbt_s = predict_tbt(self.view, loads, self.num_tokens)
        cost = self._decode_cost(tbt_s, loads)
        rows = self._with_room(rows)
        if cost is tbt_s:
            rows = _among(rows, _within(tbt_s, self.targets.tbt_s))
            known = self.view.roster
            cost = cost if known.is_one_step_time_of_decode else self._at_one_step_time(tbt_s, rows)
        return _least(cost, rows, rng)

    def best_of_any(
        self, ttft: TtftPrediction, loads: DecodeLoads, prefill: Bools, decode: Bools, both: Bools, rng: random.Random
    ) -> int:
        """The row for the prompt where those of `both` would keep the request: their TBT is known with it, that of
        `prefill` is the best decode worker's. Of about equal TTFTs the least TBT counts."""
        known, tbt_s = self.view.roster, predict_tbt(self.view, loads, self.num_tokens)
        cost, weight, rows = self._prefill_cost(ttft), self._decode_cost(tbt_s, loads), prefill | both
        if cost is ttft.seconds:
            cost = cost if known.is_one_speed else with_speed_ties(cost, self._prefill_s(), both)
            elsewhere_s = _of_request(tbt_s, decode, both)
            in_time = _within(ttft.seconds, self.targets.ttft_s) & _within(elsewhere_s, self.targets.tbt_s)
            rows = _among(rows, in_time)
        if weight is tbt_s:
            weight = weight if known.is_one_step_time_of_both else self._at_one_step_time(tbt_s, both)
        equal = np.zeros_like(rows)
        equal[_about_least(cost, rows)] = True
        return _least(_of_request(weight, decode, both), equal, rng)

    def _prefill_cost(self, ttft: TtftPrediction) -> Floats:
        if self.mode == "random":
            return np.zeros(self.view.num_rows)
        waiting = self.view.column("waiting_prefill_tokens")
        if self.mode == "least-loaded":
            return waiting
        if not self.view.roster.knows_prefills:  # nothing is known of anybody's speed
            return waiting - ttft.cached_tokens
        return ttft.seconds

    def _decode_cost(self, tbt_s: Floats, loads: DecodeLoads) -> Floats:
        if self.mode == "random":
            return np.zeros(self.view.num_rows)
        if self.mode == "least-loaded" or not self.view.roster.knows_steps:
            return loads.batch
        return tbt_s

    def _prefill_s(self) -> Floats:
        """Of the prompt where nothing of it is cached."""
        return prefill_seconds(self.view, np.zeros(self.view.num_rows), float(self.num_tokens))

    def _at_one_step_time(self, tbt_s: Floats, rows: Bools) -> Floats:
        nobody = np.zeros(self.view.num_rows)
        return with_speed_ties(tbt_s, predict_tbt(self.view, DecodeLoads(nobody, nobody), self.num_tokens), rows)

    def _with_room(self, rows: Bools) -> Bools:
        """For the prompt and a token; where nobody has it one may by then."""
        free_tokens = self.view.column("free_blocks") * self.view.column("block_tokens")
        return _among(rows, free_tokens >= self.num_tokens + 1)


def predict_tbt(view: ClusterView, loads: DecodeLoads, num_prompt_tokens: int) -> Floats:
    """Seconds of a step of each row with one more request of so many tokens."""
    d, e, f = view.step_coefficients[: view.num_rows].T
    seconds: Floats = d + e * (loads.batch + 1) + f * (loads.context_tokens + num_prompt_tokens)
    return seconds


def _least(cost: Floats, rows: Bools, rng: random.Random) -> int:
    """One of the rows that cost about the least."""
    equal = _about_least(cost, rows)
    return int(equal[rng.randrange(len(equal))])


def _about_least(cost: Floats, rows: Bools) -> NDArray[np.int64]:
    among = rows.nonzero()[0]
    costs = cost[among]
    cheapest = np.minimum.reduce(costs)
    equal: NDArray[np.int64] = among[costs <= cheapest + abs(cheapest) * (_TIE - 1)]
    return equal


def _of_request(decode: Floats, decoding: Bools, both: Bools) -> Floats:
    """What is said of each decode row, for each row that may compute the prompt."""
    elsewhere = np.minimum.reduce(decode[decoding], initial=np.inf)
    return np.where(both, decode, elsewhere)


def _among(rows: Bools, wanted: Bools) -> Bools:
    """Those of the rows that are wanted; all of them when there are none."""
    found = rows & wanted
    return found if np.logical_or.reduce(found) else rows


def _within(seconds: Floats, target_s: float | None) -> Bools:
    return np.ones(len(seconds), dtype=np.bool_) if target_s is None else seconds <= target_s
