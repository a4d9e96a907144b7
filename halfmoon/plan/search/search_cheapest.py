"""The cheapest layouts that hold a rate, in order of cost, so that the first one that holds it is the cheapest.

Each combination starts with the fewest workers of each phase that hold the rate with an ideal other phase; no layout of
it can have fewer. A layout that holds the rate ends its combination. Any other is followed by layouts with one more
worker.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor

from halfmoon.plan.layout import Layout, WorkerKind
from halfmoon.plan.layout_trial import layout_trial
from halfmoon.plan.problem import PlanningProblem
from halfmoon.plan.search.combinations import Combination, Kinds, combinations, kinds_of, larger, with_codecs
from halfmoon.plan.search.equivalent_layouts import group_equivalent
from halfmoon.plan.search.evaluation import Evaluation, estimated_evaluation, verified_evaluation
from halfmoon.plan.search.feasible import Option
from halfmoon.plan.search.objective import loss
from halfmoon.plan.search.phases import least_workers
from halfmoon.policy.view.worker_view import Role
from halfmoon.sim.latency_sources.latency_model import LatencyModel

_WAVE = 4  # simulated at once; fixed, so that plans do not depend on the number of cores


class CheapestSearch:
    """Owns what is known of one problem's layouts: the fewest workers of each phase, and which layouts hold the rate.
    Knows nothing of other objectives.
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
        self._least = self._least_workers(options, on_measured)
        self._options = [option for option in options if option in self._least]
        self._estimated: dict[Layout, Evaluation] = {}  # by estimates, for layouts that policies were asked about
        self._verified: dict[Layout, Evaluation | None] = {}  # by policies; None: the rate is not held
        self.num_simulated = 0

    @property
    def combinations(self) -> list[Combination]:
        """Combinations whose phases can hold the rate alone."""
        return list(combinations(self._problem, self._options))

    def found(
        self, among: Iterable[Combination], num: int, on_simulated: Callable[[int, int], None]
    ) -> dict[Layout, Evaluation]:
        """The cheapest layouts of different combinations that hold the rate, cheapest first, with their evaluations.

        There are `num` of them, their equivalents, and, if `num` is above one, the cheapest of either kind.
        `on_simulated` is called with `(found, num)`.
        """
        among = list(among)
        kinds = {combination.is_colocated for combination in among} if num > 1 else set()
        queue = _Queue(self._problem)
        for combination in among:
            queue.add(self._starts(combination))
        held: dict[Layout, Evaluation] = {}
        ended: set[Kinds] = set()
        while wave := queue.wave(ended, self._limit(held, num), kinds - {layout.is_colocated for layout in held}):
            self.num_simulated += len(wave)
            for layout, evaluation in zip(wave, self._evaluations(wave), strict=True):
                if evaluation is not None:
                    held[layout] = evaluation
                    ended.add(kinds_of(layout))
                else:
                    queue.add(larger(self._problem, layout, self._options))
            held = {layout: held[layout] for layout in sorted(held, key=queue.key)}
            on_simulated(min(len(held), num), num)
        return held

    def _limit(self, held: Mapping[Layout, Evaluation], num: int) -> float | None:
        """The cost from which on a layout cannot be among the `num` cheapest. Equivalent layouts count once."""
        different = list(group_equivalent(held.items())) if len(held) >= num else []
        return self._problem.cost(different[num - 1]) if len(different) >= num else None

    def _starts(self, combination: Combination) -> Iterator[Layout]:
        """For each number of units, the fewest workers that the phases need alone, at least one each."""
        problem, least = self._problem, [self._least[option] for option in combination.options]
        model = self._models[combination.options[0].kind]
        is_one_node = all(problem.fleet.pool(option.kind.gpu).num_nodes == 1 for option in combination.options)
        most_units = max(least) if combination.is_paired and not is_one_node else 1
        for num_units in range(1, most_units + 1):
            layout = combination.layout([-(-num // num_units) for num in least], num_units)
            if problem.fleet.is_mixed and not layout.fits(problem.fleet):
                layout = cut(problem, combination, least)
            if layout.fits(problem.fleet) and layout.sets[0].num >= layout.prefill_degree:
                yield from with_codecs(problem, model, layout, problem.rate_per_s or 0.0)

    def _evaluations(self, layouts: Sequence[Layout]) -> Iterable[Evaluation | None]:
        """Asks policies where estimates leave the answer open, and once for layouts that are equivalent by
        estimates.
        """
        trials = [layout_trial(self._problem, self._models, layout) for layout in layouts]
        at_once: list[Layout] = []
        later: list[Layout] = []
        for one, trial in zip(layouts, trials, strict=True):
            has_estimate = trial.has_estimates and not trial.has_single_route and not self._problem.is_thorough
            (later if has_estimate else at_once).append(one)
        estimates = self._evaluate(estimated_evaluation, later)
        self._estimated |= {one: result for one, result in zip(later, estimates, strict=True) if result is not None}
        alike = {
            equivalent: first
            for first, equivalents in group_equivalent(self._estimated.items(), of_one_codec=True).items()
            for equivalent in (first, *equivalents)
        }
        asked = [*at_once, *(layout for layout in later if alike.get(layout) == layout)]
        self._verified |= dict(
            zip(asked, self._evaluate(verified_evaluation, asked, self._problem.num_first), strict=True)
        )
        return [self._verified.get(alike.get(layout, layout)) for layout in layouts]

    def _evaluate(
        self, evaluate: Callable[..., Evaluation | None], layouts: Sequence[Layout], *more: int
    ) -> Iterator[Evaluation | None]:
        """Evaluates each layout at the requested rate."""
        problem, num = self._problem, len(layouts)
        trials = [layout_trial(problem, self._models, layout) for layout in layouts]
        rates, units = [problem.rate_per_s or 0.0] * num, [layout.num_units for layout in layouts]
        return self._pool.map(evaluate, trials, rates, units, *([one] * num for one in more))

    def _least_workers(self, options: Sequence[Option], on_measured: Callable[[int], None]) -> dict[Option, int]:
        """By option; those that share prompts only if that takes fewer of them than sharing less."""
        problem, num = self._problem, len(options)
        most = [self._most_workers(option) for option in options]
        result: dict[Option, int] = {}
        fewest: dict[tuple[Role, WorkerKind], int] = {}  # options of one kind come in the order of their degrees
        measured = self._pool.map(least_workers, [problem] * num, [self._models] * num, options, most)
        for option, least in zip(options, measured, strict=True):
            on_measured(1)
            if least is not None and least < fewest.get((option.role, option.kind), math.inf):
                keeps = problem.kept_share and option.role == "prefill"  # decode workers may compute most prompts
                result[option] = option.degree if keeps else least
                fewest[option.role, option.kind] = least
        return result

    def _most_workers(self, option: Option) -> int:
        """Workers that fit. In a mixed fleet this is the number of GPUs, because other kinds may fill in."""
        fleet, one = self._problem.fleet, Combination((option,), is_paired=False)
        most = fleet.num_gpus // option.kind.num_devices
        return most if fleet.is_mixed else next((n for n in range(most, 0, -1) if one.layout([n]).fits(fleet)), 0)


class _Queue:
    """Owns the layouts that are still to be simulated, the cheapest first. Knows nothing of results."""

    def __init__(self, problem: PlanningProblem) -> None:
        self._problem = problem
        self._heap: list[tuple[tuple[float, ...], int, Layout]] = []
        self._numbers = itertools.count()
        self._seen: set[Layout] = set()

    def key(self, layout: Layout) -> tuple[float, ...]:
        """Cost, then price. Whole clusters come before clusters divided into units, prompts on one worker before those
        over several, and exact KV before rounded.
        """
        cost, price = self._problem.cost(layout), layout.price_per_hour(self._problem.fleet)
        num_workers = sum(workers.num for workers in layout.sets)
        return (cost, price, layout.num_units, num_workers, layout.prefill_degree, loss(layout))

    def add(self, layouts: Iterable[Layout]) -> None:
        """Adds layouts that were not seen before."""
        for layout in layouts:
            if layout not in self._seen:
                self._seen.add(layout)
                heapq.heappush(self._heap, (self.key(layout), next(self._numbers), layout))

    def wave(self, ended: set[Kinds], limit: float | None, missing: set[bool]) -> list[Layout]:
        """The next few layouts, each of another combination that has not ended. They cost less than the limit, or are
        of a missing kind, given as `is_colocated`.
        """
        result: list[Layout] = []
        later: list[tuple[tuple[float, ...], int, Layout]] = []
        while self._heap and len(result) < _WAVE:
            item = heapq.heappop(self._heap)
            (cost, *_), _, layout = item
            if limit is not None and cost >= limit and layout.is_colocated not in missing:
                continue
            if kinds_of(layout) in {kinds_of(one) for one in result}:
                later.append(item)
            elif kinds_of(layout) not in ended:
                result.append(layout)
        for item in later:
            heapq.heappush(self._heap, item)
        return result


def cut(problem: PlanningProblem, combination: Combination, least: Sequence[int]) -> Layout:
    """As many workers as fit, if several kinds of GPU can fill in."""
    nums = list(least)
    while max(nums) > 1 and not combination.layout(nums).fits(problem.fleet):
        several = (at for at, num in enumerate(nums) if num > 1)
        nums[max(several, key=lambda at: nums[at] * combination.options[at].kind.num_devices)] -= 1
    return combination.layout(nums)
