"""The gateway of a cluster where every request has the same workers: there is nothing for policies to decide."""

from __future__ import annotations

from collections.abc import Sequence

from halfmoon.errors import Unavailable
from halfmoon.policy.placement.place import ContextLengthExceeded
from halfmoon.policy.values import Placement
from halfmoon.policy.view.worker_view import WorkerView
from halfmoon.sim.cluster.cluster_spec import ClusterSpec
from halfmoon.sim.cluster.job import Job
from halfmoon.sim.cluster.worker import SimWorker


class SingleRouteRouter:
    """Owns the one placement. It refuses what the policies refuse; a test holds the two against each other."""

    wants_reports = False

    def __init__(self, workers: list[SimWorker], longest_output: int) -> None:
        (prefill,), (decode,) = prefills, decodes = halves(workers)
        self._capacities = Capacities(prefills, decodes, longest_output)
        self._placement = Placement(worker_view(prefill), worker_view(decode))

    @staticmethod
    def is_enough(spec: ClusterSpec) -> bool:
        """Whether one worker, or one of each half, serves all that come, and nothing is refused by its prediction."""
        roles = sorted(group.role for group in spec.groups for _ in range(group.count))
        return roles in (["both"], ["decode", "prefill"]) and spec.admission == "off" and not spec.failures

    def place(self, job: Job, exclude: tuple[str, ...], now_s: float) -> Placement:
        """As `PolicyRouter.place`."""
        self._capacities.check(job)
        if exclude:
            raise Unavailable("the only worker that could serve the request refused it")
        return self._placement

    def prefilled(self, job: Job, worker: SimWorker, now_s: float) -> None:
        """Nobody has to know."""

    def forget(self, job: Job, now_s: float) -> None:
        """Nobody has to know."""

    def end(self, job: Job, now_s: float) -> None:
        """Nobody has to know."""


class Capacities:
    """What the largest worker of each half holds, and who is too long for it."""

    def __init__(self, prefills: Sequence[SimWorker], decodes: Sequence[SimWorker], longest_output: int) -> None:
        """`longest_output`: what clients give as `max_tokens`."""
        self._prefill_tokens, self._decode_tokens = (max(map(_capacity, half)) for half in (prefills, decodes))
        self._longest_output = longest_output

    def check(self, job: Job) -> None:
        """Raises ContextLengthExceeded where the policies do."""
        most = max(self._prefill_tokens, self._decode_tokens) - job.target
        output = max(min(self._longest_output, most), job.output) if job.attempt == 1 else job.num_left
        if job.target + 1 > self._prefill_tokens or job.target + output > self._decode_tokens:
            raise ContextLengthExceeded(f"{job.target} tokens of prompt and {output} of output do not fit")


def halves(workers: Sequence[SimWorker]) -> tuple[list[SimWorker], list[SimWorker]]:
    """Who computes prompts, and who decodes."""
    prefills, decodes = ([one for one in workers if one.group.role in (role, "both")] for role in ("prefill", "decode"))
    return prefills, decodes


def _capacity(worker: SimWorker) -> int:
    units = worker.kv.num_pages // worker.kv.unit_pages
    return units * worker.kv.unit_pages * worker.page_tokens


def worker_view(worker: SimWorker) -> WorkerView:
    """As much of it as a placement needs."""
    return WorkerView(worker.name, worker.group.role, worker.name, _capacity(worker), worker.page_tokens, 1, 1)
