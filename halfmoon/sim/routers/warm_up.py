"""A gateway for runs whose cluster is filled first: policies place those that count, the lightest choice all others."""

from __future__ import annotations

from halfmoon.policy.values import Placement
from halfmoon.sim.cluster.job import Job
from halfmoon.sim.cluster.worker import SimWorker
from halfmoon.sim.routers.least_loaded import LeastLoadedRouter
from halfmoon.sim.routers.policy_router import PolicyRouter
from halfmoon.sim.slo_tracker import SloTracker, Stage


class WarmUpRouter:
    """Owns who is inside, and so who is handed to policies when the passes that count begin. `misses` says when.

    Until then requests go to the lightest workers; those who come while the last ones that count are served do so
    again. Policies hear of workers from the beginning on, and learn from answers how long they are.
    """

    wants_reports = True

    def __init__(
        self, lightest: LeastLoadedRouter, policies: PolicyRouter, workers: list[SimWorker], misses: SloTracker
    ) -> None:
        self._lightest = lightest
        self._policies = policies
        self._workers = workers
        self._misses = misses
        self._inside: dict[int, Job] = {}
        self._stage: Stage = "filling"

    def place(self, job: Job, exclude: tuple[str, ...], now_s: float) -> Placement:
        """As `PolicyRouter.place`."""
        if self._misses.stage == "counting" != self._stage:
            self._hand_over(now_s)
        self._stage = self._misses.stage
        if self._stage == "counting":
            placement = self._policies.place(job, exclude, now_s)
            self._lightest.note(job, placement)
        else:
            placement = self._lightest.place(job, exclude, now_s)
        self._inside[job.index] = job
        return placement

    def _hand_over(self, now_s: float) -> None:
        """In the order in which it all happened, so that nothing is younger than what comes behind it."""
        for worker in self._workers:
            self._policies.report(worker, now_s)
        jobs = self._inside.values()
        placed = [(job.start_s, False, job) for job in jobs]
        begun = [(job.first_s, True, job) for job in jobs if job.first_s >= 0]
        for at_s, is_begun, job in sorted([*placed, *begun], key=lambda one: one[:2]):
            if is_begun and job.prefill is not None:
                self._policies.prefilled(job, job.prefill, at_s)
            else:
                self._policies.adopt(job, at_s)

    def prefilled(self, job: Job, worker: SimWorker, now_s: float) -> None:
        """As `PolicyRouter.prefilled`."""
        if self._stage == "counting":
            self._policies.prefilled(job, worker, now_s)

    def forget(self, job: Job, now_s: float) -> None:
        """It is on none of its workers any more."""
        self._lightest.forget(job, now_s)
        self._inside.pop(job.index, None)
        if self._stage == "counting":
            self._policies.forget(job, now_s)

    def end(self, job: Job, now_s: float) -> None:
        """It is over."""
        if self._stage == "counting":
            self._policies.end(job, now_s)
        elif self._stage == "filling":
            self._policies.learn(job)
