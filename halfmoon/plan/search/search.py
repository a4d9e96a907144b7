"""The search for a layout: phases alone, then whole layouts by simulation, until bounds rule out the rest.

After DistServe (arXiv 2401.09670): algorithm 1 combines phases freely, algorithm 2 keeps the phases of a unit on the
same nodes. Colocated workers are the baseline.
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
from halfmoon.plan.search.equivalent_layouts import group_equivalent
from halfmoon.plan.search.evaluation import estimated_per_s, held_goodput, verified_per_s
from halfmoon.plan.search.feasible import NoLayout, Option, TargetsBroken, feasible_models, options
from halfmoon.plan.search.nearest import nearest_rate, nearest_targets
from halfmoon.plan.search.objective import Rated, loss, rank
from halfmoon.plan.search.search_cheapest import CheapestSearch
from halfmoon.plan.search.search_goodput import GoodputSearch
from halfmoon.sim.latency_sources.latency_model import LatencyModel

BEST = 5
_LESS = 1.01  # below a rate that is not held
_TOLERANCE_AT_A_RATE = 1.12  # of goodput beyond the rate, which only decides between equal costs

Progress = Callable[[str, int, int], None]
"""Callback `(stage, done, total)`."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The best layouts, best first, and the best of either kind, if there is one."""

    best: tuple[Rated, ...]
    disaggregated: Rated | None
    colocated: Rated | None
    models: Mapping[WorkerKind, LatencyModel]
    num_simulated: int
    num_ruled_out: int


def search(problem: PlanningProblem, pool: Executor, on_progress: Progress = lambda what, done, total: None) -> Plan:
    """Finds a plan, which depends on the problem only. Raises NoLayout, which says what is in the way."""
    models = feasible_models(problem)
    try:
        choices = options(problem, models)
    except TargetsBroken as broken:
        raise NoLayout(_wider(broken, problem, models, pool, on_progress), param=broken.param) from None
    on_measured = _counting(on_progress, len(choices))
    result = (_cheapest if problem.objective in OF_A_RATE else _best_goodput)(
        problem, models, choices, pool, on_measured, on_progress
    )
    ranked = _without_equivalents(_without_idle_codecs(sorted(result.rated, key=lambda one: rank(problem, one))))
    if not ranked:
        raise NoLayout(_explanation(problem, models, result.can_phases, pool), param="rate")
    best = first_of_each_kind(ranked, lambda one: one.layout)
    return Plan(
        tuple(ranked[:BEST]), best.get(False), best.get(True), models, result.num_simulated, result.num_ruled_out
    )


def _without_idle_codecs(ranked: Sequence[Rated]) -> list[Rated]:
    """Leaves out layouts that a less lossy codec ranks before: theirs has not gained what it has to."""
    result: list[Rated] = []
    for rated in ranked:
        layout = rated.layout
        twins = (one.layout for one in result if replace(one.layout, codec=layout.codec) == layout)
        if all(loss(twin) >= loss(layout) for twin in twins):
            result.append(rated)
    return result


def _without_equivalents(ranked: Sequence[Rated]) -> list[Rated]:
    """Each layout once, with its equivalents."""
    equivalents = group_equivalent((rated.layout, rated.evaluation) for rated in ranked)
    return [
        replace(rated, equivalents=(*rated.equivalents, *equivalents[rated.layout]))
        for rated in ranked
        if rated.layout in equivalents
    ]


@dataclass(frozen=True, slots=True)
class _SearchResult:
    rated: list[Rated]
    can_phases: bool  # whether phases alone do what is asked
    num_simulated: int
    num_ruled_out: int


def _cheapest(
    problem: PlanningProblem,
    models: Mapping[WorkerKind, LatencyModel],
    choices: Sequence[Option],
    pool: Executor,
    on_measured: Callable[[int], None],
    on_progress: Progress,
) -> _SearchResult:
    """The cheapest layouts that hold the rate, with their goodput."""
    run = CheapestSearch(problem, models, choices, pool, on_measured)
    made = run.combinations
    held = run.found(made, BEST, partial(on_progress, "layouts"))
    equivalents = group_equivalent((layout, held[layout]) for layout in sorted(held, key=problem.cost))
    cheapest = list(equivalents)
    kept = list(dict.fromkeys([*cheapest[:BEST], *first_of_each_kind(cheapest, lambda one: one).values()]))
    num, rate_per_s = len(kept), problem.rate_per_s or 0.0
    trials, units = [layout_trial(problem, models, layout) for layout in kept], [layout.num_units for layout in kept]
    estimates = pool.map(estimated_per_s, trials, [rate_per_s] * num, units)
    guesses = [verified_per_s(trial, one or rate_per_s) for trial, one in zip(trials, estimates, strict=True)]
    result = pool.map(
        held_goodput,
        trials,
        guesses,
        units,
        [problem.num_first] * num,
        [_TOLERANCE_AT_A_RATE] * num,
        [rate_per_s] * num,
        [guess if trial.has_estimates else math.inf for guess, trial in zip(guesses, trials, strict=True)],
        [held[layout] for layout in kept],
    )
    rated = []
    for done, (layout, bisection) in enumerate(zip(kept, result, strict=True), start=1):
        assert bisection is not None, "it holds the rate"
        price = layout.price_per_hour(problem.fleet)
        rated.append(Rated(layout, bisection.value, price, held[layout], equivalents[layout]))
        on_progress("goodputs", done, num)
    return _SearchResult(rated, bool(made), run.num_simulated, len(made) - len(held))


