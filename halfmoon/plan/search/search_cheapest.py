"""The cheapest layouts that hold a rate: best first, so that the first one that holds it is the cheapest.

Each combination begins with as many workers of each half as hold the rate with an ideal other half, which no layout
of it has fewer of. Whatever holds the rate ends its combination; whatever does not is followed by what is one worker
larger. Layouts come up in the order of their cost.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor

from halfmoon.plan.layout import Layout, WorkerKind
from halfmoon.plan.layout_trial import layout_trial
from halfmoon.plan.problem import PlanningProblem
from halfmoon.plan.search.combinations import Combination, Kinds, combinations, kinds_of, larger, with_codecs
from halfmoon.plan.search.equivalent_layouts import grouped
from halfmoon.plan.search.evaluation import Evaluation, estimated_evaluation, verified_evaluation
from halfmoon.plan.search.feasible import Option
from halfmoon.plan.search.phases import least_workers
from halfmoon.sim.latency_sources.latency_model import LatencyModel

_WAVE = 4  # simulated at once; fixed, so that plans do not depend on the number of cores


class CheapestSearch:
    """Owns what is known of the layouts of one question: how many workers each half needs at least, and what holds."""

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
        self._least = self._least_workers(options, on_measured)
        self._options = [one for one in options if one in self._least]
        self._estimated: dict[Layout, Evaluation] = {}  # of those that policies were asked about
        self._verified: dict[Layout, Evaluation | None] = {}  # the same by policies: what is held
        self.num_simulated = 0

    @property
    def combinations(self) -> list[Combination]:
        """Those whose halves can hold the rate alone."""
        return list(combinations(self._question, self._options))

    def found(
        self, among: Iterable[Combination], num: int, on_simulated: Callable[[int, int], None]
    ) -> dict[Layout, Evaluation]:
        """The cheapest that hold the rate, of different combinations, cheapest first, and how they fare at it: `num`
        of them, those that fare as one of these does, and where `num` is above one the cheapest of either kind.

        Tells how many of them there are.
        """
        among = list(among)
        kinds = {one.is_colocated for one in among} if num > 1 else set()
        queue = _Queue(self._question)
        for one in among:
            queue.add(self._starts(one))
        held: dict[Layout, Evaluation] = {}
        ended: set[Kinds] = set()
        while wave := queue.wave(ended, self._limit(held, num), kinds - {one.is_colocated for one in held}):
            self.num_simulated += len(wave)
            for layout, verdict in zip(wave, self._verdicts(wave), strict=True):
                if verdict is not None:
                    held[layout] = verdict
                    ended.add(kinds_of(layout))
                else:
                    queue.add(larger(self._question, layout, self._options))
            held = {one: held[one] for one in sorted(held, key=queue.key)}
            on_simulated(min(len(held), num), num)
        return held

    def _limit(self, held: Mapping[Layout, Evaluation], num: int) -> float | None:
        """What costs as much cannot come among the `num` cheapest; who fares as another one does not count."""
        different = list(grouped(held.items())) if len(held) >= num else []
        return self._question.cost(different[num - 1]) if len(different) >= num else None

    def _starts(self, one: Combination) -> Iterator[Layout]:
        """For each number of units, as many workers as the halves need alone, and no fewer than one."""
        question, least = self._question, [self._least[each] for each in one.options]
        model = self._known[one.options[0].kind]
        is_one_node = all(question.fleet.pool(each.kind.gpu).num_nodes == 1 for each in one.options)
        most_units = max(least) if one.is_paired and not is_one_node else 1
        for num_units in range(1, most_units + 1):
            layout = one.layout([-(-num // num_units) for num in least], num_units)
            if question.fleet.is_mixed and not layout.fits(question.fleet):
                layout = cut(question, one, least)
            if layout.fits(question.fleet):
                yield from with_codecs(question, model, layout, question.rate_per_s or 0.0)

    def _verdicts(self, layouts: Sequence[Layout]) -> Iterable[Evaluation | None]:
        """Policies are asked where estimates leave it open, and once for those that are estimated to fare alike."""
        trials = [layout_trial(self._question, self._known, one) for one in layouts]
        at_once: list[Layout] = []
        later: list[Layout] = []
        for one, trial in zip(layouts, trials, strict=True):
            has_estimate = trial.has_estimates and not trial.is_of_one_way and not self._question.is_thorough
            (later if has_estimate else at_once).append(one)
        estimates = self._judged(estimated_evaluation, later)
        self._estimated |= {one: found for one, found in zip(later, estimates, strict=True) if found is not None}
        alike = {twin: first for first, twins in grouped(self._estimated.items()).items() for twin in (first, *twins)}
        asked = [*at_once, *(one for one in later if alike.get(one) == one)]
        self._verified |= dict(
            zip(asked, self._judged(verified_evaluation, asked, self._question.num_first), strict=True)
        )
        return [self._verified.get(alike.get(one, one)) for one in layouts]

    def _judged(
        self, judge: Callable[..., Evaluation | None], layouts: Sequence[Layout], *more: int
    ) -> Iterator[Evaluation | None]:
        """Each at the asked rate."""
        question, num = self._question, len(layouts)
        trials = [layout_trial(question, self._known, one) for one in layouts]
        rates, units = [question.rate_per_s or 0.0] * num, [one.num_units for one in layouts]
        return self._pool.map(judge, trials, rates, units, *([one] * num for one in more))

    def _least_workers(self, options: Sequence[Option], on_measured: Callable[[int], None]) -> dict[Option, int]:
        question, num = self._question, len(options)
        most = [self._most_workers(one) for one in options]
        found: dict[Option, int] = {}
        measured = self._pool.map(least_workers, [question] * num, [self._known] * num, options, most)
        for option, least in zip(options, measured, strict=True):
            on_measured(1)
            if least is not None:
                found[option] = least
        return found

    def _most_workers(self, option: Option) -> int:
        """That fit; of a mixed fleet by their number of GPUs, since other kinds may make up for what is missing."""
        fleet, one = self._question.fleet, Combination((option,), is_paired=False)
        most = fleet.num_gpus // option.kind.num_devices
        return most if fleet.is_mixed else next((n for n in range(most, 0, -1) if one.layout([n]).fits(fleet)), 0)


class _Queue:
    """Owns the layouts that are still to be simulated, the cheapest first."""

    def __init__(self, question: PlanningProblem) -> None:
        self._question = question
        self._heap: list[tuple[tuple[float, ...], int, Layout]] = []
        self._numbers = itertools.count()
        self._seen: set[Layout] = set()

    def key(self, layout: Layout) -> tuple[float, ...]:
        """Cost, then price; whole clusters before those that are divided into units."""
        cost, price = self._question.cost(layout), layout.price_per_hour(self._question.fleet)
        return (cost, price, layout.num_units, sum(one.num for one in layout.sets))

    def add(self, layouts: Iterable[Layout]) -> None:
        """Those that were not there yet."""
        for one in layouts:
            if one not in self._seen:
                self._seen.add(one)
                heapq.heappush(self._heap, (self.key(one), next(self._numbers), one))

    def wave(self, ended: set[Kinds], limit: float | None, missing: set[bool]) -> list[Layout]:
        """The next few, each of another combination than those that ended, and cheaper than the limit or of a kind
        that is missing yet: `is_colocated` of it."""
        found: list[Layout] = []
        later: list[tuple[tuple[float, ...], int, Layout]] = []
        while self._heap and len(found) < _WAVE:
            item = heapq.heappop(self._heap)
            (cost, *_), _, layout = item
            if limit is not None and cost >= limit and layout.is_colocated not in missing:
                continue
            if kinds_of(layout) in {kinds_of(one) for one in found}:
                later.append(item)
            elif kinds_of(layout) not in ended:
                found.append(layout)
        for item in later:
            heapq.heappush(self._heap, item)
        return found


def cut(question: PlanningProblem, one: Combination, least: Sequence[int]) -> Layout:
    """As many as fit, where several kinds of GPU make up for what is missing."""
    nums = list(least)
    while max(nums) > 1 and not one.layout(nums).fits(question.fleet):
        several = (at for at, num in enumerate(nums) if num > 1)
        nums[max(several, key=lambda at: nums[at] * one.options[at].kind.num_devices)] -= 1
    return one.layout(nums)
