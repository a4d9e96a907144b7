"""The search for a layout: halves alone, layouts of them, the best of these simulated whole.

After DistServe (arXiv 2401.09670): algorithm 1 combines the best halves freely, algorithm 2 keeps the halves of a
unit in the same nodes; colocated workers are the baseline. Bounds that follow from latency models alone rule out
what cannot come among the best before it is simulated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace

from halfmoon.plan.candidates import Candidate, candidates
from halfmoon.plan.feasible import NoLayout, models, options
from halfmoon.plan.goodput import goodput_per_s
from halfmoon.plan.growth import grown
from halfmoon.plan.halves import Half, best_halves, waves
from halfmoon.plan.layout import Layout, WorkerKind
from halfmoon.plan.question import OF_A_RATE, Question
from halfmoon.plan.ranking import Rated, rank
from halfmoon.plan.unit import layout_trial
from halfmoon.policy.cluster_view import Role
from halfmoon.sim.latency import LatencyModel

BEST = 5
_TOLERANCE, _TOLERANCE_AT_A_RATE = 1.04, 1.08  # of what layouts hold, which matters less where a rate is given

Progress = Callable[[str, int, int], None]
"""Told what is done, how many of it, of how many."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The best layouts, best first, and the best of either kind, if any of it holds anything."""

    best: tuple[Rated, ...]
    disaggregated: Rated | None
    colocated: Rated | None
    models: Mapping[WorkerKind, LatencyModel]
    num_simulated: int
    num_ruled_out: int


def search(question: Question, pool: Executor, on_progress: Progress = lambda what, done, total: None) -> Plan:
    """The same question has the same plan. Raises NoLayout saying what is in the way."""
    known = models(question)
    choices = options(question, known)
    halves = best_halves(question, known, choices, pool, _counting(on_progress, "workers alone", len(choices)))
    made = candidates(question, halves)
    run = _Run(question, known, halves, pool)
    kinds = {
        "disaggregated": [one for one in made if not one.layout.is_colocated],
        "colocated": [one for one in made if one.layout.is_colocated],
    }
    found = {what: run.best(of_kind, on_progress, what) for what, of_kind in kinds.items()}
    if question.rate_per_s is not None:
        found = run.exact(found, on_progress)
    ranked = sorted([one for rated in found.values() for one in rated], key=lambda one: rank(question, one))[:BEST]
    if not ranked:
        alone = [half.goodput_per_s for kept in halves.values() for half in kept]
        raise NoLayout(_problem(question, alone, pool), param="rate")
    disaggregated, colocated = (next(iter(rated), None) for rated in found.values())
    return Plan(tuple(ranked), disaggregated, colocated, known, run.num_simulated, run.num_ruled_out)


def _counting(on_progress: Progress, what: str, total: int) -> Callable[[int], None]:
    done = 0

    def advance(num: int) -> None:
        nonlocal done
        done += num
        on_progress(what, done, total)

    return advance


