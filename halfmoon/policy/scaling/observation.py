"""What the autopilot sees of a cluster, and the ratio of roles that it decides about."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from halfmoon.policy.models.latency import PrefillModel, StepModel
from halfmoon.policy.view.worker_view import ROLES, Role


class Split(NamedTuple):
    """Numbers of workers by role."""

    prefill: int = 0
    decode: int = 0
    both: int = 0

    @property
    def total(self) -> int:
        """All workers."""
        return sum(self)

    @property
    def serves(self) -> bool:
        """Whether requests can be served at all."""
        return self.both > 0 or (self.prefill > 0 and self.decode > 0)

    def of(self, role: Role) -> int:
        """Workers of one role."""
        return self[ROLES.index(role)]

    def plus(self, role: Role, num: int = 1) -> Split:
        """With `num` more workers of a role, or fewer."""
        counts = list(self)
        counts[ROLES.index(role)] += num
        return Split(*counts)

    def changes(self, roles: Iterable[Role]) -> Iterator[tuple[Role, Role, Split]]:
        """Every split that one worker's change between these roles makes: (before, after, split)."""
        between = tuple(roles)
        for after in between:
            for before in between:
                changed = self.plus(before, -1).plus(after)
                if before != after and min(changed) >= 0 and changed.serves:
                    yield before, after, changed

    def __str__(self) -> str:
        return f"{self.prefill}:{self.decode}:{self.both}"


class WorkerSpeed(NamedTuple):
    """How fast one worker computes, and what it holds."""

    prefill: PrefillModel
    step: StepModel
    max_running: float = math.inf  # sequences in a step
    kv_tokens: float = math.inf


class Traffic(NamedTuple):
    """What came and what ended in the last `seconds`, over all gateways."""

    seconds: float = 0.0
    num_requests: int = 0  # came, refused ones included
    work_s: float = 0.0  # that their prompts take on one idle worker, without what caches have
    num_ended: int = 0
    num_in_ttft: int = 0  # ended ones that met the target; refused and failed ones met none
    num_in_tpot: int = 0

    def __add__(self, other: object) -> Traffic:
        """Both gateways' traffic."""
        assert isinstance(other, Traffic)
        return Traffic(
            max(self.seconds, other.seconds),
            self.num_requests + other.num_requests,
            self.work_s + other.work_s,
            self.num_ended + other.num_ended,
            self.num_in_ttft + other.num_in_ttft,
            self.num_in_tpot + other.num_in_tpot,
        )


@dataclass(frozen=True, slots=True)
class ObservedWorker:
    """One worker at one moment."""

    worker_id: str
    role: Role
    epoch: int = 0  # of its role
    changed_s: float = -math.inf  # when its role was changed last
    waiting_tokens: float = 0.0  # of prompts
    num_running: int = 0  # sequences that decode here, or have a place here
    context_tokens: float = 0.0  # of these sequences
    can_change: bool = True  # False: it drains, or its release cannot change roles


@dataclass(frozen=True, slots=True)
class Observation:
    """The cluster at one moment."""

    workers: tuple[ObservedWorker, ...]
    traffic: Traffic
    speed: WorkerSpeed
    ttft_s: float = math.inf  # the strictest class's targets
    tpot_s: float = math.inf

    @property
    def split(self) -> Split:
        """The present roles."""
        return Split(*(sum(worker.role == role for worker in self.workers) for role in ROLES))
