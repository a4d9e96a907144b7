"""Which layout is the better one, by the objective."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from halfmoon.plan.layout import Layout
from halfmoon.plan.problem import OF_A_RATE, PlanningProblem
from halfmoon.plan.search.evaluation import Evaluation
from halfmoon.sim.cluster.kv_codecs import KvCodecName

_LEAST_GAIN: Mapping[KvCodecName, float] = MappingProxyType({"raw": 1.0, "int8": 1.05, "int4": 1.1})
"""Of goodput, for what a codec loses: less is not worth it."""


@dataclass(frozen=True, slots=True)
class Rated:
    """A layout, what it holds, and how it fares at the asked rate, or else at what it holds; `twins` fare alike."""

    layout: Layout
    goodput_per_s: float
    price_per_hour: float
    verdict: Evaluation = field(compare=False)
    twins: tuple[Layout, ...] = ()

    @property
    def per_gpu(self) -> float:
        """Requests a second that meet the goal, for each device."""
        return self.goodput_per_s / self.layout.num_gpus

    @property
    def per_dollar(self) -> float:
        """Requests that meet the goal for a dollar."""
        return 3600 * self.goodput_per_s / self.price_per_hour


def loss(layout: Layout) -> float:
    """By which a layout has to hold more for its codec to be worth it."""
    return _LEAST_GAIN[layout.codec]


def worth(question: PlanningProblem, one: Rated) -> float:
    """What it holds for its cost."""
    return worth_at(question, one.layout, one.goodput_per_s)


def worth_at(question: PlanningProblem, layout: Layout, rate_per_s: float) -> float:
    """A rate for what the layout costs; of codecs what is left after their loss."""
    return rate_per_s / loss(layout) / question.cost(layout)


def rank(question: PlanningProblem, one: Rated) -> tuple[float, ...]:
    """Ascending: the best first. Of a rate, the cheapest; else what holds most for its cost."""
    layout = one.layout
    if question.objective in OF_A_RATE:
        return (question.cost(layout), one.price_per_hour, -worth(question, one))
    return (-worth(question, one), layout.num_gpus)
