"""Equivalent layouts: the same workers with the same figures, paired or apart, or with a lossier codec that gains
nothing. A plan shows one row for them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import chain

from halfmoon.plan.layout import Layout, WorkerKind
from halfmoon.plan.search.evaluation import Evaluation
from halfmoon.plan.search.objective import loss
from halfmoon.policy.view.worker_view import Role

_DIFFERENCE = 0.01  # of any figure

EquivalentLayouts = dict[Layout, tuple[Layout, ...]]


def group_equivalent(evaluate: Iterable[tuple[Layout, Evaluation]], *, of_one_codec: bool = False) -> EquivalentLayouts:
    """Each first layout with the later ones that have its workers and its figures, in the given order.

    Those with a lossier codec than the first one's are equivalent, too, unless `of_one_codec`.
    """
    result: dict[Layout, list[Layout]] = {}
    evaluations: dict[Layout, Evaluation] = {}
    for layout, evaluation in evaluate:
        like = (one for one in result if _are_like(one, layout, of_one_codec))
        first = next((one for one in like if fare_alike(evaluations[one], evaluation)), layout)
        if first is layout:
            result[layout], evaluations[layout] = [], evaluation
        else:
            result[first].append(layout)
    return {one: tuple(equivalents) for one, equivalents in result.items()}


def fare_alike(evaluation: Evaluation, other: Evaluation) -> bool:
    """Whether all figures that a plan shows differ by at most one percent."""
    pairs = zip(_figures(evaluation), _figures(other), strict=True)
    return evaluation.keeps_up == other.keeps_up and all(_are_alike(*pair) for pair in pairs)


def _are_alike(value: float | None, other: float | None) -> bool:
    if value is None or other is None:
        return value is other
    return math.isclose(value, other, rel_tol=_DIFFERENCE)


def _figures(evaluation: Evaluation) -> Iterator[float | None]:
    times = (one.values() for one in (evaluation.ttft_s, evaluation.tpot_s, evaluation.tbt_s))
    return chain([evaluation.rate_per_s], evaluation.attainment, *times)


def _are_like(first: Layout, layout: Layout, of_one_codec: bool) -> bool:
    """Whether both have the same workers, and `first` the same codec or a less lossy one."""
    is_less_lossy = not of_one_codec and loss(first) < loss(layout)
    return _workers(first) == _workers(layout) and (first.codec == layout.codec or is_less_lossy)


def _workers(layout: Layout) -> tuple[int, list[tuple[Role, WorkerKind, int]]]:
    workers = sorted((workers.role, workers.kind, layout.num_units * workers.num) for workers in layout.sets)
    return layout.prefill_degree, workers
