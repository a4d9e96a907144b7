"""The feasible problem nearest to an infeasible one: a lower rate, or wider targets, with a layout."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from halfmoon.plan.layout import Layout
from halfmoon.plan.problem import PlanningProblem
from halfmoon.sim.cluster.cluster_spec import SloTargets

_WIDER = (1.02, 1.05, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0, 10.0, 20.0, 50.0)
_SLOWER = 1.02
_MOST_SLOWER = 12
_DIGITS = 3

Answer = Callable[[PlanningProblem], Layout | None]
"""Finds the cheapest layout that holds a problem's rate; None if there is none."""


def nearest_rate(problem: PlanningProblem, guess_per_s: float, answer: Answer) -> tuple[float, Layout] | None:
    """The highest rate that some layout holds, from the guess downwards in steps of two percent; None if no step is
    held.
    """
    for number in range(_MOST_SLOWER):
        rate_per_s = _rounded(guess_per_s / _SLOWER**number, math.floor)
        layout = answer(replace(problem, rate_per_s=rate_per_s))
        if layout is not None:
            return rate_per_s, layout
    return None


def nearest_targets(
    problem: PlanningProblem, idle: SloTargets, answer: Answer, on_tried: Callable[[int, int], None]
) -> tuple[SloTargets, Layout] | None:
    """The smallest tried multiple of idle workers' times that holds the rate; None if none does.

    Targets that idle workers meet stay as they are. `on_tried` is called with `(tried, total)`.
    """
    result: tuple[SloTargets, Layout] | None = None
    low, high, tried, most = 0, len(_WIDER), 0, len(_WIDER).bit_length()
    while low < high:
        middle = (low + high) // 2
        targets = _wider(problem.goal.targets, idle, _WIDER[middle])
        layout = answer(replace(problem, goal=replace(problem.goal, targets=targets)))
        if layout is None:
            low = middle + 1
        else:
            result, high = (targets, layout), middle
        tried += 1
        on_tried(tried, most)
    on_tried(most, most)
    return result


def _wider(asked: SloTargets, idle: SloTargets, factor: float) -> SloTargets:
    def target(asked_s: float | None, idle_s: float | None) -> float | None:
        if asked_s is None or idle_s is None or asked_s >= idle_s:
            return asked_s
        return _rounded(factor * idle_s, math.ceil)

    return replace(
        asked,
        ttft_s=target(asked.ttft_s, idle.ttft_s),
        tpot_s=target(asked.tpot_s, idle.tpot_s),
        tbt_s=target(asked.tbt_s, idle.tbt_s),
    )


def _rounded(value: float, to: Callable[[float], int]) -> float:
    """Rounded to the printed digits, so that the printed value is the one that was tried."""
    unit = 10.0 ** (math.floor(math.log10(value)) - _DIGITS + 1)
    return float(f"{to(value / unit) * unit:.{_DIGITS}g}")
