"""Estimated goodput of many layouts, without policies, which rules out most of them early."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace

from halfmoon.plan.layout import Layout, WorkerKind
from halfmoon.plan.layout_trial import layout_trial
from halfmoon.plan.problem import PlanningProblem
from halfmoon.plan.search.evaluation import estimated_per_s
from halfmoon.plan.search.objective import loss, worth_at
from halfmoon.sim.latency_sources.latency_model import LatencyModel

_AT_ONCE = 8  # fixed, so that plans do not depend on the number of cores


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout with its estimated goodput, and a rate that it cannot exceed, in requests per second."""

    layout: Layout
    guess_per_s: float
    bound_per_s: float


class Estimates:
    """Owns the estimates, and their ratio to what the phases alone promised. Knows nothing of policies."""

    def __init__(
        self,
        problem: PlanningProblem,
        models: Mapping[WorkerKind, LatencyModel],
        pool: Executor,
        num: int,
        margin: float,
    ) -> None:
        """Looks for the `num` best layouts. A layout exceeds its phases' promise by at most `margin`, after correction
        by the last layout of its kind.
        """
        self._problem = problem
        self._models = models
        self._pool = pool
        self._num = num
        self._margin = margin
        self._found: list[Candidate] = []
        self._kept = {False: 1.0, True: 1.0}  # of the phases' promise, by `is_colocated`

    def of(self, candidates: Iterable[Candidate], on_estimated: Callable[[int, int], None]) -> list[Candidate]:
        """Candidates that may be among the best of all or the best of their kind, with estimates as guesses."""
        waiting = list(candidates)
        total = len(waiting)
        while waiting:
            remaining = [item for item in waiting if self._may_be_better(item)]
            wave, waiting = remaining[:_AT_ONCE], remaining[_AT_ONCE:]
            self._estimate(wave)
            on_estimated(total - len(waiting), total)
        return sorted(self._found, key=self._rank)

    def _may_be_better(self, candidate: Candidate) -> bool:
        most_per_s = min(candidate.bound_per_s, self._margin * self._promised_per_s(candidate))
        return worth_at(self._problem, candidate.layout, most_per_s) > self._floor(candidate)

    def _promised_per_s(self, candidate: Candidate) -> float:
        return candidate.guess_per_s * self._kept[candidate.layout.is_colocated]

    def _floor(self, candidate: Candidate) -> float:
        """The worth that a candidate must exceed."""
        worths = sorted(map(self._worth, self._found), reverse=True)
        mine = [self._worth(each) for each in self._found if each.layout.is_colocated == candidate.layout.is_colocated]
        return min(worths[self._num - 1], max(mine)) if len(worths) >= self._num and mine else 0.0

    def _estimate(self, wave: Sequence[Candidate]) -> None:
        layouts = [candidate.layout for candidate in wave]
        leasts = [
            self._floor(one) * self._problem.cost(layout) * loss(layout)
            for one, layout in zip(wave, layouts, strict=True)
        ]
        estimates = self._pool.map(
            estimated_per_s,
            [layout_trial(self._problem, self._models, layout) for layout in layouts],
            map(self._promised_per_s, wave),
            [layout.num_units for layout in layouts],
            leasts,
        )
        for one, estimate_per_s in zip(wave, list(estimates), strict=True):
            if estimate_per_s is not None:
                self._found.append(replace(one, guess_per_s=estimate_per_s))
                self._kept[one.layout.is_colocated] = estimate_per_s / one.guess_per_s

    def _worth(self, candidate: Candidate) -> float:
        return worth_at(self._problem, candidate.layout, candidate.guess_per_s)

    def _rank(self, candidate: Candidate) -> tuple[float, int]:
        return -self._worth(candidate), candidate.layout.num_gpus