class _Run:
    """Owns the count of what was simulated and what was ruled out."""

    def __init__(
        self,
        question: Question,
        known: Mapping[WorkerKind, LatencyModel],
        halves: Mapping[Role, Sequence[Half]],
        pool: Executor,
    ) -> None:
        self._question = question
        self._known = known
        self._halves = halves
        self._pool = pool
        self._bounds: dict[Layout, float] = {}  # of a run without end, of those that hold the rate
        self.num_simulated = 0
        self.num_ruled_out = 0

    def best(self, made: Sequence[Candidate], on_progress: Progress, what: str) -> list[Rated]:
        """Those that hold something; of a rate those that hold it, with what their halves suggest that they hold."""
        found: list[Rated] = []
        ordered = sorted(made, key=self._promise)
        done = 0
        for wave in waves(ordered):
            worst = found[BEST - 1] if len(found) >= BEST else None
            chosen = [one for one in wave if worst is None or self._can_beat(one, worst)]
            self.num_ruled_out += len(wave) - len(chosen)
            self.num_simulated += len(chosen)
            found += self._rated(chosen, worst) if self._question.rate_per_s is None else self._held(chosen)
            found = list({one.layout: one for one in found}.values())
            found.sort(key=lambda one: rank(self._question, one))
            done += len(wave)
            on_progress(what, done, len(ordered))
        return found

    def exact(self, found: Mapping[str, list[Rated]], on_progress: Progress) -> dict[str, list[Rated]]:
        """What those really hold that are among the best, or the best of their kind."""
        everyone = sorted((one for rated in found.values() for one in rated), key=lambda one: rank(self._question, one))
        chosen = list(dict.fromkeys([*everyone[:BEST], *(rated[0] for rated in found.values() if rated)]))
        least = self._question.rate_per_s or 0.0
        rates = self._goodputs([one.layout for one in chosen], [max(one.goodput_per_s, least) for one in chosen], None)
        exact = [
            replace(one, goodput_per_s=min(rate, self._bounds[one.layout]))
            for one, rate in zip(chosen, rates, strict=True)
        ]
        on_progress("goodputs", len(exact), len(exact))
        exact.sort(key=lambda one: rank(self._question, one))
        return {what: [one for one in exact if one.layout in {each.layout for each in found[what]}] for what in found}

    def _promise(self, one: Candidate) -> tuple[float, ...]:
        cost = self._question.cost(one.layout)
        worth = one.guess_per_s / cost
        return (cost, -worth) if self._question.objective in OF_A_RATE else (-worth,)

    def _can_beat(self, one: Candidate, worst: Rated) -> bool:
        cost, of_worst = (self._question.cost(each.layout) for each in (one, worst))
        if self._question.objective in OF_A_RATE:
            return cost <= of_worst
        return one.bound_per_s / cost > worst.goodput_per_s / of_worst

    def _rated(self, chosen: Sequence[Candidate], worst: Rated | None) -> list[Rated]:
        rates = self._goodputs([one.layout for one in chosen], [one.guess_per_s for one in chosen], worst)
        capped = [min(rate, one.bound_per_s) for one, rate in zip(chosen, rates, strict=True)]
        return [self._as_rated(one.layout, rate) for one, rate in zip(chosen, capped, strict=True) if rate > 0]

    def _held(self, chosen: Sequence[Candidate]) -> list[Rated]:
        enough = grown(self._question, self._known, self._halves, chosen, self._pool)
        self._bounds |= {one.layout: one.bound_per_s for one in enough}
        return [self._as_rated(one.layout, one.guess_per_s) for one in enough]

    def _as_rated(self, layout: Layout, per_s: float) -> Rated:
        return Rated(layout, per_s, layout.price_per_hour(self._question.fleet))

    def _goodputs(self, layouts: Sequence[Layout], guesses_per_s: Sequence[float], worst: Rated | None) -> list[float]:
        """Of whole layouts. What does not hold as much for its cost as `worst` is 0."""
        question = self._question
        per_cost = 0.0 if worst is None else worst.goodput_per_s / question.cost(worst.layout)
        floors = [per_cost * question.cost(one) / one.num_units for one in layouts]
        trials = [layout_trial(question, self._known, one) for one in layouts]
        guesses = [rate / one.num_units for one, rate in zip(layouts, guesses_per_s, strict=True)]
        tolerance = _TOLERANCE if question.rate_per_s is None else _TOLERANCE_AT_A_RATE
        found = self._pool.map(goodput_per_s, trials, guesses, floors, [tolerance] * len(layouts))
        return [rate * one.num_units for one, rate in zip(layouts, found, strict=True)]


def _problem(question: Question, alone_per_s: Sequence[float], pool: Executor) -> str:
    """Why nothing was found, and the nearest that would be."""
    if not any(alone_per_s):
        return "no worker meets its half of the targets for enough requests at any rate: relax TTFT, TPOT or TBT"
    if question.rate_per_s is None:
        return (
            "each half meets its target alone, and no layout meets both for enough requests: "
            "relax TTFT, TPOT, TBT or --attainment"
        )
    try:
        best = search(replace(question, rate_per_s=None, objective="goodput-per-gpu"), pool).best[0]
    except NoLayout as problem:
        return problem.message
    copies = _copies(best.layout, question)
    enough = max(math.ceil(question.rate_per_s / best.per_gpu), question.fleet.num_gpus + 1)
    return (
        f"rate: {question.fleet} do not hold {question.rate_per_s:g} requests/s; "
        f"the nearest feasible is about {copies * best.goodput_per_s:.3g} requests/s "
        f"({copies} x {question.text(best.layout)}): lower --rate, or give about {enough} GPUs"
    )


def _copies(layout: Layout, question: Question) -> int:
    """How many times a layout fits the fleet, as units or as so many times the workers."""

    def times(num: int) -> Layout:
        if layout.is_paired:
            return replace(layout, num_units=num * layout.num_units)
        return replace(layout, sets=tuple(one._replace(num=num * one.num) for one in layout.sets))

    most = question.fleet.num_gpus // layout.num_gpus
    return next((num for num in range(most, 1, -1) if times(num).fits(question.fleet)), 1)
