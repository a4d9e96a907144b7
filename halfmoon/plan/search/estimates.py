"""What many layouts hold for their cost, without policies: those that are not among the best are ruled out early."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace

from halfmoon.plan.layout import WorkerKind
from halfmoon.plan.layout_trial import layout_trial
from halfmoon.plan.problem import PlanningProblem
from halfmoon.plan.search.candidate import Candidate
from halfmoon.plan.search.held_goodput import estimated_per_s
from halfmoon.plan.search.objective import loss, worth_at
from halfmoon.sim.latency_sources.latency_model import LatencyModel

_AT_ONCE = 8  # fixed, so that plans do not depend on the number of cores


class Estimates:
    """Owns what layouts are estimated to hold, and how that compares with what their halves promised."""

    def __init__(
        self,
        question: PlanningProblem,
        known: Mapping[WorkerKind, LatencyModel],
        pool: Executor,
        num: int,
        margin: float,
    ) -> None:
        """Of the `num` best. A layout exceeds by `margin` at most what its halves promise, corrected by what those of
        its kind before it came to."""
        self._question = question
        self._known = known
        self._pool = pool
        self._num = num
        self._margin = margin
        self._found: list[Candidate] = []
        self._kept = {False: 1.0, True: 1.0}  # of what halves promise, by whether workers do both

    def of(self, candidates: Iterable[Candidate], on_estimated: Callable[[int, int], None]) -> list[Candidate]:
        """Those that may be among the best of all, or the best of their kind, each with its estimate as its guess."""
        waiting = list(candidates)
        total = len(waiting)
        while waiting:
            open_ = [one for one in waiting if self._may_be_better(one)]
            wave, waiting = open_[:_AT_ONCE], open_[_AT_ONCE:]
            self._estimate(wave)
            on_estimated(total - len(waiting), total)
        return sorted(self._found, key=self._rank)

    def _may_be_better(self, one: Candidate) -> bool:
        most_per_s = min(one.bound_per_s, self._margin * self._promised_per_s(one))
        return worth_at(self._question, one.layout, most_per_s) > self._floor(one)

    def _promised_per_s(self, one: Candidate) -> float:
        return one.guess_per_s * self._kept[one.layout.is_colocated]

    def _floor(self, one: Candidate) -> float:
        """The worth that it has to exceed."""
        worths = sorted(map(self._worth, self._found), reverse=True)
        mine = [self._worth(each) for each in self._found if each.layout.is_colocated == one.layout.is_colocated]
        return min(worths[self._num - 1], max(mine)) if len(worths) >= self._num and mine else 0.0

    def _estimate(self, wave: Sequence[Candidate]) -> None:
        layouts = [one.layout for one in wave]
        leasts = [
            self._floor(one) * self._question.cost(layout) * loss(layout)
            for one, layout in zip(wave, layouts, strict=True)
        ]
        estimates = self._pool.map(
            estimated_per_s,
            [layout_trial(self._question, self._known, one) for one in layouts],
            map(self._promised_per_s, wave),
            [one.num_units for one in layouts],
            leasts,
        )
        for one, estimate_per_s in zip(wave, list(estimates), strict=True):
            if estimate_per_s is not None:
                self._found.append(replace(one, guess_per_s=estimate_per_s))
                self._kept[one.layout.is_colocated] = estimate_per_s / one.guess_per_s

    def _worth(self, one: Candidate) -> float:
        return worth_at(self._question, one.layout, one.guess_per_s)

    def _rank(self, one: Candidate) -> tuple[float, int]:
        return -self._worth(one), one.layout.num_gpus
