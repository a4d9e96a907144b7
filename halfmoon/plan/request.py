"""What a user asks of the planner, in the words of the command line: plain values, as a service gets them."""

from __future__ import annotations

from dataclasses import dataclass

from halfmoon.plan.question import Affinity, Objective
from halfmoon.sim.cluster import TbtOf
from halfmoon.sim.result import Criterion


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """Nothing is checked here: `make_plan` does that. None is the default that `halfmoon plan --help` names.

    - workload: a trace's path, `chat`, `code`, … or `in=512,out=64`.
    - latency: what `latency_source` takes; None: the model's roofline.
    - num_requests: that are simulated each time; of a trace the first.
    """

    model: str
    gpu: str
    workload: str
    ttft_s: float
    tpot_s: float
    tbt_s: float | None = None
    tbt_of: TbtOf = "longest-tenth"
    num_nodes: int = 1
    gpus_per_node: int = 8
    rate_per_s: float | None = None
    attainment: float = 0.9
    criterion: Criterion = "joint"
    objective: Objective | None = None
    affinity: Affinity = "auto"
    latency: str | None = None
    max_running: int = 256
    num_requests: int | None = None
    seed: int = 0
