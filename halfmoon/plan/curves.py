"""How layouts fare at rates around what they hold: what a plot of a plan draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from halfmoon.plan.layout import Layout, WorkerKind
from halfmoon.plan.layout_trial import layout_trial
from halfmoon.plan.problem import PlanningProblem
from halfmoon.plan.search.evaluation import judged
from halfmoon.plan.search.objective import Rated
from halfmoon.plan.search.search import Progress
from halfmoon.sim.latency_sources.latency_model import LatencyModel

_FACTORS = (0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5)  # of what a layout holds: close where attainment falls


@dataclass(frozen=True, slots=True)
class Curve:
    """One layout: the share of requests that meet the goal at each rate, ascending."""

    layout: Layout
    rates_per_s: tuple[float, ...]
    attainments: tuple[float, ...]


def curves(
    question: PlanningProblem,
    known: Mapping[WorkerKind, LatencyModel],
    layouts: Sequence[Rated],
    pool: Executor,
    on_progress: Progress = lambda what, done, total: None,
) -> list[Curve]:
    """Of each layout, the asked rate among its rates where there is one."""
    points = [(one, rate) for one in layouts for rate in _rates(question, one)]
    trials = [layout_trial(question, known, one.layout) for one, _ in points]
    units = [one.layout.num_units for one, _ in points]
    shares: dict[Rated, list[float]] = {one: [] for one in layouts}
    found = pool.map(judged, trials, [rate for _, rate in points], units)
    for done, ((one, _), verdict) in enumerate(zip(points, found, strict=True), start=1):
        shares[one].append(verdict.attainment.value(question.goal.criterion))
        on_progress("curves", done, len(points))
    return [Curve(one.layout, tuple(_rates(question, one)), tuple(shares[one])) for one in layouts]


def _rates(question: PlanningProblem, one: Rated) -> list[float]:
    asked = () if question.rate_per_s is None else (question.rate_per_s,)
    return sorted({*(factor * one.goodput_per_s for factor in _FACTORS), *asked})