def _by_kind(made: Sequence[Combination]) -> Iterator[tuple[str, list[Combination]]]:
    """Colocated combinations, which are the baseline, disaggregated ones, and those whose workers share prompts."""
    yield "colocated", [combination for combination in made if combination.is_colocated]
    yield "disaggregated", [one for one in made if not one.is_colocated and one.degree == 1]
    yield "shared prompts", [combination for combination in made if combination.degree > 1]


def _best_goodput(
    problem: PlanningProblem,
    models: Mapping[WorkerKind, LatencyModel],
    choices: Sequence[Option],
    pool: Executor,
    on_measured: Callable[[int], None],
    on_progress: Progress,
) -> _SearchResult:
    """The layouts with the most goodput per cost."""
    run = GoodputSearch(problem, models, choices, pool, on_measured)
    made = run.combinations
    estimated = [combination for combination in made if run.has_estimates and combination.degree == 1]
    rated = run.search_by_estimates(estimated, BEST, partial(on_progress, "layouts")) if estimated else []
    for what, among in _by_kind([combination for combination in made if combination not in estimated]):
        if among:
            rated += run.found(among, BEST, rated, partial(on_progress, what))
    return _SearchResult(rated, bool(made), run.num_simulated, run.num_ruled_out)


def _counting(on_progress: Progress, total: int) -> Callable[[int], None]:
    done = 0

    def advance(num: int) -> None:
        nonlocal done
        done += num
        on_progress("workers alone", done, total)

    return advance


def _wider(
    broken: TargetsBroken,
    problem: PlanningProblem,
    models: Mapping[WorkerKind, LatencyModel],
    pool: Executor,
    on_progress: Progress,
) -> str:
    """Names the broken targets, and the nearest that are met at the requested rate."""
    if problem.rate_per_s is None:
        return f"{broken.message}: what is a little above is met at a low rate"
    nearest = nearest_targets(
        problem, broken.idle, partial(_held, models=models, pool=pool), partial(on_progress, "the nearest targets")
    )
    rate = f"{problem.rate_per_s:g} requests/s"
    if nearest is None:
        return f"{broken.message}; and {problem.fleet} do not hold {rate} with fifty times that: give more GPUs"
    targets, layout = nearest
    times = {"TTFT": targets.ttft_s, "TPOT": targets.tpot_s, "TBT": targets.tbt_s}
    text = " and ".join(f"{name} {target_s:g} s" for name, target_s in times.items() if target_s is not None)
    return f"{broken.message}; the nearest feasible at {rate}: {text} ({problem.text(layout)})"


def _held(problem: PlanningProblem, models: Mapping[WorkerKind, LatencyModel], pool: Executor) -> Layout | None:
    """The cheapest layout that holds the rate."""
    run = CheapestSearch(problem, models, options(problem, models), pool, lambda num: None)
    return next(iter(run.found(run.combinations, 1, lambda done, total: None)), None)


def _explanation(
    problem: PlanningProblem, models: Mapping[WorkerKind, LatencyModel], can_phases: bool, pool: Executor
) -> str:
    """Says why no layout was found, and what would be feasible."""
    if problem.rate_per_s is None and not can_phases:
        return "no worker meets its phase of the targets for enough requests at any rate: relax TTFT, TPOT or TBT"
    if problem.rate_per_s is None:
        return (
            "each phase meets its target alone, and no layout meets both for enough requests: "
            "relax TTFT, TPOT, TBT or --attainment"
        )
    try:
        best = search(replace(problem, rate_per_s=None, objective="goodput-per-gpu"), pool).best[0]
    except NoLayout as broken:
        return broken.message
    guess_per_s = min(_copies(best.layout, problem) * best.goodput_per_s, problem.rate_per_s / _LESS)
    nearest = nearest_rate(problem, guess_per_s, partial(_held, models=models, pool=pool))
    enough = max(math.ceil(problem.rate_per_s / best.per_gpu), problem.fleet.num_gpus + 1)
    near = (
        "" if nearest is None else f"the nearest feasible is {nearest[0]:g} requests/s ({problem.text(nearest[1])}): "
    )
    return (
        f"rate: {problem.fleet} do not hold {problem.rate_per_s:g} requests/s; "
        f"{near}lower --rate, or give about {enough} GPUs"
    )


def _copies(layout: Layout, problem: PlanningProblem) -> int:
    """How many copies of a layout fit the fleet, as units or as multiples of its workers."""

    def times(num: int) -> Layout:
        if layout.is_paired:
            return replace(layout, num_units=num * layout.num_units)
        return replace(layout, sets=tuple(workers._replace(num=num * workers.num) for workers in layout.sets))

    most = problem.fleet.num_gpus // layout.num_gpus
    return next((num for num in range(most, 1, -1) if times(num).fits(problem.fleet)), 1)
