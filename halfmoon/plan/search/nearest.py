"""What is near to a question that nothing answers: a lower rate, or wider targets, with a layout that was found."""

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
"""The cheapest layout that holds a question's rate, if there is one."""


def nearest_rate(question: PlanningProblem, guess_per_s: float, answer: Answer) -> tuple[float, Layout] | None:
    """The highest rate that some layout holds, from the guess down by two percent each; None: far from the guess."""
    for number in range(_MOST_SLOWER):
        rate_per_s = _rounded(guess_per_s / _SLOWER**number, math.floor)
        layout = answer(replace(question, rate_per_s=rate_per_s))
        if layout is not None:
            return rate_per_s, layout
    return None


def nearest_targets(
    question: PlanningProblem, idle: SloTargets, answer: Answer, on_tried: Callable[[int, int], None]
) -> tuple[SloTargets, Layout] | None:
    """The least of some multiples of what idle workers take that holds the rate; None: not even the largest does.

    Targets that idle workers meet stay as they are. `on_tried` hears how many are tried of how many.
    """
    found: tuple[SloTargets, Layout] | None = None
    low, high, tried, most = 0, len(_WIDER), 0, len(_WIDER).bit_length()
    while low < high:
        middle = (low + high) // 2
        targets = _wider(question.goal.targets, idle, _WIDER[middle])
        layout = answer(replace(question, goal=replace(question.goal, targets=targets)))
        if layout is None:
            low = middle + 1
        else:
            found, high = (targets, layout), middle
        tried += 1
        on_tried(tried, most)
    on_tried(most, most)
    return found


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
    """To as many digits as are printed, so that what is printed is what was tried."""
    unit = 10.0 ** (math.floor(math.log10(value)) - _DIGITS + 1)
    return float(f"{to(value / unit) * unit:.{_DIGITS}g}")
