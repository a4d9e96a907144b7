"""The search for a layout: halves alone, then layouts of them simulated whole, until bounds rule out what is left.

After DistServe (arXiv 2401.09670): algorithm 1 combines halves freely, algorithm 2 keeps the halves of a unit in the
same nodes; colocated workers are the baseline.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial

from halfmoon.plan.layout import Layout, WorkerKind, first_of_each_kind
from halfmoon.plan.layout_trial import layout_trial
from halfmoon.plan.problem import OF_A_RATE, PlanningProblem
from halfmoon.plan.search.combinations import Combination
from halfmoon.plan.search.equivalent_layouts import grouped
from halfmoon.plan.search.feasible import NoLayout, Option, TargetsBroken, models, options
from halfmoon.plan.search.held_goodput import estimated_per_s, held_goodput, verified_per_s
from halfmoon.plan.search.nearest import nearest_rate, nearest_targets
from halfmoon.plan.search.objective import Rated, rank
from halfmoon.plan.search.search_cheapest import CheapestSearch
from halfmoon.plan.search.search_goodput import GoodputSearch
from halfmoon.sim.latency_sources.latency_model import LatencyModel

BEST = 5
_LESS = 1.01  # than a rate that is not held
_TOLERANCE_AT_A_RATE = 1.12  # of what layouts hold beyond it, which only decides between equal costs

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


def search(question: PlanningProblem, pool: Executor, on_progress: Progress = lambda what, done, total: None) -> Plan:
    """The same question has the same plan. Raises NoLayout saying what is in the way."""
    known = models(question)
    try:
        choices = options(question, known)
    except TargetsBroken as problem:
        raise NoLayout(_wider(problem, question, known, pool, on_progress), param=problem.param) from None
    on_measured = _counting(on_progress, "workers alone", len(choices))
    found = (_cheapest if question.objective in OF_A_RATE else _worthiest)(
        question, known, choices, pool, on_measured, on_progress
    )
    ranked = _without_twins(sorted(found.rated, key=lambda one: rank(question, one)))
    if not ranked:
        raise NoLayout(_problem(question, known, found.can_halves, pool), param="rate")
    best = first_of_each_kind(ranked, lambda one: one.layout)
    return Plan(tuple(ranked[:BEST]), best.get(False), best.get(True), known, found.num_simulated, found.num_ruled_out)


def _without_twins(ranked: Sequence[Rated]) -> list[Rated]:
    """Each with the layouts that fare as it does."""
    twins = grouped((one.layout, one.verdict) for one in ranked)
    return [replace(one, twins=(*one.twins, *twins[one.layout])) for one in ranked if one.layout in twins]


@dataclass(frozen=True, slots=True)
class _Found:
    rated: list[Rated]
    can_halves: bool  # alone do what is asked
    num_simulated: int
    num_ruled_out: int


def _cheapest(
    question: PlanningProblem,
    known: Mapping[WorkerKind, LatencyModel],
    choices: Sequence[Option],
    pool: Executor,
    on_measured: Callable[[int], None],
    on_progress: Progress,
) -> _Found:
    """Those of the lowest cost that hold the rate, and how much more they hold."""
    run = CheapestSearch(question, known, choices, pool, on_measured)
    made = run.combinations
    held = run.found(made, BEST, partial(on_progress, "layouts"))
    twins = grouped((one, held[one]) for one in sorted(held, key=question.cost))
    cheapest = list(twins)
    kept = list(dict.fromkeys([*cheapest[:BEST], *first_of_each_kind(cheapest, lambda one: one).values()]))
    num, rate_per_s = len(kept), question.rate_per_s or 0.0
    trials, units = [layout_trial(question, known, one) for one in kept], [one.num_units for one in kept]
    estimates = pool.map(estimated_per_s, trials, [rate_per_s] * num, units)
    guesses = [verified_per_s(trial, one or rate_per_s) for trial, one in zip(trials, estimates, strict=True)]
    found = pool.map(
        held_goodput,
        trials,
        guesses,
        units,
        [question.num_first] * num,
        [_TOLERANCE_AT_A_RATE] * num,
        [rate_per_s] * num,
        [guess if trial.has_estimates else math.inf for guess, trial in zip(guesses, trials, strict=True)],
        [held[one] for one in kept],
    )
    rated = []
    for done, (layout, edge) in enumerate(zip(kept, found, strict=True), start=1):
        assert edge is not None, "it holds the rate"
        price = layout.price_per_hour(question.fleet)
        rated.append(Rated(layout, edge.value, price, held[layout], twins[layout]))
        on_progress("goodputs", done, num)
    return _Found(rated, bool(made), run.num_simulated, len(made) - len(held))


def _by_kind(made: Sequence[Combination]) -> Iterator[tuple[str, list[Combination]]]:
    """What does both halves, the baseline, and what does not."""
    yield "colocated", [one for one in made if one.is_colocated]
    yield "disaggregated", [one for one in made if not one.is_colocated]


def _worthiest(
    question: PlanningProblem,
    known: Mapping[WorkerKind, LatencyModel],
    choices: Sequence[Option],
    pool: Executor,
    on_measured: Callable[[int], None],
    on_progress: Progress,
) -> _Found:
    """Those that hold most for their cost."""
    run = GoodputSearch(question, known, choices, pool, on_measured)
    made = run.combinations
    if run.has_estimates:
        rated = run.found_by_estimates(made, BEST, partial(on_progress, "layouts"))
    else:
        rated = []
        for what, among in _by_kind(made):
            rated += run.found(among, BEST, rated, partial(on_progress, what))
    return _Found(rated, bool(made), run.num_simulated, run.num_ruled_out)


def _counting(on_progress: Progress, what: str, total: int) -> Callable[[int], None]:
    done = 0

    def advance(num: int) -> None:
        nonlocal done
        done += num
        on_progress(what, done, total)

    return advance


def _wider(
    problem: TargetsBroken,
    question: PlanningProblem,
    known: Mapping[WorkerKind, LatencyModel],
    pool: Executor,
    on_progress: Progress,
) -> str:
    """Which targets are broken, and the nearest that are met: at the rate that was asked for, or at hardly any."""
    if question.rate_per_s is None:
        return f"{problem.message}: what is a little above is met at a low rate"
    nearest = nearest_targets(
        question, problem.idle, partial(_held, known=known, pool=pool), partial(on_progress, "the nearest targets")
    )
    rate = f"{question.rate_per_s:g} requests/s"
    if nearest is None:
        return f"{problem.message}; and {question.fleet} do not hold {rate} with fifty times that: give more GPUs"
    targets, layout = nearest
    times = {"TTFT": targets.ttft_s, "TPOT": targets.tpot_s, "TBT": targets.tbt_s}
    text = " and ".join(f"{name} {target_s:g} s" for name, target_s in times.items() if target_s is not None)
    return f"{problem.message}; the nearest feasible at {rate}: {text} ({question.text(layout)})"


def _held(question: PlanningProblem, known: Mapping[WorkerKind, LatencyModel], pool: Executor) -> Layout | None:
    """The cheapest layout that holds the rate."""
    run = CheapestSearch(question, known, options(question, known), pool, lambda num: None)
    return next(iter(run.found(run.combinations, 1, lambda done, total: None)), None)


def _problem(
    question: PlanningProblem, known: Mapping[WorkerKind, LatencyModel], can_halves: bool, pool: Executor
) -> str:
    """Why nothing was found, and the nearest that would be."""
    if question.rate_per_s is None and not can_halves:
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
    guess_per_s = min(_copies(best.layout, question) * best.goodput_per_s, question.rate_per_s / _LESS)
    nearest = nearest_rate(question, guess_per_s, partial(_held, known=known, pool=pool))
    enough = max(math.ceil(question.rate_per_s / best.per_gpu), question.fleet.num_gpus + 1)
    near = (
        "" if nearest is None else f"the nearest feasible is {nearest[0]:g} requests/s ({question.text(nearest[1])}): "
    )
    return (
        f"rate: {question.fleet} do not hold {question.rate_per_s:g} requests/s; "
        f"{near}lower --rate, or give about {enough} GPUs"
    )


def _copies(layout: Layout, question: PlanningProblem) -> int:
    """How many times a layout fits the fleet, as units or as so many times the workers."""

    def times(num: int) -> Layout:
        if layout.is_paired:
            return replace(layout, num_units=num * layout.num_units)
        return replace(layout, sets=tuple(one._replace(num=num * one.num) for one in layout.sets))

    most = question.fleet.num_gpus // layout.num_gpus
    return next((num for num in range(most, 1, -1) if times(num).fits(question.fleet)), 1)
