"""Computes which workers a plan keeps, starts and stops. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from halfmoon.policy.view.worker_view import Role
from halfmoon.up.specs.worker_specs import WorkerSpec
from halfmoon.up.this_host.gpus import HostGPUs, gpus_beside
from halfmoon.up.up_options import WorkerStart

WantedWorker: TypeAlias = tuple[Role, WorkerStart]


@dataclass(frozen=True, slots=True)
class WorkerChange:
    """Workers to keep, stop and start. Workers with the same role and options are kept."""

    kept: tuple[WorkerSpec, ...]
    stopped: tuple[WorkerSpec, ...]
    started: tuple[WantedWorker, ...]

    @property
    def now(self) -> list[WantedWorker]:
        """Returns the workers before the change."""
        return [(spec.role, spec.start) for spec in (*self.kept, *self.stopped)]

    @property
    def then(self) -> list[WantedWorker]:
        """Returns the workers after the change."""
        return [*((spec.role, spec.start) for spec in self.kept), *self.started]

    def gpus(self, host_gpus: HostGPUs, stop_first: bool) -> list[dict[str, str]]:
        """Returns environments that give each started worker its own GPUs. Raises Incompatible if too few are free."""
        others = self.kept if stop_first else (*self.kept, *self.stopped)
        taken = {name for spec in others for name in spec.gpus}
        starts = [start for _, start in self.started]
        return gpus_beside(host_gpus, taken, [start.num_gpus for start in starts], [start.gpu for start in starts])


def worker_change(now: Sequence[WorkerSpec], wanted: Sequence[WantedWorker]) -> WorkerChange:
    """Finds the change with the fewest starts and stops."""
    missing = list(wanted)
    kept, stopped = [], []
    for spec in now:
        worker = next((one for one in missing if _is_same((spec.role, spec.start), one)), None)
        if worker is None:
            stopped.append(spec)
        else:
            missing.remove(worker)
            kept.append(spec)
    return WorkerChange(tuple(kept), tuple(stopped), tuple(missing))


def _is_same(running: WantedWorker, wanted: WantedWorker) -> bool:
    """Whether role and options are the same. A worker that no plan started may be on any kind of GPU."""
    (role, start), (wanted_role, wanted_start) = running, wanted
    gpu = start.gpu or wanted_start.gpu
    return (role, start._replace(gpu=gpu)) == (wanted_role, wanted_start._replace(gpu=wanted_start.gpu or gpu))
