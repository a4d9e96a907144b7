"""The possible layouts: workers of one kind for both phases, or one kind for each phase, apart or paired in units."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from halfmoon.plan.layout import Layout, WorkerKind, WorkerSet
from halfmoon.plan.layout_trial import layout_network
from halfmoon.plan.problem import PlanningProblem
from halfmoon.plan.search.feasible import Option
from halfmoon.policy.view.worker_view import ROLES, Role
from halfmoon.sim.cluster.kv_codecs import KvCodecName
from halfmoon.sim.latency_sources.latency_model import LatencyModel

_BUSY_LINK = 0.3  # share of a port's time above which codecs are tried


class Kinds(NamedTuple):
    """The common part of a combination's layouts, which differ in numbers only."""

    workers: tuple[tuple[Role, WorkerKind], ...]
    is_paired: bool
    codec: KvCodecName
    prefill_degree: int


def kinds_of(layout: Layout) -> Kinds:
    """The combination of a layout."""
    workers = tuple((workers.role, workers.kind) for workers in layout.sets)
    return Kinds(workers, layout.is_paired, layout.codec, layout.prefill_degree)


@dataclass(frozen=True, slots=True)
class Combination:
    """One or two options whose numbers are open. Two options on a single node share it, so their KV never leaves it."""

    options: tuple[Option, ...]
    is_paired: bool

    @property
    def is_colocated(self) -> bool:
        """Whether workers do both phases."""
        return len(self.options) == 1

    @property
    def degree(self) -> int:
        """Most prefill workers that compute one prompt."""
        return self.options[0].degree

    def layout(self, nums: Sequence[int], num_units: int = 1) -> Layout:
        """The layout with `nums` workers of each option in each unit."""
        sets = (WorkerSet(one.role, one.kind, num) for one, num in zip(self.options, nums, strict=True))
        return Layout(tuple(sets), num_units, self.is_paired, prefill_degree=self.degree)


def combinations(problem: PlanningProblem, options: Sequence[Option]) -> Iterator[Combination]:
    """All combinations that the problem allows."""
    of_role = {role: [option for option in options if option.role == role] for role in ROLES}
    yield from (Combination((option,), is_paired=False) for option in of_role["both"])
    for prefill in of_role["prefill"]:
        for decode in of_role["decode"]:
            pair = prefill, decode
            is_one_gpu = prefill.kind.gpu == decode.kind.gpu
            is_one_node = is_one_gpu and problem.fleet.pool(prefill.kind.gpu).num_nodes == 1
            if problem.affinity != "low" and not is_one_node:
                yield Combination(pair, is_paired=False)
            if is_one_node or (problem.affinity != "high" and is_one_gpu):
                yield Combination(pair, is_paired=True)


def with_codecs(problem: PlanningProblem, model: LatencyModel, layout: Layout, rate_per_s: float) -> Iterator[Layout]:
    """The layout with each allowed codec, if KV transfers take long enough to be worth one."""
    is_between_nodes = not layout.is_paired and not layout.is_colocated
    for codec in problem.codecs if is_between_nodes else problem.codecs[:1]:
        if codec == problem.codecs[0] or _is_link_slow(problem, model, layout, rate_per_s):
            yield replace(layout, codec=codec if is_between_nodes else "raw")


def _is_link_slow(problem: PlanningProblem, model: LatencyModel, layout: Layout, rate_per_s: float) -> bool:
    """Whether a long prompt's KV takes longer than a gap between tokens, or ports are busy."""
    network = layout_network(problem, layout)
    prompts = problem.workload.prompt_tokens
    kv_s = model.kv_bytes_per_token / network.bytes_per_s
    ports = sum(
        -(-workers.num_gpus // problem.fleet.pool(workers.kind.gpu).gpus_per_node)
        for workers in layout.sets
        if workers.role == "prefill"
    )
    long = float(np.quantile(prompts, problem.goal.attainment))
    return long * kv_s > problem.goal.gap_s or rate_per_s * float(prompts.mean()) * kv_s > _BUSY_LINK * ports


def larger(problem: PlanningProblem, layout: Layout, options: Sequence[Option]) -> Iterator[Layout]:
    """Layouts with one more worker of one role in each unit, as far as they fit the nodes.

    If the GPUs of a role are used up, the new worker has another kind of GPU.
    """
    for role in dict.fromkeys(workers.role for workers in layout.sets):
        same = [_with_another(layout, role, workers.kind) for workers in layout.sets if workers.role == role]
        fitting = [layout for layout in same if layout.fits(problem.fleet)]
        if not fitting and not layout.is_paired:
            mine = {workers.kind.gpu for workers in layout.sets if workers.role == role}
            others = (option.kind for option in options if option.role == role and option.kind.gpu not in mine)
            added = (_with_another(layout, role, kind) for kind in others)
            fitting = [layout for layout in added if layout.fits(problem.fleet)]
        yield from fitting


def _with_another(layout: Layout, role: Role, kind: WorkerKind) -> Layout:
    sets = layout.sets
    if any((workers.role, workers.kind) == (role, kind) for workers in sets):
        same = (workers.role == role and workers.kind == kind for workers in sets)
        return replace(
            layout,
            sets=tuple(
                one._replace(num=_more(one.num)) if is_same else one for one, is_same in zip(sets, same, strict=True)
            ),
        )
    last = max(at for at, one in enumerate(sets) if one.role == role)
    return replace(layout, sets=(*sets[: last + 1], WorkerSet(role, kind, 1), *sets[last + 1 :]))


def _more(num: int) -> int:
    """One more; for large numbers a thirty-second more."""
    return num + max(num // 32, 1)
