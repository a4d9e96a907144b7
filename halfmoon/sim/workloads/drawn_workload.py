"""Drawn workloads: an arrival process and length distributions under one seed."""

from __future__ import annotations

from typing import Literal

import numpy as np

from halfmoon.errors import InvalidRequest
from halfmoon.sim.workloads.lengths import Lengths
from halfmoon.sim.workloads.workload import Floats, Workload, check_rate

MOST_TOKENS = 32_768  # of a drawn prompt or output: a lognormal is unbounded
MOST_REQUESTS = 10_000_000
MOST_CV = 100.0  # of gaps: beyond it nearly all are 0

ArrivalProcess = Literal["poisson", "gamma", "constant"]


def arrivals(
    process: ArrivalProcess, num_requests: int, rate_per_s: float, rng: np.random.Generator, cv: float = 1.0
) -> Floats:
    """Ascending times, the first at second 0, with a mean gap of `1 / rate_per_s`.

    `cv` is the coefficient of variation of the gaps, for `gamma`: 1 is Poisson, more is bursty, 0 would be constant.
    Raises InvalidRequest for a rate or `cv` that is not above 0, or far too high.
    """
    check_rate(rate_per_s)
    if process == "gamma" and not 0 < cv <= MOST_CV:
        raise InvalidRequest(
            f"the coefficient of variation must be above 0, and at most {MOST_CV:g}, got {cv:g}", param="cv"
        )
    num_gaps, mean_s = max(num_requests - 1, 0), 1 / rate_per_s
    if process == "poisson":
        gaps_s = rng.exponential(mean_s, num_gaps)
    elif process == "gamma":
        gaps_s = rng.gamma(1 / cv**2, mean_s * cv**2, num_gaps)
    else:
        gaps_s = np.full(num_gaps, mean_s)
    start_s: Floats = np.concatenate([[0.0], np.cumsum(gaps_s)])[:num_requests]
    return start_s


def synthetic_workload(
    lengths: Lengths,
    num_requests: int,
    rate_per_s: float,
    *,
    seed: int,
    process: ArrivalProcess = "poisson",
    cv: float = 1.0,
    most_tokens: int = MOST_TOKENS,
) -> Workload:
    """Draws requests. Lengths and arrivals have separate generators, so another rate keeps the lengths."""
    if num_requests > MOST_REQUESTS:
        raise InvalidRequest(
            f"at most {MOST_REQUESTS:,} requests are drawn, got {num_requests:,}: give fewer", param="requests"
        )
    if seed < 0:
        raise InvalidRequest(f"a seed must not be negative, got {seed}", param="seed")
    arrival_rng, prompt_rng, output_rng = (np.random.default_rng(one) for one in np.random.SeedSequence(seed).spawn(3))
    return Workload(
        arrivals(process, num_requests, rate_per_s, arrival_rng, cv),
        lengths.prompt.sample(num_requests, prompt_rng, most_tokens),
        lengths.output.sample(num_requests, output_rng, most_tokens),
    )
