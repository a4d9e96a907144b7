"""A router for clusters with a single route, where policies have nothing to decide."""

from __future__ import annotations

from collections.abc import Sequence

from halfmoon.errors import Unavailable
from halfmoon.policy.placement.place import ContextLengthExceeded
from halfmoon.policy.values import Placement
from halfmoon.policy.view.worker_view import WorkerView
from halfmoon.sim.cluster.cluster_spec import ClusterSpec
from halfmoon.sim.worker.job import Job
from halfmoon.sim.worker.worker import SimWorker


class SingleRouteRouter:
    """Owns the one placement. Refuses what the policies refuse; a test holds the two against each other. Knows no
    load.
    """

    wants_reports = False

    def __init__(self, workers: list[SimWorker], longest_output: int) -> None:
        (prefill,), (decode,) = prefills, decodes = by_phase(workers)
        self._capacities = Capacities(prefills, decodes, longest_output)
        self._placement = Placement(worker_view(prefill), worker_view(decode))

    @staticmethod
    def is_enough(spec: ClusterSpec) -> bool:
        """Whether one worker, or one per phase, serves every request, without admission control and failures."""
        if spec.may_keep:
            return False
        roles = sorted(group.role for group in spec.groups for _ in range(group.count))
        return roles in (["both"], ["decode", "prefill"]) and spec.admission == "off" and not spec.failures

    def place(self, job: Job, exclude: tuple[str, ...], now_s: float) -> Placement:
        """As in `PolicyRouter.place`."""
        self._capacities.check(job)
        if exclude:
            raise Unavailable("the only worker that could serve the request refused it")
        return self._placement

    def prefilled(self, job: Job, worker: SimWorker, now_s: float) -> None:
        """Does nothing: there is no load to track."""

    def forget(self, job: Job, now_s: float) -> None:
        """Does nothing: there is no load to track."""

    def end(self, job: Job, now_s: float) -> None:
        """Does nothing: there is no load to track."""


class Capacities:
    """Owns the capacity of the largest worker of each phase. Knows nothing of load."""

    def __init__(self, prefills: Sequence[SimWorker], decodes: Sequence[SimWorker], longest_output: int) -> None:
        """`longest_output`: what clients send as `max_tokens`."""
        self._prefill_tokens, self._decode_tokens = (max(map(_capacity, workers)) for workers in (prefills, decodes))
        self._longest_output = longest_output

    def check(self, job: Job) -> None:
        """Raises ContextLengthExceeded in the same cases as the policies."""
        most = max(self._prefill_tokens, self._decode_tokens) - job.target
        output = max(min(self._longest_output, most), job.output) if job.attempt == 1 else job.num_left
        if job.target + 1 > self._prefill_tokens or job.target + output > self._decode_tokens:
            raise ContextLengthExceeded(f"{job.target} tokens of prompt and {output} of output do not fit")


def by_phase(workers: Sequence[SimWorker]) -> tuple[list[SimWorker], list[SimWorker]]:
    """The workers that prefill, and those that decode."""
    prefills, decodes = (
        [worker for worker in workers if worker.group.role in (role, "both")] for role in ("prefill", "decode")
    )
    return prefills, decodes


def _capacity(worker: SimWorker) -> int:
    prefix_blocks = worker.kv.num_blocks // worker.kv.prefix_block_size
    return prefix_blocks * worker.kv.prefix_block_size * worker.block_tokens


def worker_view(worker: SimWorker) -> WorkerView:
    """The part of a worker's view that a placement needs."""
    return WorkerView(worker.name, worker.group.role, worker.name, _capacity(worker), worker.block_tokens, 1, 1)
