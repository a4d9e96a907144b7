"""A router for estimates: each request goes to the least loaded workers, whose load it knows without delay."""

from __future__ import annotations

from halfmoon.errors import Unavailable
from halfmoon.policy.values import Placement
from halfmoon.sim.cluster.cluster_spec import ClusterSpec
from halfmoon.sim.routers.single_route import Capacities, by_phase, worker_view
from halfmoon.sim.worker.job import Job
from halfmoon.sim.worker.worker import SimWorker


class LeastLoadedRouter:
    """Owns the decode worker of each request. Predicts nothing and knows no prefixes, so it costs a tenth of the
    policies' time.

    Where prompts share little, its goodput is within a few percent of the policies'. Users never see it.
    """

    wants_reports = False

    def __init__(self, workers: list[SimWorker], longest_output: int) -> None:
        self._prefills, self._decodes = by_phase(workers)
        self._capacities = Capacities(self._prefills, self._decodes, longest_output)
        self._views = {worker.name: worker_view(worker) for worker in workers}
        self._num_placed = dict.fromkeys(self._views, 0)
        self._decodes_at: dict[int, str] = {}  # by request
        self._does_both = self._decodes[0].group.role == "both"

    @staticmethod
    def is_possible(spec: ClusterSpec) -> bool:
        """Whether placement is its only task, and each prompt and each answer has one worker, of those for it."""
        return spec.admission == "off" and not spec.failures and not spec.may_keep and spec.max_prefill_degree == 1

    def place(self, job: Job, exclude: tuple[str, ...], now_s: float) -> Placement:
        """As in `PolicyRouter.place`."""
        self._capacities.check(job)
        self.forget(job, now_s)  # otherwise its current worker would count it
        decodes = [worker for worker in self._decodes if worker.name not in exclude]
        if not decodes:
            raise Unavailable("every worker that could serve the request refused it")
        if self._does_both:
            prefill = decode = min(decodes, key=lambda worker: (_prompts_s(worker, now_s), self._step_s(worker)))
        else:
            prefill = min(self._prefills, key=lambda worker: _prompts_s(worker, now_s))
            decode = min(decodes, key=self._step_s)
        placement = Placement(self._views[prefill.name], self._views[decode.name])
        self.note(job, placement)
        return placement

    def note(self, job: Job, placement: Placement) -> None:
        """Notes a placement made by another router."""
        self.forget(job, job.start_s)
        self._decodes_at[job.index] = placement.decode.worker_id
        self._num_placed[placement.decode.worker_id] += 1

    def prefilled(self, job: Job, worker: SimWorker, now_s: float) -> None:
        """Does nothing: this router ignores prefill completion."""

    def forget(self, job: Job, now_s: float) -> None:
        """Removes a request from its workers."""
        name = self._decodes_at.pop(job.index, None)
        if name is not None:
            self._num_placed[name] -= 1

    def end(self, job: Job, now_s: float) -> None:
        """Does nothing: `forget` was called before."""

    def _step_s(self, worker: SimWorker) -> float:
        """Seconds of a decode step with all requests placed there and one more."""
        step = worker.group.latency.policy_step
        return step.d + step.e * (self._num_placed[worker.name] + 1)


def _prompts_s(worker: SimWorker, now_s: float) -> float:
    """Seconds of pending prompt work: the rest of the running steps, and the prompts that wait."""
    ends_s = worker.steps.ends_s if worker.steps.work == "prefill" else None
    under_way_s = 0.0 if ends_s is None else ends_s - now_s
    return under_way_s + worker.group.latency.policy_prefill.b * worker.queues.waiting_tokens()
