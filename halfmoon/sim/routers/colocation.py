"""A simulated gateway's knowledge of colocated workers: how much they slow each other down, and which are busy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from halfmoon.policy.values import Placement
from halfmoon.policy.view.cluster_view import ClusterView
from halfmoon.sim.cluster.contention import Contention
from halfmoon.sim.worker.job import Job
from halfmoon.sim.worker.worker import SimWorker


class KnownContention(NamedTuple):
    """Learned interference of one worker, as in `WorkerView`."""

    address: str  # equal for workers of one node, which share a host
    prefill: float = 0.0
    step: float = 0.0


class SimulatedColocation:
    """Owns the grouping of workers by node. Reports busy workers to `view.busy`, as the live gateway does.

    Reports nothing if workers do not slow each other down.
    """

    def __init__(self, contention: Contention, workers: Sequence[SimWorker], view: ClusterView) -> None:
        self._contention = contention
        self._busy = view.busy
        self._is_active = not contention.is_none
        self._workers = workers
        self._nodes: dict[int, list[SimWorker]] = {}
        for worker in workers:
            self._nodes.setdefault(worker.node, []).append(worker)

    def known(self, worker: SimWorker) -> KnownContention:
        """What a gateway would have learned about the worker from its colocated workers."""
        if not self._is_active:
            return KnownContention(worker.name)
        roles = [one.group.role for one in self._nodes[worker.node] if one is not worker]
        return KnownContention(
            f"node-{worker.node}:{worker.name}",
            self._contention.added("prefill", roles),
            self._contention.added("decode", roles),
        )

    def placed(self, job: Job, placement: Placement, now_s: float) -> None:
        """Notes that the request's prompt is with its prefill worker."""
        if self._is_active:
            self._busy.begin(placement.prefill.worker_id, str(job.index), now_s)

    def prefilled(self, job: Job, worker: SimWorker, now_s: float) -> None:
        """Notes that the prompt is computed, and decodes from now on."""
        if self._is_active:
            self._busy.end(worker.name, str(job.index), now_s)
            if job.decode is not None:
                self._busy.begin(self._workers[job.decode].name, str(job.index), now_s)

    def left(self, job: Job, workers: Sequence[SimWorker], now_s: float) -> None:
        """Notes that the request is on none of these workers any more."""
        if self._is_active:
            for worker in workers:
                self._busy.end(worker.name, str(job.index), now_s)
