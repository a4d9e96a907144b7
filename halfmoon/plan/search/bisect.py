"""Finds the highest feasible value with few probes, because each probe is a simulation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

_MOST_STEPS = 10  # from the guess on, each the square of the one before; past these everything is feasible, or nothing
_ROUNDING = 1e-9  # the last step of a bracket is within the tolerance

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Bisection(Generic[Result]):
    """The highest feasible value, and the result found there."""

    value: float
    result: Result


def highest_feasible(
    feasible: Callable[[float], Result | None],
    guess: float,
    tolerance: float,
    *,
    least: float = 0.0,
    most: float = math.inf,
    at_least: Result | None = None,
) -> Bisection[Result] | None:
    """The highest feasible value within a factor of `tolerance`; `feasible` returns None above it. None if `least` is
    infeasible.

    The search starts at a guess. If that is within the tolerance, two probes suffice. `at_least` is the result at
    `least`, if it is available already.
    """
    low, high, best = _bracket(feasible, min(max(guess, least), most), tolerance, least, most, at_least)
    if best is None:
        return None
    while high / low > tolerance * (1 + _ROUNDING):
        middle = (low * high) ** 0.5
        result = feasible(middle)
        low, high, best = (low, middle, best) if result is None else (middle, high, result)
    return Bisection(low, best)


def _bracket(
    feasible: Callable[[float], Result | None],
    guess: float,
    tolerance: float,
    least: float,
    most: float,
    at_least: Result | None,
) -> tuple[float, float, Result | None]:
    """A feasible and an infeasible value, with the result at the former.

    Both are equal if the upper limit is feasible. The result is None if nothing is feasible.
    """

    def probed(value: float) -> Result | None:
        return at_least if value == least and at_least is not None else feasible(value)

    low = high = guess
    best = probed(guess)
    is_rising, step = best is not None, tolerance
    for _ in range(_MOST_STEPS):
        if is_rising:
            if low == most:
                break
            high = min(step * low, most)
            result = probed(high)
            if result is None:
                return low, high, best
            low, best = high, result
        else:
            if high == least:
                break
            low = max(high / step, least)
            best = probed(low)
            if best is not None:
                return low, high, best
            high = low
        step *= step
    return low, low, best
