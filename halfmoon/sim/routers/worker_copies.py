"""Which hot prefixes a simulated gateway has copied from worker to worker, where there are no stores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from halfmoon.policy.forecast.ttft import best_sources
from halfmoon.policy.placement.replication import MIN_USES_OF_WORKERS, Replication, next_holder
from halfmoon.policy.values import Placement, PlacementRequest
from halfmoon.policy.view.cluster_view import ClusterView
from halfmoon.policy.view.hot_prefixes import HotPrefixes
from halfmoon.policy.view.key_table import Keys
from halfmoon.sim.cluster.cluster_spec import ClusterSpec
from halfmoon.sim.worker.job import Job


class WorkerCopy(NamedTuple):
    """A prefix on its way into another worker's cache."""

    source: int  # number in the block index
    target: str
    blocks: Sequence[int]
    missing_tokens: int


class WorkerCopies:
    """Owns the counts of uses, and the copies that are to be made. Policies decide, as in a live gateway."""

    def __init__(self, spec: ClusterSpec, view: ClusterView, block_tokens: int) -> None:
        """block_tokens: of the workload's prefixes."""
        self._view = view
        self._block_tokens = block_tokens
        self._hot = HotPrefixes()
        bytes_per_s = spec.stores.replica_mbps * 1e6 if spec.placement == "kvcache-centric" else 0.0
        self._replication = Replication(bytes_per_s) if bytes_per_s else None
        self._due: list[WorkerCopy] = []

    def take(self) -> list[WorkerCopy]:
        """The copies to be made since the last call."""
        due, self._due = self._due, []
        return due

    def note_use(self, job: Job, keys: Keys, request: PlacementRequest, placement: Placement, now_s: float) -> None:
        """Counts the known prefix, and has it copied to one more worker if it is hot and its holders are busy."""
        if self._replication is None:
            return
        num_uses = self._hot.note(keys, request.cached_blocks, self._block_tokens, now_s)
        if not self._replication.is_hot(num_uses, MIN_USES_OF_WORKERS):
            return
        target = next_holder(self._view, request, placement)
        if target is None:
            return
        name, key = self._view.worker(target.row).worker_id, int(keys[target.num_blocks - 1])
        missing_tokens = target.num_missing * self._block_tokens
        num_bytes = missing_tokens * placement.prefill.kv_bytes_per_token
        if self._replication.decide(name, key, num_bytes, now_s) == "copy":
            (source,) = best_sources(self._view, target.row, request, 1.0, 0.0, 1)
            self._due.append(WorkerCopy(source, name, job.prefix_blocks[: target.num_blocks], missing_tokens))
