"""Workers that share a host's cores: how much one slows another down, while both compute."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from halfmoon.errors import InvalidRequest
from halfmoon.policy.view.worker_view import Role

if TYPE_CHECKING:
    from halfmoon.sim.cluster.worker import SimWorker

Work = Literal["prefill", "decode"]

_WORKS: Mapping[Role, tuple[Work, ...]] = MappingProxyType(
    {"prefill": ("prefill",), "decode": ("decode",), "both": ("prefill", "decode")}
)


@dataclass(frozen=True, slots=True)
class Contention:
    """How many times as long a step takes beside one worker of its node that computes, too, by what both do.

    A step with a prompt in it is `prefill`. Several neighbours add up: beside `n` of them `1 + n * (slowdown - 1)`.
    """

    prefill_beside_prefill: float = 1.0
    prefill_beside_decode: float = 1.0
    decode_beside_prefill: float = 1.0
    decode_beside_decode: float = 1.0

    def __post_init__(self) -> None:
        if not all(1 <= one < math.inf for one in astuple(self)):
            raise InvalidRequest("a cluster's contention must be finite, and not below 1", param="contention")

    @property
    def is_none(self) -> bool:
        """Whether nobody slows anybody down."""
        return bool(max(astuple(self)) == 1)

    def pace(self, work: Work, neighbours: Iterable[Work]) -> float:
        """Seconds that a second of `work` takes."""
        slowdowns: list[float] = [self._slowdown(work, one) for one in neighbours]
        return 1.0 + sum(slowdowns) - len(slowdowns)

    def added(self, work: Work, roles: Sequence[Role]) -> float:
        """What a busy neighbour adds to `work` on average, as a share of its time alone: one figure is all that
        policies have. Who does both does each half of the time. 0 without neighbours."""
        slowdowns = [sum(self._slowdown(work, one) for one in _WORKS[role]) / len(_WORKS[role]) - 1 for role in roles]
        return sum(slowdowns) / len(slowdowns) if slowdowns else 0.0

    def _slowdown(self, work: Work, neighbour: Work) -> float:
        found: float = getattr(self, f"{work}_beside_{neighbour}")
        return found


NO_CONTENTION = Contention()


class SharedCores:
    """Owns which workers of each node compute now, and what."""

    def __init__(self, contention: Contention, workers: list[SimWorker]) -> None:
        self._contention = contention
        nodes: dict[int, list[SimWorker]] = {}
        for worker in workers:
            nodes.setdefault(worker.node, []).append(worker)
        self._beside = {worker.number: [one for one in nodes[worker.node] if one is not worker] for worker in workers}
        self._works: dict[int, Work | None] = dict.fromkeys(self._beside)

    def changed(self, worker: SimWorker, now_s: float) -> list[SimWorker]:
        """Its step began or ended; those whose end that moves."""
        work = worker.steps.work
        if work == self._works[worker.number]:
            return []
        self._works[worker.number] = work
        return [one for one in (worker, *self._beside[worker.number]) if self._set_pace(one, now_s)]

    def _set_pace(self, worker: SimWorker, now_s: float) -> bool:
        work = self._works[worker.number]
        if work is None:
            return False
        others = [self._works[one.number] for one in self._beside[worker.number]]
        return worker.set_pace(self._contention.pace(work, [one for one in others if one]), now_s)
