"""The run of a simulated cluster: discrete events on a fake clock."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from halfmoon.policy.values import Placement
from halfmoon.sim.cluster.cluster_spec import ClusterSpec, Failure, SloTargets
from halfmoon.sim.cluster.contention import SharedCores
from halfmoon.sim.cluster.idle_workers import idle_workers
from halfmoon.sim.cluster.job import Job, Outcome
from halfmoon.sim.cluster.kv_transfers import KvTransfers
from halfmoon.sim.cluster.load_reports import LoadReports
from halfmoon.sim.cluster.worker import SimWorker
from halfmoon.sim.cluster.worker_steps import WorkerSteps
from halfmoon.sim.ended_requests import EndedRequests
from halfmoon.sim.event_queue import EventQueue
from halfmoon.sim.result import SimResult
from halfmoon.sim.routers.attempts import Attempts
from halfmoon.sim.routers.choose_router import PoliciesAsked, router_of
from halfmoon.sim.routers.policy_router import PolicyRouter
from halfmoon.sim.run_result import end_so_far, run_result
from halfmoon.sim.slo_tracker import SloTracker
from halfmoon.sim.token_times import gaps
from halfmoon.sim.workloads.workload import Workload

_PROGRESS_EVERY = 1_000

Progress = Callable[[int, int], None]
"""Told how many requests are over, of how many."""


def simulate(
    spec: ClusterSpec,
    workload: Workload,
    seed: int = 0,
    on_progress: Progress | None = None,
    *,
    policies: PoliciesAsked = "as needed",
    misses: SloTracker | None = None,
    with_gaps: bool = True,
) -> SimResult:
    """Runs the workload until every request is over, or `misses` decided: then only those that came are in the result.
    Where their pass is held, those inside count as completed with the tokens that they have.

    The same arguments give the same result.

    Without gaps, which cost a third of the time where there are no policies to ask, nothing is known of TBT. Policies
    are asked where there is more than one way to go; to ask them `always` changes nothing but time, and `never` is for
    estimates, with the lightest worker instead. `once full`: the passes of `misses` that count, and no others.
    Raises InvalidRequest where the workload's prefix blocks are no multiple of the cluster's blocks.
    """
    on_progress = on_progress or (lambda done, total: None)
    misses = misses or SloTracker(SloTargets(), "joint", len(workload))
    return _Run(spec, workload, seed, on_progress, misses, policies=policies, with_gaps=with_gaps).run()


class _Run:
    """Owns where each request is, from its arrival to its end. Workers tell it what their steps bring."""

    def __init__(
        self,
        spec: ClusterSpec,
        workload: Workload,
        seed: int,
        on_progress: Progress,
        misses: SloTracker,
        *,
        policies: PoliciesAsked,
        with_gaps: bool,
    ) -> None:
        self._spec = spec
        self._workload = workload
        self._on_progress = on_progress
        self._misses = misses
        self._with_gaps = with_gaps
        self._keeps_times = with_gaps or spec.learns_overheads  # of tokens: gateways learn what hand-overs take
        prefixes = workload.prefixes
        self._unit_tokens = prefixes.block_tokens if prefixes else spec.block_tokens
        self._workers = idle_workers(spec, self._unit_tokens, keeps_times=self._keeps_times)
        self._by_name = {worker.name: worker for worker in self._workers}
        longest = int(workload.output_tokens.max(initial=1))
        self._policies = PolicyRouter(spec, self._workers, prefixes, longest, seed)
        self._gateway = router_of(spec, self._workers, longest, policies, self._policies, misses)
        self._events = EventQueue()
        listening = self._policies if self._gateway.wants_reports else None
        self._reports = LoadReports(self._events, spec.report_s, listening)
        cores = None if spec.contention.is_none else SharedCores(spec.contention, self._workers)
        self._steps = WorkerSteps(self._events, self._reports, self._workers, cores, self)
        self._transfers = KvTransfers(spec.network, self._workers, self._events, self._steps)
        self._attempts = Attempts(self._events, self._gateway, longest, self._begin, self.end)
        self._inside: dict[int, Job] = {}
        self._jobs: dict[int, Job] = {}  # that came and are not over
        self._num_arrived = 0
        self._ended = EndedRequests(len(workload))
        self._num_over = 0

    def run(self) -> SimResult:
        for failure in self._spec.failures:
            self._events.at(failure.at_s, self._on_death, failure)
        starts_s = self._workload.start_s.tolist()
        events, pending, num = self._events, self._events.pending, len(starts_s)
        following = 0
        misses = self._misses
        while (following < num or (pending and self._num_over < num)) and not misses.is_decided:
            if following < num and (not pending or starts_s[following] <= pending[0][0]):
                events.now_s = starts_s[following]
                self._arrive(following)
                following += 1
            else:
                events.run_next()
        for job in self._attempts.waiting:
            self.end(job, "failed")
        self._on_progress(num, num)
        if misses.is_held:
            end_so_far(self._jobs.values(), self._workers, events.now_s)
        for job in self._jobs.values():
            self._ended.add(job)
        return run_result(
            self._spec,
            self._workload,
            self._ended,
            self._num_arrived,
            self._workers,
            self._transfers.num_bytes,
            has_gaps=self._with_gaps,
        )

    # a request's life

    def _arrive(self, index: int) -> None:
        workload = self._workload
        prompt, units = int(workload.prompt_tokens[index]), []
        if workload.prefixes is not None:
            units = workload.prefixes.of(index)[: prompt // self._unit_tokens].tolist()
        job = Job(index, self._events.now_s, prompt, int(workload.output_tokens[index]), units)
        self._jobs[index] = job
        self._num_arrived += 1
        self._misses.came(index)
        if self._spec.request_s:
            self._events.at(self._events.now_s + self._spec.request_s, self._attempts.place, job)
        else:
            self._attempts.place(job)

    def _begin(self, job: Job, placement: Placement) -> bool:
        """Puts it on its workers; False where the decode worker has no room."""
        self._inside[job.index] = job
        job.prefill, job.decode = self._by_name[placement.prefill.worker_id], self._by_name[placement.decode.worker_id]
        job.at = job.prefill
        if self._spec.network.handover == "push" and not placement.is_colocated and job.num_left > 1:
            reserved = job.decode.reserve(job, self._events.now_s)
            self._steps.schedule(job.decode)
            self._reports.note(job.decode)
            if not reserved:
                job.num_refusals += 1
                self._forget(job)
                return False
        if placement.fetched_tokens:
            self._fetch(job, job.prefill, placement)
        job.prefill.prompts.add(job)
        self._steps.wake(job.prefill)
        return True

    def _forget(self, job: Job) -> None:
        self._gateway.forget(job, self._events.now_s)
        del self._inside[job.index]

    def _fetch(self, job: Job, target: SimWorker, placement: Placement) -> None:
        """The end of its prefix is fetched from who has it, while the beginning is computed."""
        source = self._policies.best_holder(job)
        plan = self._policies.restore_plan(placement, self._transfers.wait_s(source, target))
        num_tokens = plan.num_load_blocks * self._unit_tokens
        if num_tokens:
            known_tokens = placement.cached_tokens + placement.fetched_tokens
            self._transfers.fetch(job, source, target, known_tokens, num_tokens)

    def prefilled(self, job: Job, worker: SimWorker) -> None:
        """A prompt is computed, and a token drawn."""
        now_s = self._events.now_s
        if job.first_s < 0:
            job.first_s = now_s
            self._misses.first(job, self._spec.answer_s)
        elif self._keeps_times:
            job.later_s.append(np.array([now_s]))
        if not job.is_prefilled:  # else it was preempted and computed again
            job.is_prefilled = True
            self._gateway.prefilled(job, worker, now_s)
        if not job.num_left:
            worker.pages.release(job)
            self.end(job, "completed")
        elif worker is job.decode:
            worker.decode(job)
        else:
            assert job.decode is not None
            if job.reserved:
                self._transfers.hand_over(job, worker, job.decode)
            else:
                job.decode.backlog.append(job)
                self.pull(job.decode)

    def pull(self, worker: SimWorker) -> None:
        """Takes over who has waited for room, first come first served."""
        while worker.backlog and worker.reserve(worker.backlog[0], self._events.now_s):
            job = worker.backlog.popleft()
            assert job.prefill is not None
            self._transfers.hand_over(job, job.prefill, worker)
        self._steps.schedule(worker)
        self._reports.note(worker)

    def end(self, job: Job, outcome: Outcome) -> None:
        job.outcome = outcome
        job.end_s = self._events.now_s
        job.state = "ended"
        if outcome == "completed" and job.later_s:
            job.longest_gap_s, job.tail_gap_s = gaps(job.first_s, job.later_s)
        self._misses.end(job, self._spec.answer_s)
        if self._inside.pop(job.index, None) is not None:
            self._gateway.forget(job, self._events.now_s)
        self._gateway.end(job, self._events.now_s)
        job.later_s = []
        self._ended.add(job)
        del self._jobs[job.index]
        self._num_over += 1
        if self._num_over % _PROGRESS_EVERY == 0:
            self._on_progress(self._num_over, len(self._workload))

    # failures

    def _on_death(self, failure: Failure) -> None:
        worker = self._workers[failure.worker]
        if not worker.is_alive:
            return
        worker.die(self._events.now_s)
        self._steps.schedule(worker)
        self._policies.leave(worker)
        self._attempts.note_left()
        for job in [one for one in self._inside.values() if worker in (one.at, one.decode)]:
            self._fail_over(job)
        for other in self._workers:
            if other.backlog:  # what was reserved for those that went on elsewhere is free
                self.pull(other)
        if failure.back_s is not None:
            self._events.at(failure.back_s, self._on_return, worker)

    def _fail_over(self, job: Job) -> None:
        """It goes on elsewhere, with the tokens that it has."""
        assert job.at is not None
        assert job.decode is not None
        if job.at.is_alive:  # who was to decode it died
            job.at.withdraw(job)
            self._reports.note(job.at)
        elif job.decode.is_alive:
            if job.reserved:
                job.decode.unreserve(job)
            elif job in job.decode.backlog:
                job.decode.backlog.remove(job)
            self._reports.note(job.decode)
        self._forget(job)
        job.num_failovers += 1
        self._attempts.lost(job)

    def _on_return(self, worker: SimWorker) -> None:
        worker.is_alive = True
        self._policies.join(worker, self._events.now_s)
        self._attempts.note_joined()
