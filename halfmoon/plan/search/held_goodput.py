"""What a whole layout holds: estimated with the lightest workers, and looked for from there on with policies."""

from __future__ import annotations

import math

from halfmoon.plan.search.bisect import Bisection, highest
from halfmoon.plan.search.evaluation import Evaluation, verified_evaluation
from halfmoon.plan.search.goodput import ESTIMATES_EXCEEDED, Trial, about_holds

_ESTIMATES_WITHIN = 1.05
_LESS = 1.01  # is what policies hold of an estimate, mostly


def estimated_per_s(trial: Trial, guess_per_s: float, num_units: int, least_per_s: float = 0.0) -> float | None:
    """About what `num_units` times the trial's cluster hold; None where it is so little that policies do not hold
    `least_per_s`. Rates are of all units.
    """

    def is_held(rate_per_s: float) -> bool | None:
        return about_holds(trial, rate_per_s / num_units) or None

    least_per_s /= ESTIMATES_EXCEEDED
    if least_per_s and not is_held(least_per_s):
        return None
    found = highest(is_held, guess_per_s, _ESTIMATES_WITHIN, least=least_per_s, at_least=True)
    return None if found is None else found.value


def verified_per_s(trial: Trial, estimate_per_s: float) -> float:
    """The rate that policies are asked about, to believe an estimate: where they choose they hold a little less."""
    return estimate_per_s if trial.is_of_one_way else estimate_per_s / _LESS


def held_goodput(
    trial: Trial,
    guess_per_s: float,
    num_units: int,
    num_first: int,
    tolerance: float,
    least_per_s: float,
    most_per_s: float = math.inf,
    at_least: Evaluation | None = None,
) -> Bisection[Evaluation] | None:
    """Of `num_units` times the trial's cluster, from a guess on, with what is found at it; None where that is below
    `least_per_s`. More than `most_per_s` is not looked for. Rates are of all units; `at_least` is what was found at
    the least one.
    """

    def held(rate_per_s: float) -> Evaluation | None:
        return verified_evaluation(trial, rate_per_s, num_units, num_first)

    most_per_s = max(most_per_s, least_per_s)
    return highest(held, guess_per_s or least_per_s, tolerance, least=least_per_s, most=most_per_s, at_least=at_least)
