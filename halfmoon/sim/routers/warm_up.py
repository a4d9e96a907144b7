"""A router that warms the cluster up: policies place the requests that count, the least-loaded router all others."""

from __future__ import annotations

from halfmoon.policy.values import Placement
from halfmoon.sim.routers.least_loaded import LeastLoadedRouter
from halfmoon.sim.routers.policy_router import PolicyRouter
from halfmoon.sim.slo_tracker import SloTracker, Stage
from halfmoon.sim.worker.job import Job
from halfmoon.sim.worker.worker import SimWorker


class WarmUpRouter:
    """Owns the requests inside, which the policies take over when the passes that count begin, as `tracker` says.

    Before that, requests go to the least loaded workers. So do requests that arrive while the last ones that count
    finish. The policies receive load reports from the beginning, and learn answer lengths.
    """

    wants_reports = True

    def __init__(
        self,
        least_loaded: LeastLoadedRouter,
        policy_router: PolicyRouter,
        workers: list[SimWorker],
        tracker: SloTracker,
    ) -> None:
        self._least_loaded = least_loaded
        self._policy_router = policy_router
        self._workers = workers
        self._tracker = tracker
        self._inside: dict[int, Job] = {}
        self._stage: Stage = "filling"

    def place(self, job: Job, exclude: tuple[str, ...], now_s: float) -> Placement:
        """As in `PolicyRouter.place`."""
        if self._tracker.stage == "counting" != self._stage:
            self._hand_over(now_s)
        self._stage = self._tracker.stage
        if self._stage == "counting":
            placement = self._policy_router.place(job, exclude, now_s)
            self._least_loaded.note(job, placement)
        else:
            placement = self._least_loaded.place(job, exclude, now_s)
        self._inside[job.index] = job
        return placement

    def _hand_over(self, now_s: float) -> None:
        """Replays all events to the policies in order of time."""
        for worker in self._workers:
            self._policy_router.report(worker, now_s)
        jobs = self._inside.values()
        placed = [(job.start_s, False, job) for job in jobs]
        begun = [(job.first_s, True, job) for job in jobs if job.first_s >= 0]
        for at_s, is_begun, job in sorted([*placed, *begun], key=lambda one: one[:2]):
            if is_begun and job.prefill is not None:
                self._policy_router.prefilled(job, self._workers[job.prefill], at_s)
            else:
                self._policy_router.adopt(job, at_s)

    def prefilled(self, job: Job, worker: SimWorker, now_s: float) -> None:
        """As in `PolicyRouter.prefilled`."""
        if self._stage == "counting":
            self._policy_router.prefilled(job, worker, now_s)

    def forget(self, job: Job, now_s: float) -> None:
        """Removes the request from its workers."""
        self._least_loaded.forget(job, now_s)
        self._inside.pop(job.index, None)
        if self._stage == "counting":
            self._policy_router.forget(job, now_s)

    def end(self, job: Job, now_s: float) -> None:
        """Ends the request."""
        if self._stage == "counting":
            self._policy_router.end(job, now_s)
        elif self._stage == "filling":
            self._policy_router.learn(job)
