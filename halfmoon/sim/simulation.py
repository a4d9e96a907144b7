"""Runs a simulated cluster: discrete events on a fake clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from halfmoon.kv.kv_policy import num_findable
from halfmoon.policy.models.segments import SEGMENT_PASSES
from halfmoon.policy.preemption import in_turn
from halfmoon.policy.values import Placement
from halfmoon.sim.cluster.cluster_spec import ClusterSpec, Failure, SloTargets
from halfmoon.sim.cluster.idle_workers import idle_workers
from halfmoon.sim.cluster.kv_transfers import KvTransfers
from halfmoon.sim.cluster.load_reports import LoadReports
from halfmoon.sim.cluster.shared_cores import SharedCores
from halfmoon.sim.cluster.shared_prompts import SharedPrompts
from halfmoon.sim.cluster.store_pool import StorePool
from halfmoon.sim.cluster.store_traffic import StoreTraffic
from halfmoon.sim.cluster.worker_steps import WorkerSteps
from halfmoon.sim.decode_moves import DecodeMoves, HotSpotControl
from halfmoon.sim.event_queue import EventQueue
from halfmoon.sim.result import EndedRequests, SimResult, end_so_far, run_result
from halfmoon.sim.role_control import RoleControl, RoleController
from halfmoon.sim.routers.attempts import Attempts
from halfmoon.sim.routers.choose_router import PolicyUse, choose_router
from halfmoon.sim.routers.policy_router import PolicyRouter
from halfmoon.sim.slo_tracker import SloTracker
from halfmoon.sim.token_times import gaps
from halfmoon.sim.worker.job import Job, Outcome
from halfmoon.sim.worker.worker import SimWorker
from halfmoon.sim.workloads.workload import Workload

_PROGRESS_EVERY = 1_000
_IDS = 1 << 62  # of blocks; a trace may have hashes of 63 bits

Progress = Callable[[int, int], None]
"""Callback `(ended, total)` with numbers of requests."""


def simulate(
    spec: ClusterSpec,
    workload: Workload,
    seed: int = 0,
    on_progress: Progress | None = None,
    *,
    policies: PolicyUse = "as needed",
    tracker: SloTracker | None = None,
    with_gaps: bool = True,
    controller: RoleController | None = None,
) -> SimResult:
    """Simulates until every request has ended or `tracker` has decided. A decided run returns only the requests that
    arrived.

    If the decided pass is held, requests that are still running count as completed with the tokens that they have.

    The same arguments give the same result.

    - policies: `as needed` asks them only where there is more than one route. `always` gives the same result more
      slowly. `never` routes to the least loaded workers, for estimates. `once full` asks them for the passes that count
      for `tracker`.
    - with_gaps: computing gaps takes a third of the time of a run without policies; without them TBT is unknown.
    - controller: changes the workers' roles meanwhile; policies place every request then.

    Raises InvalidRequest if the workload's prefix blocks are not a multiple of the cluster's blocks.
    """
    on_progress = on_progress or (lambda done, total: None)
    tracker = tracker or SloTracker(SloTargets(), "joint", len(workload))
    return _Run(spec, workload, seed, on_progress, tracker, policies, with_gaps, controller).run()


class _Run:
    """Owns the position of each request, from its arrival to its end. Workers report what their steps produce."""

    def __init__(
        self,
        spec: ClusterSpec,
        workload: Workload,
        seed: int,
        on_progress: Progress,
        tracker: SloTracker,
        policies: PolicyUse,
        with_gaps: bool,
        controller: RoleController | None,
    ) -> None:
        self._spec = spec
        self._classes = spec.qos_classes
        self._workload = workload
        self._on_progress = on_progress
        self._tracker = tracker
        self._with_gaps = with_gaps
        self._keeps_times = with_gaps or spec.learns_overheads  # of tokens; gateways learn hand-over times from them
        prefixes = workload.prefixes
        self._kv_policies, self._prefix_block_tokens = spec.kv_policies, spec.prefix_block_tokens(prefixes)
        self._workers = idle_workers(spec, prefixes, keeps_times=self._keeps_times)
        self._by_name = {worker.name: worker for worker in self._workers}
        longest = int(workload.output_tokens.max(initial=1))
        pool = StorePool(spec, self._prefix_block_tokens) if spec.stores.count else None
        self._policy_router = PolicyRouter(spec, self._workers, prefixes, longest, seed, workload.tenants, pool)
        policies = "always" if controller or spec.hot_spots else policies
        self._router = choose_router(spec, self._workers, longest, policies, self._policy_router, tracker)
        self._events = EventQueue()
        reader = self._policy_router if self._router.wants_reports else None
        self._reports = LoadReports(self._events, spec.report_s, reader)
        cores = None if spec.contention.is_none else SharedCores(spec.contention, self._workers)
        self._steps = WorkerSteps(self._events, self._reports, self._workers, cores, self)
        self._shared = SharedPrompts(self._by_name, self._events, self._steps.wake, SEGMENT_PASSES)
        self._transfers = KvTransfers(spec.network, self._workers, self._events, self._steps, spec.stores.count)
        directory = self._policy_router.stores
        self._stores = None
        if pool is not None and directory is not None:
            size = self._prefix_block_tokens
            self._stores = StoreTraffic(pool, spec.stores, self._transfers, self._events, size, directory)
        self._attempts = Attempts(self._events, self._router, self._workers, longest, self._begin, self.end)
        parts = self._workers, self._events, self._policy_router, self._steps
        self._moves = DecodeMoves(*parts, self._transfers)
        self._control = None
        if controller is not None:
            self._control = RoleControl(controller, spec, *parts, self._moves, self._attempts.note_joined)
        if spec.hot_spots:
            HotSpotControl(self._workers, self._events, self._policy_router, self._moves)
        self._inside: dict[int, Job] = {}
        self._jobs: dict[int, Job] = {}  # arrived and not ended
        self._ended = EndedRequests(len(workload))
        self._num_over = 0

    def run(self) -> SimResult:
        for failure in self._spec.failures:
            self._events.at(failure.at_s, self._on_death, failure)
        starts_s = self._workload.start_s.tolist()
        events, pending, num = self._events, self._events.pending, len(starts_s)
        num_arrived = 0
        tracker = self._tracker
        while (num_arrived < num or (pending and self._num_over < num)) and not tracker.is_decided:
            if num_arrived < num and (not pending or starts_s[num_arrived] <= pending[0][0]):
                events.now_s = starts_s[num_arrived]
                self._arrive(num_arrived)
                num_arrived += 1
            else:
                events.run_next()
        for job in self._attempts.waiting:
            self.end(job, "failed")
        self._on_progress(num, num)
        if tracker.is_held:
            end_so_far(self._jobs.values(), self._workers, events.now_s)
        for job in self._jobs.values():
            self._ended.add(job)
        return run_result(
            self._spec,
            self._workload,
            self._ended,
            num_arrived,
            self._workers,
            self._transfers.num_bytes,
            has_gaps=self._with_gaps,
        )

    # the life of a request

    def _arrive(self, index: int) -> None:
        workload = self._workload
        prompt = int(workload.prompt_tokens[index])
        job = Job(index, self._events.now_s, prompt, int(workload.output_tokens[index]), [])
        if workload.classes is not None:
            position = int(workload.classes[index])
            job.classify(position, self._classes[position])
        job.tbt_target_s = self._classes[job.qos_class].tbt_target_s
        job.keep_by(self._classes[job.qos_class].kv_policy)
        job.prefix_blocks = self._prefix_blocks(job)
        self._jobs[index] = job
        self._tracker.came(index)
        if self._spec.request_s:
            self._events.at(self._events.now_s + self._spec.request_s, self._attempts.place, job)
        else:
            self._attempts.place(job)

    def _prefix_blocks(self, job: Job) -> list[int]:
        """Ids of the whole blocks of a request that caches can know: other ones under each policy.

        Under a policy that chooses, those of the prompt alone, or none.
        """
        prefixes, size = self._workload.prefixes, self._prefix_block_tokens
        if prefixes is None:
            return []
        ids = prefixes.sequence(job.index, job.prompt)
        num, num_parts = len(self._kv_policies), prefixes.block_tokens // size
        if num * num_parts > 1:
            own = self._kv_policies.index(job.policy)
            ids = [((block * num_parts + part) * num + own) % _IDS for block in ids for part in range(num_parts)]
        return ids[: num_findable(job.policy, job.prompt, job.prompt + job.output) // size]

    def _begin(self, job: Job, placement: Placement) -> bool:
        """Puts a job on its workers, or ends one that they can never hold; False if the decode worker has no room."""
        self._inside[job.index] = job
        if self._control is not None and job.retries is None:
            self._control.placed(job, placement.work_s)
        prefill, decode = self._by_name[placement.prefill.worker_id], self._by_name[placement.decode.worker_id]
        job.prefill, job.decode = prefill.number, decode.number
        job.at = job.prefill
        lengths = (prefill, job.target), (decode, job.prompt + job.output - 1)  # the last token is never run
        if not all(worker.queues.blocks.can_ever_hold(job, length) for worker, length in lengths):
            self.end(job, "refused")
            return True
        if self._needs_room(job, placement):
            keeps = placement.is_colocated
            has_room = decode.may_keep(job, self._events.now_s) if keeps else decode.reserve(job, self._events.now_s)
            self._steps.schedule(decode)
            self._reports.note(decode)
            if not has_room:
                job.num_refusals += 1
                self._forget(job)
                return False
        if self._stores is not None:
            self._stores.begin(job, prefill)
        for copy in self._policy_router.copies.take():
            source, target = self._policy_router.source(copy.source), self._by_name[copy.target]
            self._transfers.copy(source, target, copy.blocks, copy.missing_tokens)
        if placement.fetched_tokens:
            self._fetch(job, prefill, placement)
        if placement.segments is not None:
            self._shared.begin(job, placement, placement.segments)
        prefill.queues.prompts.add(job)
        self._steps.wake(prefill)
        return True

    def _needs_room(self, job: Job, placement: Placement) -> bool:
        """Whether the decode worker refuses a job for which it has no room now."""
        if placement.is_colocated:
            return placement.decode.role == "decode"
        return self._spec.network.handover == "push" and job.num_left > 1

    def _forget(self, job: Job) -> None:
        self._shared.end(job)
        self._router.forget(job, self._events.now_s)
        del self._inside[job.index]

    def _fetch(self, job: Job, target: SimWorker, placement: Placement) -> None:
        """Fetches the end of its prefix from the source that is free first, while the beginning is computed."""
        stores = self._policy_router.stores
        if self._stores is not None and stores is not None and placement.source == stores.holder:
            self._stores.load(job, target, placement, self._policy_router.restore_plan)
            return
        size = self._prefix_block_tokens
        source = min(self._policy_router.sources(job, placement), key=lambda one: self._transfers.wait_s(one, target))
        num_there = source.kv.use(job.prefix_blocks, (placement.cached_tokens + placement.fetched_tokens) // size)
        placement = replace(placement, fetched_tokens=max(num_there * size - placement.cached_tokens, 0))
        wait_s, token_s = self._transfers.wait_s(source, target), self._transfers.fetch_s_per_token(source, target)
        plan = self._policy_router.fetch_plan(placement, job.target, wait_s, token_s)
        num_tokens = plan.num_load_blocks * size
        if num_tokens:
            hidden_s = wait_s + num_tokens * token_s - plan.seconds if plan.is_by_layer else 0.0
            self._transfers.fetch(job, source, target, num_there * size, num_tokens, hidden_s)

    def prefilled(self, job: Job, worker: SimWorker) -> None:
        """Handles a computed prompt and its sampled token."""
        if job.is_help:
            self._shared.computed(job, worker)
            return
        self._shared.end(job)
        now_s = self._events.now_s
        if job.first_s < 0:
            job.first_s = now_s
            self._tracker.first(job, self._spec.answer_s)
        elif self._keeps_times:
            job.later_s.append(np.array([now_s]))
        if not job.is_prefilled:  # otherwise it was preempted and computed again
            job.is_prefilled = True
            self._router.prefilled(job, worker, now_s)
            if self._stores is not None:
                self._stores.write(job, worker, job.target)
        if not job.num_left:
            worker.queues.blocks.release(job)
            self.end(job, "completed")
        elif worker.number == job.decode:
            worker.queues.decode(job)
        else:
            assert job.decode is not None
            receiver = self._workers[job.decode]
            if job.reserved_blocks:
                self._transfers.hand_over(job, worker, receiver)
            else:
                receiver.queues.backlog.append(job)
                self.pull(receiver)

    def after_step(self, worker: SimWorker) -> None:
        """Handles a worker between two steps."""
        self._moves.after_step(worker)
        if self._control is not None:
            self._control.after_step(worker)

    def pull(self, worker: SimWorker) -> None:
        """Hands over jobs that wait for room on this worker, in order of arrival; in turn where some may be paused."""
        if worker.queues.allows_pauses:
            worker.queues.backlog = deque(in_turn(worker.queues.backlog, self._events.now_s))
        while worker.queues.backlog and worker.reserve(worker.queues.backlog[0], self._events.now_s):
            job = worker.queues.backlog.popleft()
            assert job.prefill is not None
            self._transfers.hand_over(job, self._workers[job.prefill], worker)
        self._steps.schedule(worker)
        self._reports.note(worker)

    def end(self, job: Job, outcome: Outcome) -> None:
        if self._stores is not None and outcome == "completed" and job.decode is not None:
            num_computed = job.prompt + job.output - 1
            if num_computed // self._prefix_block_tokens > job.target // self._prefix_block_tokens:
                self._stores.write(job, self._workers[job.decode], num_computed)
        job.outcome = outcome
        job.end_s = self._events.now_s
        job.state = "ended"
        if outcome == "completed" and job.later_s:
            job.longest_gap_s, job.tail_gap_s = gaps(job.first_s, job.later_s)
        self._tracker.end(job, self._spec.answer_s)
        if self._control is not None:
            self._control.ended(job)
        if self._inside.pop(job.index, None) is not None:
            self._router.forget(job, self._events.now_s)
        self._router.end(job, self._events.now_s)
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
        self._shared.lost(worker)
        self._steps.schedule(worker)
        self._policy_router.leave(worker)
        self._attempts.note_left()
        lost = [job for job in self._inside.values() if worker.number in (job.at, job.decode)]
        freed = {number: None for job in lost for number in (job.at, job.decode) if number is not None}
        for job in lost:
            self._fail_over(job)
        for number in freed:  # others may have waited for what these jobs held there
            self._steps.wake(self._workers[number])
        for other in self._workers:
            if other.queues.backlog:
                self.pull(other)
        if failure.back_s is not None:
            self._events.at(failure.back_s, self._on_return, worker)

    def _fail_over(self, job: Job) -> None:
        """Continues a job elsewhere, with the tokens that it has."""
        assert job.at is not None
        assert job.decode is not None
        at, decode = self._workers[job.at], self._workers[job.decode]
        if at.is_alive:  # its decode worker died
            at.queues.withdraw(job)
        elif decode.is_alive:
            if job.reserved_blocks:
                decode.queues.unreserve(job)
            elif job in decode.queues.backlog:
                decode.queues.backlog.remove(job)
        self._forget(job)
        job.num_failovers += 1
        self._attempts.lost(job, "lost" if decode.is_alive else "decode lost")

    def _on_return(self, worker: SimWorker) -> None:
        worker.is_alive = True
        self._policy_router.join(worker, self._events.now_s)
        self._attempts.note_joined()
