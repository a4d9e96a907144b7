"""The highest value that something holds for, with few questions: each of them is a simulation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

_MOST_STEPS = 10  # from the guess, each the square of the one before: then, far away, everything is held, or nothing
_ROUNDING = 1e-9  # a step of the tolerance is within it

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Bisection(Generic[Found]):
    """The value, and what was found there."""

    value: float
    found: Found


def highest(
    held: Callable[[float], Found | None],
    guess: float,
    tolerance: float,
    *,
    least: float = 0.0,
    most: float = math.inf,
    at_least: Found | None = None,
) -> Bisection[Found] | None:
    """Within a factor of `tolerance`; `held` tells None from the edge on. None where not even `least` is held.

    It is looked for from a guess on: where that is within the tolerance, two questions are enough. `at_least` is what
    is held at `least`, where that is known.
    """
    low, high, best = _bracket(held, min(max(guess, least), most), tolerance, least, most, at_least)
    if best is None:
        return None
    while high / low > tolerance * (1 + _ROUNDING):
        middle = (low * high) ** 0.5
        found = held(middle)
        low, high, best = (low, middle, best) if found is None else (middle, high, found)
    return Bisection(low, best)


def _bracket(
    held: Callable[[float], Found | None],
    guess: float,
    tolerance: float,
    least: float,
    most: float,
    at_least: Found | None,
) -> tuple[float, float, Found | None]:
    """What is held and what is not, with what was found at the lower one. Both are the same where the upper one is
    held; nothing was found where nothing is held.
    """

    def asked(value: float) -> Found | None:
        return at_least if value == least and at_least is not None else held(value)

    low = high = guess
    best = asked(guess)
    is_rising, step = best is not None, tolerance
    for _ in range(_MOST_STEPS):
        if is_rising:
            if low == most:
                break
            high = min(step * low, most)
            found = asked(high)
            if found is None:
                return low, high, best
            low, best = high, found
        else:
            if high == least:
                break
            low = max(high / step, least)
            best = asked(low)
            if best is not None:
                return low, high, best
            high = low
        step *= step
    return low, low, best
