"""How many prefill workers may compute one prompt: which workers can, and which numbers can pay.

The gateway decides for each prompt (`policy.placement.prompt_sharing`). A layout says how many it may take at most.
"""

from __future__ import annotations

import math

from halfmoon.plan.layout import WorkerKind
from halfmoon.plan.problem import PlanningProblem
from halfmoon.policy.models.segments import SEGMENT_PASSES, SegmentWorker, plan_segments
from halfmoon.policy.placement.prompt_sharing import CLEARLY_SOONER
from halfmoon.sim.cluster.cluster_spec import BLOCK_TOKENS
from halfmoon.sim.latency_sources.latency_model import LatencyModel, LatencySource
from halfmoon.sim.latency_sources.measured_profile import MeasuredProfile
from halfmoon.sim.worker.kept_kv import policy_of


def is_on_cpu(source: LatencySource, gpu: str) -> bool:
    """Whether steps of workers with these times can wait for layers, as those on GPUs cannot."""
    return (source.device if isinstance(source, MeasuredProfile) else gpu) == "cpu"


def can_share(problem: PlanningProblem, kind: WorkerKind) -> bool:
    """Whether such workers compute prompts together: those of one device, on CPUs, that keep all KV."""
    is_one = kind.num_devices == 1 and not any(kind.host)
    return is_one and is_on_cpu(problem.sources[kind.gpu], kind.gpu) and policy_of(problem.kv_policy) is None


def degrees(problem: PlanningProblem, kind: WorkerKind, model: LatencyModel, most: int) -> list[int]:
    """Numbers from 2 to `most` with which the workload's longest prompt comes clearly sooner: powers of two, and
    `most`.
    """
    if not can_share(problem, kind):
        return []
    longest = int(problem.workload.prompt_tokens.max())
    enough_s = CLEARLY_SOONER * model.policy_prefill.seconds(longest)
    tried = sorted({most, *(2**power for power in range(1, most.bit_length()))} - {1})
    return [degree for degree in tried if shared_s(problem, model, longest, degree) <= enough_s]


def shared_s(problem: PlanningProblem, model: LatencyModel, num_tokens: float, degree: int) -> float:
    """Seconds to the first token of a prompt on `degree` idle workers; infinite if it is too short for them."""
    worker = SegmentWorker(model.policy_prefill, problem.rules.limits["prefill"].max_batch_tokens)
    plan = plan_segments([worker] * degree, int(num_tokens), 0, BLOCK_TOKENS, SEGMENT_PASSES)
    return math.inf if plan is None else plan.seconds
