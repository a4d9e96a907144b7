"""When requests come: arrival processes, each a function of a generator, so that a seed repeats it."""

from __future__ import annotations

from typing import Literal

import numpy as np

from halfmoon.errors import InvalidRequest
from halfmoon.sim.workloads.workload import Floats

ArrivalProcess = Literal["poisson", "gamma", "constant"]


def arrivals(
    process: ArrivalProcess, num_requests: int, rate_per_s: float, rng: np.random.Generator, cv: float = 1.0
) -> Floats:
    """Ascending times, the first at second 0, with a mean gap of `1 / rate_per_s`.

    `cv` is the gaps' coefficient of variation, for `gamma`: 1 is Poisson, above it bursts, towards 0 it is constant.
    Raises InvalidRequest for a rate or `cv` that is not above 0.
    """
    if not rate_per_s > 0:
        raise InvalidRequest(f"the arrival rate must be above 0 per second, got {rate_per_s:g}", param="rate")
    if process == "gamma" and not cv > 0:
        raise InvalidRequest(f"the coefficient of variation must be above 0, got {cv:g}", param="cv")
    num_gaps, mean_s = max(num_requests - 1, 0), 1 / rate_per_s
    if process == "poisson":
        gaps_s = rng.exponential(mean_s, num_gaps)
    elif process == "gamma":
        gaps_s = rng.gamma(1 / cv**2, mean_s * cv**2, num_gaps)
    else:
        gaps_s = np.full(num_gaps, mean_s)
    start_s: Floats = np.concatenate([[0.0], np.cumsum(gaps_s)])[:num_requests]
    return start_s
