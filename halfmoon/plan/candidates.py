"""Which layouts are worth simulating: pairs of the best halves, in numbers that their goodputs suggest."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from halfmoon.plan.halves import Half
from halfmoon.plan.layout import Layout, WorkerSet
from halfmoon.plan.question import Question
from halfmoon.plan.unit import layout_network
from halfmoon.policy.cluster_view import Role
from halfmoon.sim.latency import LatencyModel

_MOST_IN_UNIT = 8  # workers of a role, where no rate says how many: larger numbers repeat the ratio
_POOLING = 1.15  # units hold a little more than their halves alone
_BUSY_LINK = 0.3  # share of a port's time from which on a codec is tried


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout with what its halves suggest that it holds, and what it cannot exceed for ever, in requests a second."""

    layout: Layout
    guess_per_s: float
    bound_per_s: float

    def larger(self, sets: tuple[WorkerSet, ...], num_units: int) -> Candidate:
        """With more workers, in proportion."""
        layout = replace(self.layout, sets=sets, num_units=num_units)
        factor = layout.num_gpus / self.layout.num_gpus
        return Candidate(layout, self.guess_per_s * factor, self.bound_per_s * factor)


def candidates(question: Question, halves: Mapping[Role, Sequence[Half]]) -> list[Candidate]:
    """Every one fits the nodes, or there are several kinds of GPU and what is missing may come of another."""
    pairs = [(prefill, decode) for prefill in halves["prefill"] for decode in halves["decode"]]
    groups = [*pairs, *((one,) for one in halves["both"])]
    return [one for group in groups for one in _sized(question, group)]


def _sized(question: Question, halves: tuple[Half, ...]) -> Iterator[Candidate]:
    gpus = {one.option.kind.gpu for one in halves}
    is_one_node = len(gpus) == 1 and question.fleet.pool(next(iter(gpus))).num_nodes == 1
    if len(halves) == 1:
        yield from _one_unit(question, halves, is_paired=False)
    elif is_one_node:
        yield from _one_unit(question, halves, is_paired=True)
    else:
        if question.affinity != "low":
            for one in _one_unit(question, halves, is_paired=False):
                yield from _with_codecs(question, halves[0].model, one)
        if question.affinity != "high" and len(gpus) == 1:
            yield from _paired(question, halves)


def _one_unit(question: Question, halves: tuple[Half, ...], *, is_paired: bool) -> Iterator[Candidate]:
    if question.rate_per_s is None:
        yield from _best_ratio(question, halves, is_paired)
        return
    counts = tuple(_fewest(question.rate_per_s, one) for one in halves)
    found = _candidate(halves, counts, is_paired)
    while question.fleet.is_mixed and max(counts) > 1 and not found.layout.fits(question.fleet):
        largest = max(range(len(counts)), key=lambda at: counts[at] * halves[at].option.kind.num_devices)
        counts = tuple(max(num - (at == largest), 1) for at, num in enumerate(counts))
        found = _candidate(halves, counts, is_paired)
    if found.layout.fits(question.fleet):
        yield found


def _fewest(rate_per_s: float, half: Half) -> int:
    """Workers that may hold the rate, rather too few: together they hold more than alone, the more the fewer they are.

    Never fewer than are busy all the time with it.
    """
    alone = rate_per_s / half.goodput_per_s
    return max(math.ceil(alone / (1 + 1 / math.sqrt(alone))), math.ceil(rate_per_s / half.option.bound.steady_per_s), 1)


def _best_ratio(question: Question, halves: tuple[Half, ...], is_paired: bool) -> Iterator[Candidate]:
    """The numbers that leave least idle; of one worker that does both, one and as many as fit."""
    numbers = range(1, min(question.fleet.num_gpus, _MOST_IN_UNIT) + 1)
    grids = [(one,) for one in numbers] if len(halves) == 1 else [(one, other) for one in numbers for other in numbers]
    made = [_candidate(halves, counts, is_paired) for counts in grids]
    fitting = [one for one in made if one.layout.fits(question.fleet)]
    if len(halves) == 1:
        yield from {one.layout: one for one in (fitting[:1] + fitting[-1:])}.values()
    elif fitting:
        yield max(fitting, key=lambda one: (one.guess_per_s / question.cost(one.layout), -one.layout.num_gpus))


def _paired(question: Question, halves: tuple[Half, ...]) -> Iterator[Candidate]:
    """Units whose prefill and decode workers share nodes, as many as the rate needs."""
    for unit in _best_ratio(question, halves, True):
        rate_per_s = question.rate_per_s or 0.0
        least = unit.guess_per_s * _POOLING, unit.bound_per_s
        num_units = max(1, *(math.ceil(rate_per_s / one) for one in least))
        layout = replace(unit.layout, num_units=num_units)
        if layout.fits(question.fleet):
            yield Candidate(layout, unit.guess_per_s * num_units, unit.bound_per_s * num_units)


def _with_codecs(question: Question, model: LatencyModel, one: Candidate) -> Iterator[Candidate]:
    """Each codec that there may be, where KV takes long enough on its way to be worth one."""
    for codec in question.codecs:
        if codec == question.codecs[0] or _is_link_slow(question, model, one):
            yield replace(one, layout=replace(one.layout, codec=codec))


def _is_link_slow(question: Question, model: LatencyModel, one: Candidate) -> bool:
    """Whether a long prompt's KV takes more than a gap between tokens, or ports are busy."""
    network = layout_network(question, one.layout)
    prompts = question.workload.prompt_tokens
    kv_s = model.kv_bytes_per_token / network.bytes_per_s
    ports = sum(
        -(-each.num_gpus // question.fleet.pool(each.kind.gpu).gpus_per_node)
        for each in one.layout.sets
        if each.role == "prefill"
    )
    rate_per_s = question.rate_per_s or one.guess_per_s
    long = float(np.quantile(prompts, question.goal.attainment))
    return long * kv_s > question.goal.gap_s or rate_per_s * float(prompts.mean()) * kv_s > _BUSY_LINK * ports


def _candidate(halves: tuple[Half, ...], counts: tuple[int, ...], is_paired: bool) -> Candidate:
    numbered = list(zip(halves, counts, strict=True))
    sets = tuple(WorkerSet(one.option.role, one.option.kind, count) for one, count in numbered)
    return Candidate(
        Layout(sets, is_paired=is_paired),
        min(one.goodput_per_s * count for one, count in numbered),
        min(one.option.bound.steady_per_s * count for one, count in numbered),
    )
