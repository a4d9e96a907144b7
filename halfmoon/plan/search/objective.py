"""The objective: which of two layouts is better."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from halfmoon.plan.layout import Layout
from halfmoon.plan.problem import OF_A_RATE, PlanningProblem
from halfmoon.plan.search.evaluation import Evaluation
from halfmoon.sim.cluster.kv_codecs import KvCodecName

_LEAST_GAIN: Mapping[KvCodecName, float] = MappingProxyType(
    {"raw": 1.0, "lz4": 1.0, "zstd": 1.0, "int8": 1.05, "int4": 1.1}
)
"""Minimum goodput gain that makes a codec's loss worthwhile."""

DEGREE_GAIN = 1.05
"""Minimum goodput gain that makes prompts over several workers worthwhile."""


@dataclass(frozen=True, slots=True)
class Rated:
    """A layout with its goodput, its evaluation at the requested rate (or else at its goodput), and equivalent
    layouts.
    """

    layout: Layout
    goodput_per_s: float
    price_per_hour: float
    evaluation: Evaluation = field(compare=False)
    equivalents: tuple[Layout, ...] = ()

    @property
    def per_gpu(self) -> float:
        """Goodput per device, in requests per second."""
        return self.goodput_per_s / self.layout.num_gpus

    @property
    def per_dollar(self) -> float:
        """Requests that meet the goal, per dollar."""
        return 3600 * self.goodput_per_s / self.price_per_hour


def loss(layout: Layout) -> float:
    """Factor by which a layout's goodput is discounted for its codec, and for prompts over several workers."""
    return _LEAST_GAIN[layout.codec] * (1.0 if layout.prefill_degree == 1 else DEGREE_GAIN)


def worth(problem: PlanningProblem, rated: Rated) -> float:
    """Goodput per cost."""
    return worth_at(problem, rated.layout, rated.goodput_per_s)


def worth_at(problem: PlanningProblem, layout: Layout, rate_per_s: float) -> float:
    """A rate per cost of the layout, discounted as in `loss`."""
    return rate_per_s / loss(layout) / problem.cost(layout)


def rank(problem: PlanningProblem, rated: Rated) -> tuple[float, ...]:
    """Sort key, the best first: the cheapest for a given rate, otherwise the most goodput per cost."""
    layout = rated.layout
    if problem.objective in OF_A_RATE:
        return (problem.cost(layout), rated.price_per_hour, -worth(problem, rated))
    return (-worth(problem, rated), layout.num_gpus)
