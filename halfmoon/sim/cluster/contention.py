"""Interference between workers that share a host's cores: how much one slows another down while both compute."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from types import MappingProxyType
from typing import Literal

from halfmoon.errors import InvalidRequest
from halfmoon.policy.view.worker_view import Role

Work = Literal["prefill", "decode"]

_WORKS: Mapping[Role, tuple[Work, ...]] = MappingProxyType(
    {"prefill": ("prefill",), "decode": ("decode",), "both": ("prefill", "decode")}
)


@dataclass(frozen=True, slots=True)
class Contention:
    """Slowdown of a step beside one computing worker of the same node, by the work of both.

    A step that contains a prompt counts as `prefill`. Slowdowns add up: `n` colocated workers give `1 + n * (slowdown -
    1)`.
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
        """Whether no worker slows another one down."""
        return bool(max(astuple(self)) == 1)

    def pace(self, work: Work, colocated: Iterable[Work]) -> float:
        """Seconds that one second of `work` takes beside workers that do `colocated`."""
        slowdowns: list[float] = [self._slowdown(work, other) for other in colocated]
        return 1.0 + sum(slowdowns) - len(slowdowns)

    def added(self, work: Work, roles: Sequence[Role]) -> float:
        """The mean slowdown of `work` beside one busy colocated worker, minus 1; 0 without colocated workers.

        Policies use this single figure. A worker of role `both` counts as half prefill and half decode.
        """
        slowdowns = [sum(self._slowdown(work, one) for one in _WORKS[role]) / len(_WORKS[role]) - 1 for role in roles]
        return sum(slowdowns) / len(slowdowns) if slowdowns else 0.0

    def _slowdown(self, work: Work, neighbour: Work) -> float:
        result: float = getattr(self, f"{work}_beside_{neighbour}")
        return result


NO_CONTENTION = Contention()
