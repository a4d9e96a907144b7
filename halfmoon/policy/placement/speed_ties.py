"""Workers of about one speed: learned models of equal machines differ by more than the machines do."""

from __future__ import annotations

import numpy as np

from halfmoon.policy.models.latency import Floats
from halfmoon.policy.view.capabilities import Bools

_LEARNING_ERROR = 1.15  # two workers of one host were believed 0.23 and 0.26 s a prompt: 13 % apart, and equal


def with_speed_ties(cost: Floats, alone_s: Floats, rows: Bools) -> Floats:
    """`cost`, where those of `rows` that are about as quick as the cheapest of them cost what they would at its speed.

    alone_s: what each row takes for one and the same work by itself, 0 where that is not known.
    """
    among = rows.nonzero()[0]
    among_s = alone_s[among]
    if np.logical_and.reduce(among_s == among_s[0]):  # most often: they cost what they cost
        return cost
    best_s = among_s[np.argmin(cost[among])]
    slower = np.divide(alone_s, best_s, out=np.zeros_like(alone_s), where=rows & (best_s > 0))
    is_about_one = (slower <= _LEARNING_ERROR) & (slower >= 1 / _LEARNING_ERROR)
    found: Floats = np.divide(cost, slower, out=cost.copy(), where=is_about_one)
    return found
