"""Layouts of the same workers that fare alike: paired or apart, one row is enough for them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import chain

from halfmoon.plan.layout import Layout, WorkerKind
from halfmoon.plan.search.evaluation import Evaluation
from halfmoon.policy.view.worker_view import Role
from halfmoon.sim.cluster.kv_codecs import KvCodecName

_DIFFERENCE = 0.01  # of any figure

Twins = dict[Layout, tuple[Layout, ...]]


def grouped(judged: Iterable[tuple[Layout, Evaluation]]) -> Twins:
    """In the given order; each first one with those behind it that have its workers and its figures."""
    found: dict[Layout, list[Layout]] = {}
    verdicts: dict[Layout, Evaluation] = {}
    for layout, verdict in judged:
        same = (one for one in found if _workers(one) == _workers(layout) and fare_alike(verdicts[one], verdict))
        first = next(same, layout)
        if first is layout:
            found[layout], verdicts[layout] = [], verdict
        else:
            found[first].append(layout)
    return {one: tuple(twins) for one, twins in found.items()}


def fare_alike(one: Evaluation, other: Evaluation) -> bool:
    """Whether all that is shown of them differs by a hundredth at most."""
    pairs = zip(_figures(one), _figures(other), strict=True)
    return one.keeps_up == other.keeps_up and all(_are_alike(*pair) for pair in pairs)


def _are_alike(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=_DIFFERENCE)


def _figures(verdict: Evaluation) -> Iterator[float | None]:
    times = (one.values() for one in (verdict.ttft_s, verdict.tpot_s, verdict.tbt_s))
    return chain([verdict.rate_per_s], verdict.attainment, *times)


def _workers(layout: Layout) -> tuple[KvCodecName, list[tuple[Role, WorkerKind, int]]]:
    return layout.codec, sorted((one.role, one.kind, layout.num_units * one.num) for one in layout.sets)
