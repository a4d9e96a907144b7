"""The layouts with the most goodput per cost: the most promising first, without those that bounds or better ones rule
out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from itertools import product

from halfmoon.plan.layout import WorkerKind, first_of_each_kind
from halfmoon.plan.layout_trial import layout_trial
from halfmoon.plan.problem import PlanningProblem
from halfmoon.plan.search.combinations import Combination, Kinds, combinations, kinds_of, with_codecs
from halfmoon.plan.search.estimates import Candidate, Estimates
from halfmoon.plan.search.evaluation import estimated_per_s, held_goodput, verified_per_s
from halfmoon.plan.search.feasible import Option
from halfmoon.plan.search.goodput import ESTIMATES_EXCEEDED
from halfmoon.plan.search.objective import DEGREE_GAIN, Rated, loss, rank, worth, worth_at
from halfmoon.plan.search.phases import Phase, measured_phase, promised_per_s
from halfmoon.sim.latency_sources.latency_model import LatencyModel

_WAVE = 3  # simulated at once; fixed, so that plans do not depend on the number of cores
_MOST_WORKERS = 8  # of a role; larger numbers repeat the ratio
_MARGIN = 1.15  # by which a layout may exceed its phases' promise, corrected by earlier layouts
_TOLERANCE = 1.06


class GoodputSearch:
    """Owns what is known of one problem's layouts: the goodput of phases alone, and of whole layouts. Knows nothing of
    given rates.
    """

    def __init__(
        self,
        problem: PlanningProblem,
        models: Mapping[WorkerKind, LatencyModel],
        options: Sequence[Option],
        pool: Executor,
        on_measured: Callable[[int], None],
    ) -> None:
        self._problem = problem
        self._models = models
        self._pool = pool
        self._phases = self._measured(options, on_measured)
        self._kept = {False: 1.0, True: 1.0}  # of the phases' promise, by `is_colocated`
        self._margin = math.inf if problem.is_thorough or problem.kept_share else _MARGIN
        self.num_simulated = self.num_ruled_out = 0

    @property
    def combinations(self) -> list[Combination]:
        """Combinations whose phases each sustain some rate."""
        return list(combinations(self._problem, list(self._phases)))

    @property
    def has_estimates(self) -> bool:
        """Whether estimates may rule layouts out."""
        problem = self._problem
        return not problem.is_thorough and not problem.kept_share and problem.workload.prefixes is None

    def search_by_estimates(
        self, among: Sequence[Combination], num: int, on_simulated: Callable[[int, int], None]
    ) -> list[Rated]:
        """The `num` best layouts by estimates, with the best of either kind, and any that may be better than those."""
        ordered = self._ordered(among)
        estimates = Estimates(self._problem, self._models, self._pool, num, self._margin)
        remaining = estimates.of(ordered, lambda done, total: on_simulated(done // 2, total))
        self.num_ruled_out = len(ordered) - len(remaining)
        first = first_of_each_kind(remaining, lambda one: one.layout).values()
        others = [candidate for candidate in remaining if candidate not in first]
        wave = [*first, *others[: num - len(first)]]
        rated: list[Rated] = []
        while wave:
            trials = [layout_trial(self._problem, self._models, candidate.layout) for candidate in wave]
            guesses = [verified_per_s(trial, one.guess_per_s) for trial, one in zip(trials, wave, strict=True)]
            rated += self._rated(wave, [0.0] * len(wave), guesses, guesses)
            others = [other for other in others if other not in wave and self._may_be_best_of_kind(other, rated)]
            wave = others[:_WAVE]
        on_simulated(len(ordered), len(ordered))
        return rated

    def _may_be_best_of_kind(self, candidate: Candidate, rated: Sequence[Rated]) -> bool:
        same = [self._worth(each) for each in rated if each.layout.is_colocated == candidate.layout.is_colocated]
        return worth_at(self._problem, candidate.layout, ESTIMATES_EXCEEDED * candidate.guess_per_s) > max(
            same, default=0.0
        )

    def found(
        self, among: Sequence[Combination], num: int, others: Sequence[Rated], on_simulated: Callable[[int, int], None]
    ) -> list[Rated]:
        """The best layout of each combination that is among the `num` best of all, `others` included, and the best
        one.
        """
        ordered = self._ordered(among)
        best: dict[Kinds, Rated] = {}
        waiting = list(ordered)
        while waiting:
            least = self._least_worth([*best.values(), *others], list(best.values()), num)
            wave, waiting = self._wave(waiting, best, least)
            floors = [max(least, self._worth(best.get(kinds_of(candidate.layout)))) for candidate in wave]
            for rated in self._rated(wave, floors, self._guesses(wave), [math.inf] * len(wave)):
                leader = best.get(kinds_of(rated.layout))
                if leader is None or rank(self._problem, rated) < rank(self._problem, leader):
                    best[kinds_of(rated.layout)] = rated
            on_simulated(len(ordered) - len(waiting), len(ordered))
        return sorted(best.values(), key=lambda one: rank(self._problem, one))

    def _wave(
        self, waiting: Sequence[Candidate], best: Mapping[Kinds, Rated], least: float
    ) -> tuple[list[Candidate], list[Candidate]]:
        """The next few candidates of different combinations that may improve on the results, and the candidates still
        waiting.
        """
        wave: dict[Kinds, Candidate] = {}
        left: list[Candidate] = []
        for item in waiting:
            kinds = kinds_of(item.layout)
            floor = max(least, self._worth(best.get(kinds)))
            most_per_s = min(item.bound_per_s, self._margin * self._promised(item))
            if worth_at(self._problem, item.layout, most_per_s) <= floor:
                self.num_ruled_out += 1
            elif kinds in wave or len(wave) == _WAVE:
                left.append(item)
            else:
                wave[kinds] = item
        return list(wave.values()), left

    def _promised(self, candidate: Candidate) -> float:
        """The phases' promise, corrected by the last layout of its kind."""
        return candidate.guess_per_s * self._kept[candidate.layout.is_colocated]

    def _guesses(self, wave: Sequence[Candidate]) -> list[float]:
        """Guesses for the goodput search: estimates for layouts with a choice of routes, promises for others."""
        layouts = [candidate.layout for candidate in wave]
        trials = [layout_trial(self._problem, self._models, layout) for layout in layouts]
        promised = [self._promised(candidate) for candidate in wave]
        to_estimate = [at for at, trial in enumerate(trials) if not trial.has_single_route]
        units = [layouts[at].num_units for at in to_estimate]
        result = self._pool.map(
            estimated_per_s, [trials[at] for at in to_estimate], [promised[at] for at in to_estimate], units
        )
        estimated = dict(zip(to_estimate, result, strict=True))
        return [estimated.get(at) or guess_per_s for at, guess_per_s in enumerate(promised)]

    def _rated(
        self,
        wave: Sequence[Candidate],
        floors: Sequence[float],
        guesses: Sequence[float],
        maxima: Sequence[float],
    ) -> Iterator[Rated]:
        """The goodput of candidates with policies, searched from the guesses on."""
        problem = self._problem
        self.num_simulated += len(wave)
        layouts = [candidate.layout for candidate in wave]
        trials = [layout_trial(problem, self._models, layout) for layout in layouts]
        num = len(wave)
        result = self._pool.map(
            held_goodput,
            trials,
            guesses,
            [layout.num_units for layout in layouts],
            [problem.num_first] * num,
            [_TOLERANCE] * num,
            [floor * problem.cost(one) * loss(one) for one, floor in zip(layouts, floors, strict=True)],
            maxima,
        )
        for one, bisection in zip(wave, result, strict=True):
            if bisection is not None:
                yield Rated(one.layout, bisection.value, one.layout.price_per_hour(problem.fleet), bisection.result)
                self._kept[one.layout.is_colocated] = bisection.value / one.guess_per_s

    def _least_worth(self, everyone: Sequence[Rated], mine: Sequence[Rated], num: int) -> float:
        """The worth that a layout must exceed to be among the `num` best of all, or the best of its kind.

        Unless the search is thorough, only the best of its kind counts.
        """
        if mine and not self._problem.is_thorough:
            return max(map(self._worth, mine))
        if len(everyone) < num or not mine:
            return 0.0
        everyone = sorted(everyone, key=lambda one: rank(self._problem, one))
        return min(self._worth(everyone[num - 1]), max(map(self._worth, mine)))

    def _worth(self, rated: Rated | None) -> float:
        return 0.0 if rated is None else worth(self._problem, rated)

    def _promise(self, candidate: Candidate) -> tuple[float, ...]:
        return (-worth_at(self._problem, candidate.layout, candidate.guess_per_s), candidate.layout.num_gpus)

    def _ordered(self, among: Sequence[Combination]) -> list[Candidate]:
        """Candidates, the most promising first."""
        return sorted((each for combination in among for each in self._candidates(combination)), key=self._promise)

    def _candidates(self, combination: Combination) -> list[Candidate]:
        """All numbers of workers that fit. Unless the search is thorough, only the most promising ones."""
        problem = self._problem
        phases = [self._phases[option] for option in combination.options]
        most = [min(problem.fleet.num_gpus // option.kind.num_devices, _MOST_WORKERS) for option in combination.options]
        result = []
        least = [option.degree for option in combination.options]
        for nums in product(*(range(one, num + 1) for one, num in zip(least, most, strict=True))):
            layout = combination.layout(nums)
            if layout.fits(problem.fleet):
                result.append(Candidate(layout, *promised_per_s(problem, self._models, phases, nums)))
        result.sort(key=self._promise)
        model = self._models[combination.options[0].kind]
        return [
            replace(each, layout=layout)
            for each in (result if problem.is_thorough else result[:1])
            for layout in with_codecs(problem, model, each.layout, each.guess_per_s)
        ]

    def _measured(self, options: Sequence[Option], on_measured: Callable[[int], None]) -> dict[Option, Phase]:
        num, result = len(options), dict[Option, Phase]()
        phases = self._pool.map(measured_phase, [self._problem] * num, [self._models] * num, options)
        for phase in phases:
            on_measured(1)
            option, degree = phase.option, phase.option.degree  # those of one kind come in the order of their degrees
            same = (other for one, other in result.items() if (one.role, one.kind) == (option.role, option.kind))
            least_per_s = DEGREE_GAIN * max((other.guess_per_s(degree) for other in same), default=0.0)
            if degree * phase.alone_per_s > least_per_s:
                result[option] = phase
        return result
