"""What one worker of each option holds alone: the halves of DistServe's algorithm 1, simulated apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from halfmoon.plan.feasible import Option
from halfmoon.plan.goodput import Trial, goodput_per_s
from halfmoon.plan.layout import WorkerKind
from halfmoon.plan.question import Question
from halfmoon.policy.cluster_view import Role
from halfmoon.policy.latency import PrefillModel
from halfmoon.sim.cluster import ClusterSpec, Network, Targets, WorkerGroup
from halfmoon.sim.latency import LatencyModel, PrefillPiece

_KEPT, _KEPT_OF_EACH = 3, 2  # options of each role and GPU that layouts are made of: of one kind of GPU, of several
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
    """An option, and the goodput of one such worker whose other half is no hindrance.

    It is never more than a run without end could have, whose memory fills: a short one may hold any rate.
    """

    option: Option
    model: LatencyModel
    goodput_per_s: float

    @property
    def per_gpu(self) -> float:
        """Requests a second for each device."""
        return self.goodput_per_s / self.option.kind.num_devices


def best_halves(
    question: Question,
    known: Mapping[WorkerKind, LatencyModel],
    options: Sequence[Option],
    pool: Executor,
    on_done: Callable[[int], None],
) -> dict[Role, list[Half]]:
    """The best of each role and GPU by goodput for each device."""
    roles: tuple[Role, ...] = ("prefill", "decode", "both")
    found: dict[Role, list[Half]] = {role: [] for role in roles}
    num = _KEPT_OF_EACH if question.fleet.is_mixed else _KEPT
    for role, kept in found.items():
        for gpu in question.fleet.names:
            mine = [one for one in options if one.role == role and one.kind.gpu == gpu]
            kept += _best(question, known, mine, pool, on_done, num)
    return found


def _best(
    question: Question,
    known: Mapping[WorkerKind, LatencyModel],
    mine: Sequence[Option],
    pool: Executor,
    on_done: Callable[[int], None],
    num: int,
) -> list[Half]:
    """The `num` best of one role and GPU, and the smallest, which wastes least where one is more than enough.

    Those whose bound is below what is kept are not simulated.
    """
    kept: list[Half] = []
    ordered = sorted(mine, key=lambda one: (-one.bound.steady_per_s / one.kind.num_devices, one.kind))
    for wave in waves(ordered):
        least = kept[num - 1].per_gpu if len(kept) >= num else 0.0
        chosen = [one for one in wave if one.bound.steady_per_s / one.kind.num_devices > least]
        trials = [half_trial(question, known, one) for one in chosen]
        floors = [least * one.kind.num_devices for one in chosen]
        guesses = [one.bound.steady_per_s for one in chosen]
        rates = pool.map(goodput_per_s, trials, guesses, floors, [_TOLERANCE] * len(chosen))
        steady = [min(rate, one.bound.steady_per_s) for one, rate in zip(chosen, rates, strict=True)]
        kept += [Half(one, known[one.kind], rate) for one, rate in zip(chosen, steady, strict=True) if rate > 0]
        kept.sort(key=lambda one: (-one.per_gpu, one.option.kind))
        on_done(len(wave))
    fewest = min((one.option.kind.num_devices for one in kept[:num]), default=math.inf)
    smaller = sorted(
        (one for one in mine if one.kind.num_devices < fewest), key=lambda one: (one.kind.num_devices, one.kind)
    )
    for option in smaller:
        rate = goodput_per_s(half_trial(question, known, option), option.bound.steady_per_s, 0.0, _TOLERANCE)
        if rate > 0:
            return [*kept[:num], Half(option, known[option.kind], min(rate, option.bound.steady_per_s))]
    return kept[:num]


def half_trial(question: Question, known: Mapping[WorkerKind, LatencyModel], option: Option) -> Trial:
    """One worker of the option, and another that takes no time for the other half."""
    model, workload, targets = known[option.kind], question.workload, question.goal.targets
    limits = question.rules.limits[option.role]
    worker = WorkerGroup(option.role, 1, model, limits)
    if option.role == "both":
        return Trial(ClusterSpec((worker,)), workload, question.goal, question.seed)
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
