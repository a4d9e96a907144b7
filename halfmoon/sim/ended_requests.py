"""What is kept of requests that are over: a million of them are columns, not objects."""

from __future__ import annotations

import math

import numpy as np

from halfmoon.sim.cluster.job import Job
from halfmoon.sim.result import OUTCOMES
from halfmoon.sim.workloads.workload import Floats, Ints


class EndedRequests:
    """Owns the figures of each request as of its end, by its index. Times are -1 or NaN where there is none."""

    def __init__(self, num_requests: int) -> None:
        self.first_s: Floats = np.full(num_requests, -1.0)  # token
        self.begun_s: Floats = np.full(num_requests, -1.0)
        self.end_s: Floats = np.full(num_requests, -1.0)
        self.longest_gap_s: Floats = np.full(num_requests, math.nan)
        self.tail_gap_s: Floats = np.full(num_requests, math.nan)
        self.num_output: Ints = np.zeros(num_requests, dtype=np.int64)
        self.outcome = np.zeros(num_requests, dtype=np.int8)  # index into OUTCOMES
        self.cached_tokens: Ints = np.zeros(num_requests, dtype=np.int64)
        self.num_failovers: Ints = np.zeros(num_requests, dtype=np.int64)

    def add(self, job: Job) -> None:
        """It is over; one without an outcome never came to an end."""
        row = job.index
        self.first_s[row] = job.first_s
        self.begun_s[row] = job.begun_s
        self.end_s[row] = job.end_s
        self.longest_gap_s[row] = job.longest_gap_s
        self.tail_gap_s[row] = job.tail_gap_s
        self.num_output[row] = job.generated
        self.outcome[row] = OUTCOMES.index(job.outcome or "failed")
        self.cached_tokens[row] = job.cached_tokens
        self.num_failovers[row] = job.num_failovers
