"""What a simulated gateway knows of workers that share a host's cores: how much, and who of them has work."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from halfmoon.policy.values import Placement
from halfmoon.policy.view.cluster_view import ClusterView
from halfmoon.sim.cluster.contention import Contention
from halfmoon.sim.cluster.job import Job
from halfmoon.sim.cluster.worker import SimWorker


class KnownContention(NamedTuple):
    """Of one worker, as in `WorkerView`."""

    address: str  # of workers of one node, with one host
    prefill: float = 0.0
    step: float = 0.0


class SimulatedColocation:
    """Owns nothing but who stands beside whom; `view.busy` is told who has work, as the live gateway tells it.

    Where nobody slows anybody down nothing is told, since nobody asks.
    """

    def __init__(self, contention: Contention, workers: Iterable[SimWorker], view: ClusterView) -> None:
        self._contention = contention
        self._busy = view.busy
        self._is_told = not contention.is_none
        self._nodes: dict[int, list[SimWorker]] = {}
        for worker in workers:
            self._nodes.setdefault(worker.node, []).append(worker)

    def known(self, worker: SimWorker) -> KnownContention:
        """As a gateway would have learned it from the neighbours that there are."""
        if not self._is_told:
            return KnownContention(worker.name)
        roles = [one.group.role for one in self._nodes[worker.node] if one is not worker]
        return KnownContention(
            f"node-{worker.node}:{worker.name}",
            self._contention.added("prefill", roles),
            self._contention.added("decode", roles),
        )

    def placed(self, job: Job, placement: Placement, now_s: float) -> None:
        """Its prompt is on its way."""
        if self._is_told:
            self._busy.begin(placement.prefill.worker_id, str(job.index), now_s)

    def prefilled(self, job: Job, worker: SimWorker, now_s: float) -> None:
        """Its prompt is computed there."""
        if self._is_told:
            self._busy.end(worker.name, str(job.index), now_s)
            if job.decode is not None:
                self._busy.begin(job.decode.name, str(job.index), now_s)

    def left(self, job: Job, workers: Sequence[SimWorker | None], now_s: float) -> None:
        """It is on none of these any more."""
        if self._is_told:
            for worker in workers:
                if worker is not None:
                    self._busy.end(worker.name, str(job.index), now_s)
