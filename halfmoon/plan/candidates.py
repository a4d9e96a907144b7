"""Which layouts are worth simulating: pairs of the best halves, in numbers that their goodputs suggest."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from halfmoon.plan.halves import Half
from halfmoon.plan.layout import Layout, WorkerSet
from halfmoon.plan.question import Question
from halfmoon.policy.cluster_view import Role

_MOST_IN_UNIT = 8  # workers of a role, where no rate says how many: larger numbers repeat the ratio
_POOLING = 1.15  # several workers hold a little more than as many alone


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout with what its halves suggest that it holds, and what it cannot exceed, in requests a second."""

    layout: Layout
    guess_per_s: float
    bound_per_s: float

    def larger(self, sets: tuple[WorkerSet, ...], num_units: int) -> Candidate:
        """With more workers, in proportion."""
        layout = replace(self.layout, sets=sets, num_units=num_units)
        factor = layout.num_gpus / self.layout.num_gpus
        return Candidate(layout, self.guess_per_s * factor, math.inf)


def candidates(question: Question, halves: Mapping[Role, Sequence[Half]]) -> list[Candidate]:
    """Every one fits the nodes."""
    pairs = [(prefill, decode) for prefill in halves["prefill"] for decode in halves["decode"]]
    groups = [*pairs, *((one,) for one in halves["both"])]
    return [one for group in groups for one in _sized(question, group)]


def _sized(question: Question, halves: tuple[Half, ...]) -> Iterator[Candidate]:
    if len(halves) == 1 or question.num_nodes == 1:
        yield from _one_unit(question, halves, is_paired=question.num_nodes == 1 and len(halves) > 1)
        return
    if question.affinity != "low":
        yield from _one_unit(question, halves, is_paired=False)
    if question.affinity != "high":
        yield from _paired(question, halves)


def _one_unit(question: Question, halves: tuple[Half, ...], *, is_paired: bool) -> Iterator[Candidate]:
    if question.rate_per_s is None:
        yield from _best_ratio(question, halves, is_paired)
        return
    counts = tuple(math.ceil(question.rate_per_s / one.goodput_per_s / _POOLING) for one in halves)
    found = _candidate(halves, counts, is_paired)
    if found.layout.fits(question.num_nodes, question.gpus_per_node):
        yield found


def _best_ratio(question: Question, halves: tuple[Half, ...], is_paired: bool) -> Iterator[Candidate]:
    """The numbers that leave least idle; of one worker that does both, one and as many as fit."""
    numbers = range(1, min(question.num_gpus, _MOST_IN_UNIT) + 1)
    grids = [(one,) for one in numbers] if len(halves) == 1 else [(one, other) for one in numbers for other in numbers]
    made = [_candidate(halves, counts, is_paired) for counts in grids]
    fitting = [one for one in made if one.layout.fits(question.num_nodes, question.gpus_per_node)]
    if len(halves) == 1:
        yield from {one.layout: one for one in (fitting[:1] + fitting[-1:])}.values()
    elif fitting:
        yield max(fitting, key=lambda one: (one.guess_per_s / one.layout.num_gpus, -one.layout.num_gpus))


def _paired(question: Question, halves: tuple[Half, ...]) -> Iterator[Candidate]:
    """Units whose prefill and decode workers share nodes, as many as the rate needs."""
    for unit in _best_ratio(question, halves, True):
        num_units = 1 if question.rate_per_s is None else math.ceil(question.rate_per_s / unit.guess_per_s / _POOLING)
        layout = replace(unit.layout, num_units=num_units)
        if layout.fits(question.num_nodes, question.gpus_per_node):
            yield Candidate(layout, unit.guess_per_s * num_units, unit.bound_per_s * num_units)


def _candidate(halves: tuple[Half, ...], counts: tuple[int, ...], is_paired: bool) -> Candidate:
    numbered = list(zip(halves, counts, strict=True))
    sets = tuple(WorkerSet(one.option.role, one.option.parallelism, count) for one, count in numbered)
    return Candidate(
        Layout(sets, is_paired=is_paired),
        min(one.goodput_per_s * count for one, count in numbered),
        min(one.option.bound.most_per_s * count for one, count in numbered),
    )
