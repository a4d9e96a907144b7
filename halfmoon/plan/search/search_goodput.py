"""The layouts that hold most for their cost: the most promising first, and none that bounds or better ones rule out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from itertools import product

from halfmoon.plan.layout import WorkerKind, first_of_each_kind
from halfmoon.plan.layout_trial import layout_trial
from halfmoon.plan.problem import PlanningProblem
from halfmoon.plan.search.candidate import Candidate
from halfmoon.plan.search.combinations import Combination, Kinds, combinations, kinds_of, with_codecs
from halfmoon.plan.search.estimates import Estimates
from halfmoon.plan.search.feasible import Option
from halfmoon.plan.search.goodput import ESTIMATES_EXCEEDED
from halfmoon.plan.search.held_goodput import estimated_per_s, held_goodput, verified_per_s
from halfmoon.plan.search.objective import Rated, loss, rank, worth, worth_at
from halfmoon.plan.search.phases import Phase, measured_phase
from halfmoon.sim.latency_sources.latency_model import LatencyModel

_WAVE = 3  # simulated at once; fixed, so that plans do not depend on the number of cores
_MOST_WORKERS = 8  # of a role: larger numbers repeat the ratio
_MARGIN = 1.15  # by which a layout may exceed what its halves promise, corrected by what others did
_TOLERANCE = 1.06


class GoodputSearch:
    """Owns what is known of the layouts of one question: what halves hold alone, and what whole layouts do."""

    def __init__(
        self,
        question: PlanningProblem,
        known: Mapping[WorkerKind, LatencyModel],
        options: Sequence[Option],
        pool: Executor,
        on_measured: Callable[[int], None],
    ) -> None:
        self._question = question
        self._known = known
        self._pool = pool
        self._halves = self._measured(options, on_measured)
        self._kept = {False: 1.0, True: 1.0}  # of what halves promise, by whether workers do both
        self._margin = math.inf if question.is_thorough else _MARGIN
        self.num_simulated = self.num_ruled_out = 0

    @property
    def combinations(self) -> list[Combination]:
        """Those whose halves hold something alone."""
        return list(combinations(self._question, list(self._halves)))

    @property
    def has_estimates(self) -> bool:
        """Whether estimates may rule layouts out."""
        return not self._question.is_thorough and self._question.workload.prefixes is None

    def found_by_estimates(
        self, among: Sequence[Combination], num: int, on_simulated: Callable[[int, int], None]
    ) -> list[Rated]:
        """The `num` best by their estimates, the best of either kind among them; and who may be better than that."""
        ordered = self._ordered(among)
        estimates = Estimates(self._question, self._known, self._pool, num, self._margin)
        open_ = estimates.of(ordered, lambda done, total: on_simulated(done // 2, total))
        self.num_ruled_out = len(ordered) - len(open_)
        first = first_of_each_kind(open_, lambda one: one.layout).values()
        others = [one for one in open_ if one not in first]
        wave = [*first, *others[: num - len(first)]]
        rated: list[Rated] = []
        while wave:
            trials = [layout_trial(self._question, self._known, one.layout) for one in wave]
            guesses = [verified_per_s(trial, one.guess_per_s) for trial, one in zip(trials, wave, strict=True)]
            rated += self._rated(wave, [0.0] * len(wave), guesses, guesses)
            others = [one for one in others if one not in wave and self._may_be_best_of_kind(one, rated)]
            wave = others[:_WAVE]
        on_simulated(len(ordered), len(ordered))
        return rated

    def _may_be_best_of_kind(self, one: Candidate, rated: Sequence[Rated]) -> bool:
        same = [self._worth(each) for each in rated if each.layout.is_colocated == one.layout.is_colocated]
        return worth_at(self._question, one.layout, ESTIMATES_EXCEEDED * one.guess_per_s) > max(same, default=0.0)

    def found(
        self, among: Sequence[Combination], num: int, others: Sequence[Rated], on_simulated: Callable[[int, int], None]
    ) -> list[Rated]:
        """The best of each combination that come among the `num` best of all, `others` too; and the best one."""
        ordered = self._ordered(among)
        best: dict[Kinds, Rated] = {}
        waiting = list(ordered)
        while waiting:
            least = self._least_worth([*best.values(), *others], list(best.values()), num)
            wave, waiting = self._wave(waiting, best, least)
            floors = [max(least, self._worth(best.get(kinds_of(one.layout)))) for one in wave]
            for one in self._rated(wave, floors, self._guesses(wave), [math.inf] * len(wave)):
                known = best.get(kinds_of(one.layout))
                if known is None or rank(self._question, one) < rank(self._question, known):
                    best[kinds_of(one.layout)] = one
            on_simulated(len(ordered) - len(waiting), len(ordered))
        return sorted(best.values(), key=lambda one: rank(self._question, one))

    def _wave(
        self, waiting: Sequence[Candidate], best: Mapping[Kinds, Rated], least: float
    ) -> tuple[list[Candidate], list[Candidate]]:
        """The next few, of different combinations, that may be better than what is known; and who is still waiting."""
        wave: dict[Kinds, Candidate] = {}
        left: list[Candidate] = []
        for one in waiting:
            kinds = kinds_of(one.layout)
            floor = max(least, self._worth(best.get(kinds)))
            most_per_s = min(one.bound_per_s, self._margin * self._promised(one))
            if worth_at(self._question, one.layout, most_per_s) <= floor:
                self.num_ruled_out += 1
            elif kinds in wave or len(wave) == _WAVE:
                left.append(one)
            else:
                wave[kinds] = one
        return list(wave.values()), left

    def _promised(self, one: Candidate) -> float:
        """Corrected by what the last layouts of its kind held of what their halves promised."""
        return one.guess_per_s * self._kept[one.layout.is_colocated]

    def _guesses(self, wave: Sequence[Candidate]) -> list[float]:
        """Where policies are asked their edge is looked for from an estimate on."""
        layouts = [one.layout for one in wave]
        trials = [layout_trial(self._question, self._known, one) for one in layouts]
        promised = [self._promised(one) for one in wave]
        asked = [at for at, trial in enumerate(trials) if not trial.is_of_one_way]
        units = [layouts[at].num_units for at in asked]
        found = self._pool.map(estimated_per_s, [trials[at] for at in asked], [promised[at] for at in asked], units)
        estimated = dict(zip(asked, found, strict=True))
        return [estimated.get(at) or guess_per_s for at, guess_per_s in enumerate(promised)]

    def _rated(
        self,
        wave: Sequence[Candidate],
        floors: Sequence[float],
        guesses: Sequence[float],
        mosts: Sequence[float],
    ) -> Iterator[Rated]:
        """What they hold by policies, from these guesses on."""
        question = self._question
        self.num_simulated += len(wave)
        layouts = [one.layout for one in wave]
        trials = [layout_trial(question, self._known, one) for one in layouts]
        num = len(wave)
        found = self._pool.map(
            held_goodput,
            trials,
            guesses,
            [one.num_units for one in layouts],
            [question.num_first] * num,
            [_TOLERANCE] * num,
            [floor * question.cost(one) * loss(one) for one, floor in zip(layouts, floors, strict=True)],
            mosts,
        )
        for one, edge in zip(wave, found, strict=True):
            if edge is not None:
                yield Rated(one.layout, edge.value, one.layout.price_per_hour(question.fleet), edge.found)
                self._kept[one.layout.is_colocated] = edge.value / one.guess_per_s

    def _least_worth(self, everyone: Sequence[Rated], mine: Sequence[Rated], num: int) -> float:
        """What a layout has to exceed to be among the `num` best of all, or the best of these.

        Unless the search is thorough, it has to be the best of these.
        """
        if mine and not self._question.is_thorough:
            return max(map(self._worth, mine))
        if len(everyone) < num or not mine:
            return 0.0
        everyone = sorted(everyone, key=lambda one: rank(self._question, one))
        return min(self._worth(everyone[num - 1]), max(map(self._worth, mine)))

    def _worth(self, one: Rated | None) -> float:
        return 0.0 if one is None else worth(self._question, one)

    def _promise(self, one: Candidate) -> tuple[float, ...]:
        return (-worth_at(self._question, one.layout, one.guess_per_s), one.layout.num_gpus)

    def _ordered(self, among: Sequence[Combination]) -> list[Candidate]:
        """The most promising first."""
        return sorted((each for one in among for each in self._candidates(one)), key=self._promise)

    def _candidates(self, one: Combination) -> list[Candidate]:
        """All numbers of workers that fit or, unless the search is thorough, the most promising ones."""
        question = self._question
        halves = [self._halves[each] for each in one.options]
        most = [min(question.fleet.num_gpus // each.kind.num_devices, _MOST_WORKERS) for each in one.options]
        found = []
        for nums in product(*(range(1, num + 1) for num in most)):
            layout = one.layout(nums)
            if layout.fits(question.fleet):
                numbered = list(zip(halves, nums, strict=True))
                guess = min(half.guess_per_s(num) for half, num in numbered)
                bound = min(half.option.bound.most_per_s * num for half, num in numbered)
                found.append(Candidate(layout, guess, bound))
        found.sort(key=self._promise)
        model = self._known[one.options[0].kind]
        return [
            replace(each, layout=layout)
            for each in (found if question.is_thorough else found[:1])
            for layout in with_codecs(question, model, each.layout, each.guess_per_s)
        ]

    def _measured(self, options: Sequence[Option], on_measured: Callable[[int], None]) -> dict[Option, Phase]:
        num, found = len(options), {}
        halves = self._pool.map(measured_phase, [self._question] * num, [self._known] * num, options)
        for one in halves:
            on_measured(1)
            if one.alone_per_s:
                found[one.option] = one
        return found
