"""Workloads that are drawn: an arrival process and length distributions under one seed."""

from __future__ import annotations

import numpy as np

from halfmoon.errors import InvalidRequest
from halfmoon.sim.workloads.arrival_processes import ArrivalProcess, arrivals
from halfmoon.sim.workloads.lengths import Lengths
from halfmoon.sim.workloads.workload import Workload

MOST_TOKENS = 32_768  # of a drawn prompt or output: a lognormal has no end


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
    """Drawn requests. Lengths and arrivals have generators of their own: another rate asks the same of the cluster."""
    if seed < 0:
        raise InvalidRequest(f"a seed must not be negative, got {seed}", param="seed")
    arrival_rng, prompt_rng, output_rng = (np.random.default_rng(one) for one in np.random.SeedSequence(seed).spawn(3))
    return Workload(
        arrivals(process, num_requests, rate_per_s, arrival_rng, cv),
        lengths.prompt.sample(num_requests, prompt_rng, most_tokens),
        lengths.output.sample(num_requests, output_rng, most_tokens),
    )
