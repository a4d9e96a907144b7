"""Which layouts there are: workers of one kind that do both, or of one kind for each half, apart or paired in units."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from halfmoon.plan.layout import Layout, WorkerKind, WorkerSet
from halfmoon.plan.layout_trial import layout_network
from halfmoon.plan.problem import PlanningProblem
from halfmoon.plan.search.feasible import Option
from halfmoon.policy.view.worker_view import Role
from halfmoon.sim.cluster.kv_codecs import KvCodecName
from halfmoon.sim.latency_sources.latency_model import LatencyModel

_BUSY_LINK = 0.3  # share of a port's time from which on a codec is tried


class Kinds(NamedTuple):
    """What layouts of one combination have in common; they differ in numbers alone."""

    workers: tuple[tuple[Role, WorkerKind], ...]
    is_paired: bool
    codec: KvCodecName


def kinds_of(layout: Layout) -> Kinds:
    """The combination that a layout is of."""
    return Kinds(tuple((one.role, one.kind) for one in layout.sets), layout.is_paired, layout.codec)


@dataclass(frozen=True, slots=True)
class Combination:
    """One or two options, whose numbers are open. Two on a single node share it: their KV never leaves it."""

    options: tuple[Option, ...]
    is_paired: bool

    @property
    def is_colocated(self) -> bool:
        """Whether workers do both halves."""
        return len(self.options) == 1

    def layout(self, nums: Sequence[int], num_units: int = 1) -> Layout:
        """With so many workers of each option in each unit."""
        sets = (WorkerSet(one.role, one.kind, num) for one, num in zip(self.options, nums, strict=True))
        return Layout(tuple(sets), num_units, self.is_paired)


def combinations(question: PlanningProblem, options: Sequence[Option]) -> Iterator[Combination]:
    """All that the question allows."""
    of_role = {role: [one for one in options if one.role == role] for role in ("prefill", "decode", "both")}
    yield from (Combination((one,), is_paired=False) for one in of_role["both"])
    for prefill in of_role["prefill"]:
        for decode in of_role["decode"]:
            pair = prefill, decode
            is_one_gpu = prefill.kind.gpu == decode.kind.gpu
            is_one_node = is_one_gpu and question.fleet.pool(prefill.kind.gpu).num_nodes == 1
            if question.affinity != "low" and not is_one_node:
                yield Combination(pair, is_paired=False)
            if is_one_node or (question.affinity != "high" and is_one_gpu):
                yield Combination(pair, is_paired=True)


def with_codecs(question: PlanningProblem, model: LatencyModel, layout: Layout, rate_per_s: float) -> Iterator[Layout]:
    """With each codec that there may be, where KV takes long enough on its way to be worth one."""
    is_between_nodes = not layout.is_paired and not layout.is_colocated
    for codec in question.codecs if is_between_nodes else question.codecs[:1]:
        if codec == question.codecs[0] or _is_link_slow(question, model, layout, rate_per_s):
            yield replace(layout, codec=codec if is_between_nodes else "raw")


def _is_link_slow(question: PlanningProblem, model: LatencyModel, layout: Layout, rate_per_s: float) -> bool:
    """Whether a long prompt's KV takes more than a gap between tokens, or ports are busy."""
    network = layout_network(question, layout)
    prompts = question.workload.prompt_tokens
    kv_s = model.kv_bytes_per_token / network.bytes_per_s
    ports = sum(
        -(-each.num_gpus // question.fleet.pool(each.kind.gpu).gpus_per_node)
        for each in layout.sets
        if each.role == "prefill"
    )
    long = float(np.quantile(prompts, question.goal.attainment))
    return long * kv_s > question.goal.gap_s or rate_per_s * float(prompts.mean()) * kv_s > _BUSY_LINK * ports


def larger(question: PlanningProblem, layout: Layout, options: Sequence[Option]) -> Iterator[Layout]:
    """With one worker more of one role in each unit; where its kind of GPU is used up, with one of another kind.

    Only what fits the nodes.
    """
    for role in dict.fromkeys(one.role for one in layout.sets):
        same = [_with_another(layout, role, one.kind) for one in layout.sets if one.role == role]
        fitting = [one for one in same if one.fits(question.fleet)]
        if not fitting and not layout.is_paired:
            mine = {one.kind.gpu for one in layout.sets if one.role == role}
            others = (one.kind for one in options if one.role == role and one.kind.gpu not in mine)
            added = (_with_another(layout, role, kind) for kind in others)
            fitting = [one for one in added if one.fits(question.fleet)]
        yield from fitting


def _with_another(layout: Layout, role: Role, kind: WorkerKind) -> Layout:
    sets = layout.sets
    if any((one.role, one.kind) == (role, kind) for one in sets):
        same = (one.role == role and one.kind == kind for one in sets)
        return replace(
            layout,
            sets=tuple(
                one._replace(num=_more(one.num)) if is_same else one for one, is_same in zip(sets, same, strict=True)
            ),
        )
    last = max(at for at, one in enumerate(sets) if one.role == role)
    return replace(layout, sets=(*sets[: last + 1], WorkerSet(role, kind, 1), *sets[last + 1 :]))


def _more(num: int) -> int:
    """One more, or a thirty-second of many."""
    return num + max(num // 32, 1)
