"""From the workers that run to those of a plan: which stay, which start, which go. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from halfmoon.policy.view.worker_view import Role
from halfmoon.up.gpus import gpus_beside
from halfmoon.up.service_specs import WorkerSpec, WorkerStart

WantedWorker: TypeAlias = tuple[Role, WorkerStart]


@dataclass(frozen=True, slots=True)
class WorkerChange:
    """Who is of the same role and started with the same options stays."""

    kept: tuple[WorkerSpec, ...]
    stopped: tuple[WorkerSpec, ...]
    started: tuple[WantedWorker, ...]

    @property
    def now(self) -> list[WantedWorker]:
        """Before it."""
        return [(spec.role, spec.start) for spec in (*self.kept, *self.stopped)]

    @property
    def then(self) -> list[WantedWorker]:
        """After it."""
        return [*((spec.role, spec.start) for spec in self.kept), *self.started]

    def gpus(self, of_host: Sequence[str], stop_first: bool) -> list[dict[str, str]]:
        """What lets each started worker see GPUs of its own. Raises Incompatible where too few are free."""
        beside = self.kept if stop_first else (*self.kept, *self.stopped)
        taken = {name for spec in beside for name in spec.gpus}
        return gpus_beside(of_host, taken, [start.num_gpus for _, start in self.started])


def worker_change(now: Sequence[WorkerSpec], wanted: Sequence[WantedWorker]) -> WorkerChange:
    """The fewest starts and stops."""
    missing = list(wanted)
    kept, stopped = [], []
    for spec in now:
        one = (spec.role, spec.start)
        if one in missing:
            missing.remove(one)
            kept.append(spec)
        else:
            stopped.append(spec)
    return WorkerChange(tuple(kept), tuple(stopped), tuple(missing))
