"""Steps that slow each other down: which workers of a node compute at the same time."""

from __future__ import annotations

from halfmoon.sim.cluster.contention import Contention, Work
from halfmoon.sim.worker.worker import SimWorker


class SharedCores:
    """Owns the current work of each worker, by node. Knows nothing of queues and events."""

    def __init__(self, contention: Contention, workers: list[SimWorker]) -> None:
        self._contention = contention
        nodes: dict[int, list[SimWorker]] = {}
        for worker in workers:
            nodes.setdefault(worker.node, []).append(worker)
        self._colocated = {
            worker.number: [one for one in nodes[worker.node] if one is not worker] for worker in workers
        }
        self._works: dict[int, Work | None] = dict.fromkeys(self._colocated)

    def changed(self, worker: SimWorker, now_s: float) -> list[SimWorker]:
        """Notes that the worker's step began or ended; returns the workers whose steps now end at another time."""
        work = worker.steps.work
        if work == self._works[worker.number]:
            return []
        self._works[worker.number] = work
        return [one for one in (worker, *self._colocated[worker.number]) if self._set_pace(one, now_s)]

    def _set_pace(self, worker: SimWorker, now_s: float) -> bool:
        work = self._works[worker.number]
        if work is None:
            return False
        colocated = [self._works[other.number] for other in self._colocated[worker.number]]
        return worker.set_pace(self._contention.pace(work, [other for other in colocated if other]), now_s)
