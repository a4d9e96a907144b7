"""What one worker of each option holds alone: the halves of DistServe's algorithm 1, simulated apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from halfmoon.plan.feasible import Option
from halfmoon.plan.goodput import Trial, goodput_per_s
from halfmoon.plan.layout import Parallelism
from halfmoon.plan.question import Question
from halfmoon.policy.cluster_view import Role
from halfmoon.policy.latency import PrefillModel
from halfmoon.sim.cluster import ClusterSpec, Network, Targets, WorkerGroup
from halfmoon.sim.latency import LatencyModel, PrefillPiece

KEPT = 3  # options of each role that layouts are made of
_WAVE = 4  # simulated before it is looked again what the bounds rule out; fixed, so that plans do not depend on cores
_NO_TIME_S = 1e-9  # what fits a latency divides by it
_TOLERANCE = 1.08
_INSTANT = Network(bytes_per_s=1e15, latency_s=0.0, node_bytes_per_s=1e15, handover="pull")

_Item = TypeVar("_Item")


def waves(items: Sequence[_Item]) -> Iterator[Sequence[_Item]]:
    """In order, as many at a time as are simulated at once."""
    return (items[at : at + _WAVE] for at in range(0, len(items), _WAVE))


@dataclass(frozen=True, slots=True)
class Half:
    """An option, and the goodput of one such worker whose other half is no hindrance."""

    option: Option
    goodput_per_s: float

    @property
    def per_gpu(self) -> float:
        """Requests a second for each device."""
        return self.goodput_per_s / self.option.parallelism.num_devices


def best_halves(
    question: Question,
    known: Mapping[Parallelism, LatencyModel],
    options: Sequence[Option],
    pool: Executor,
    on_done: Callable[[int], None],
) -> dict[Role, list[Half]]:
    """The best of each role by goodput for each GPU; those whose bound is below what is kept are not simulated."""
    found: dict[Role, list[Half]] = {"prefill": [], "decode": [], "both": []}
    for role, kept in found.items():
        mine = [one for one in options if one.role == role]
        mine.sort(key=lambda one: (-one.bound.steady_per_s / one.parallelism.num_devices, one.parallelism))
        for wave in waves(mine):
            least = kept[KEPT - 1].per_gpu if len(kept) >= KEPT else 0.0
            chosen = [one for one in wave if one.bound.most_per_s / one.parallelism.num_devices > least]
            trials = [half_trial(question, known, one) for one in chosen]
            rates = pool.map(
                goodput_per_s, trials, [one.bound.steady_per_s for one in chosen], [_TOLERANCE] * len(chosen)
            )
            kept += [Half(one, rate) for one, rate in zip(chosen, rates, strict=True) if rate > 0]
            kept.sort(key=lambda one: (-one.per_gpu, one.option.parallelism))
            on_done(len(wave))
    return found


def half_trial(question: Question, known: Mapping[Parallelism, LatencyModel], option: Option) -> Trial:
    """One worker of the option, and another that takes no time for the other half."""
    model, workload, targets = known[option.parallelism], question.workload, question.goal.targets
    limits = question.rules.limits[option.role]
    worker = WorkerGroup(option.role, 1, model, limits)
    if option.role == "both":
        return Trial(ClusterSpec((worker,), question.rules.network), workload, question.goal, question.seed)
    if option.role == "prefill":
        other = WorkerGroup("decode", 1, model)
        workload = replace(workload, output_tokens=np.ones_like(workload.output_tokens))
        goal = replace(question.goal, targets=Targets(targets.ttft_s, None))
    else:
        instant = replace(
            model, prefill=(PrefillPiece(0, PrefillModel(_NO_TIME_S, 0.0, 0.0)),), num_stages=1, launch_s=0.0
        )
        most = int(workload.prompt_tokens.max())
        other = WorkerGroup(
            "prefill", 1, replace(instant, launch_s_per_token=0.0), replace(limits, max_batch_tokens=most)
        )
        goal = replace(question.goal, targets=replace(targets, ttft_s=None))
    return Trial(ClusterSpec((worker, other), _INSTANT), workload, goal, question.seed)
