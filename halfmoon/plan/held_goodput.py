"""What a whole layout holds: estimated with the lightest workers, and looked for from there on with policies."""

from __future__ import annotations

import math

from halfmoon.plan.edge import Edge, highest
from halfmoon.plan.goodput import Trial, about_holds, goodput_per_s
from halfmoon.plan.verdict import Verdict, held_verdict
from halfmoon.sim.sole_choice import SoleChoice

_FIRST_TOLERANCE = 1.03  # of the estimate


def held_goodput(
    trial: Trial,
    guess_per_s: float,
    num_units: int,
    num_first: int,
    tolerance: float,
    least_per_s: float,
    at_least: Verdict | None = None,
    margin: float = math.inf,
) -> Edge[Verdict] | None:
    """Of `num_units` times the trial's cluster, from a guess on, with what is found at it; None where that is below
    `least_per_s`, and where the estimate is by `margin`. Rates are of all units; `at_least` is what was found at the
    least one.
    """

    def held(rate_per_s: float) -> Verdict | None:
        return held_verdict(trial, rate_per_s, num_units, num_first)

    if not SoleChoice.is_enough(trial.spec):  # else nobody is chosen, and an estimate is no quicker
        guess_per_s = num_units * goodput_per_s(trial, guess_per_s / num_units, _FIRST_TOLERANCE, about_holds)
        if trial.workload.prefixes is None and margin * guess_per_s <= least_per_s:  # the lightest knows no prefixes
            return None
    return highest(held, guess_per_s or least_per_s, tolerance, least=least_per_s, at_least=at_least)
