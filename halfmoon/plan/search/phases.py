"""One phase alone: workers of one kind, with an ideal other phase that takes no time (DistServe, algorithm 1).

A layout that holds a rate also holds it with an ideal other phase. So phases alone say how many workers are needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from halfmoon.plan.layout import WorkerKind
from halfmoon.plan.layout_trial import layer_passes
from halfmoon.plan.problem import PlanningProblem
from halfmoon.plan.search.bounds import prefill_bound_per_s
from halfmoon.plan.search.feasible import Option
from halfmoon.plan.search.goodput import Trial, goodput_per_s, holds_at_first, may_hold_at_first
from halfmoon.policy.models.latency import PrefillModel
from halfmoon.sim.cluster.cluster_spec import ClusterSpec, Network, SloTargets, WorkerGroup
from halfmoon.sim.latency_sources.latency_model import LatencyModel, PrefillPiece

_NO_TIME_S = 1e-9  # latency fits divide by it
_NO_LIMIT_TOKENS = 1 << 40
_ROUNDING = 1e-9
_TOLERANCE = 1.1
_INSTANT = Network(bytes_per_s=1e15, latency_s=0.0, node_bytes_per_s=1e15, handover="pull")


@dataclass(frozen=True, slots=True)
class Phase:
    """An option, and the goodput of one such worker alone, or its share of as many as share a prompt, from a first
    look.
    """

    option: Option
    alone_per_s: float

    def guess_per_s(self, num: int) -> float:
        """Estimated goodput of `num` workers. They share their slack for bursts, which grows as the root of their
        number, or of that of the groups that share a prompt.
        """
        most, degree = max(self.option.bound.typical_per_s, self.alone_per_s), self.option.degree
        return num * most - math.sqrt(num * degree) * (most - self.alone_per_s)


def promised_per_s(
    problem: PlanningProblem, models: Mapping[WorkerKind, LatencyModel], phases: Sequence[Phase], nums: Sequence[int]
) -> tuple[float, float]:
    """An estimate and a bound of a layout's goodput, from its phases alone.

    Where decode workers compute prompts, those take a share of the time that answers leave.
    """
    guesses = [phase.guess_per_s(num) for phase, num in zip(phases, nums, strict=True)]
    bounds = [phase.option.bound.most_per_s * num for phase, num in zip(phases, nums, strict=True)]
    if problem.kept_share and len(phases) > 1:
        kind, goal, limits = phases[1].option.kind, problem.goal, problem.rules.limits["decode"]
        kept = prefill_bound_per_s(models[kind], problem.workload, goal, limits, problem.kept_kv)
        bounds[0] += nums[1] * kept.most_per_s
        more_per_s = problem.kept_share * nums[1] * kept.typical_per_s
        guesses[0] = (guesses[0] + more_per_s) / (1 + more_per_s / max(guesses[1], _ROUNDING))
    return min(guesses), min(bounds)


def measured_phase(problem: PlanningProblem, models: Mapping[WorkerKind, LatencyModel], option: Option) -> Phase:
    """Measures a phase with a few requests that arrive once."""
    num = option.degree
    trial = phase_trial(problem, models, option, num)
    trial = replace(trial, workload=trial.workload.first(problem.num_first))
    guess_per_s = num * option.bound.typical_per_s / 2
    together_per_s = goodput_per_s(trial, guess_per_s, _TOLERANCE, holds_at_first, num * option.bound.most_per_s)
    return Phase(option, together_per_s / num)


def least_workers(
    problem: PlanningProblem, models: Mapping[WorkerKind, LatencyModel], option: Option, most: int
) -> int | None:
    """The fewest workers that hold the rate at first, with an ideal other phase; None: more than `most`."""
    rate_per_s = problem.rate_per_s
    assert rate_per_s is not None

    def is_enough(num: int) -> bool:
        trial = phase_trial(problem, models, option, num).first_look(problem.num_first)
        return holds_at_first(trial, rate_per_s) if problem.is_thorough else may_hold_at_first(trial, rate_per_s)

    bounds = (option.bound.most_per_s, option.bound.typical_per_s)
    low, guess = (
        max(math.ceil(rate_per_s / one * (1 - _ROUNDING)), option.degree) if one else most + 1 for one in bounds
    )
    return least(is_enough, low, max(low, guess), most)


def least(is_enough: Callable[[int], bool], low: int, guess: int, most: int) -> int | None:
    """The smallest sufficient number from `low` on, for a monotonic test; None: not even `most` is sufficient."""
    if low > most:
        return None
    high, step = min(guess, most), 1
    if is_enough(high):
        while high > low and is_enough(max(high - step, low)):
            high, step = max(high - step, low), 2 * step
        low = max(high - step + 1, low)
    else:
        while True:
            if high >= most:
                return None
            low, high, step = high + 1, min(high + step, most), 2 * step
            if is_enough(high):
                break
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle + 1, high)
    return high


def phase_trial(
    problem: PlanningProblem, models: Mapping[WorkerKind, LatencyModel], option: Option, num: int = 1
) -> Trial:
    """`num` workers of the option, and one worker that takes no time for the other phase."""
    model, workload, targets = models[option.kind], problem.workload, problem.goal.targets
    limits = problem.rules.limits[option.role]
    worker = WorkerGroup(option.role, num, model, limits, layer_passes=layer_passes(option.role, option.degree))
    if option.role == "both":
        return Trial(ClusterSpec((worker,), kv_policy=problem.kv_policy), workload, problem.goal, problem.seed)
    if option.role == "prefill":
        other = WorkerGroup("decode", 1, model, kv_tokens=_NO_LIMIT_TOKENS)
        workload = replace(workload, output_tokens=np.ones_like(workload.output_tokens))
        goal = replace(problem.goal, targets=SloTargets(targets.ttft_s, None))
    else:
        instant = replace(
            model, prefill=(PrefillPiece(0, PrefillModel(_NO_TIME_S, 0.0, 0.0)),), num_stages=1, launch_s=0.0, host=None
        )
        most = int(workload.prompt_tokens.max())
        other = WorkerGroup(
            "prefill",
            1,
            replace(instant, launch_s_per_token=0.0),
            replace(limits, max_batch_tokens=most),
            kv_tokens=_NO_LIMIT_TOKENS,
        )
        goal = replace(problem.goal, targets=replace(targets, ttft_s=None))
    spec = ClusterSpec((worker, other), _INSTANT, kv_policy=problem.kv_policy, max_prefill_degree=option.degree)
    return Trial(spec, workload, goal, problem.seed)
