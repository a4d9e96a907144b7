"""The run of a simulated cluster: discrete events on a fake clock."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from halfmoon.errors import InvalidRequest, NoCapacity, Unavailable
from halfmoon.policy.placement import ContextLengthExceeded, Placement
from halfmoon.sim.cluster import ClusterSpec, Failure, Targets
from halfmoon.sim.coders import Coders
from halfmoon.sim.contention import SharedCores
from halfmoon.sim.ended_requests import EndedRequests
from halfmoon.sim.gateway import SimGateway
from halfmoon.sim.job import Job, Outcome
from halfmoon.sim.lightest_choice import LightestChoice
from halfmoon.sim.links import Links
from halfmoon.sim.misses import Misses
from halfmoon.sim.prompt_queue import Chunk
from halfmoon.sim.result import SimResult, WorkerFigures
from halfmoon.sim.sole_choice import SoleChoice
from halfmoon.sim.token_times import gaps
from halfmoon.sim.worker import SimWorker
from halfmoon.sim.workload import Workload

_MAX_REFUSALS = 3  # by decode workers without room, in a row: then the request is refused
_REFUSED_WAIT_S = 0.1
_MAX_FAILOVERS = 2
_PROGRESS_EVERY = 1_000

PoliciesAsked = Literal["as needed", "always", "never"]

Progress = Callable[[int, int], None]
"""Told how many requests are over, of how many."""


def simulate(
    spec: ClusterSpec,
    workload: Workload,
    seed: int = 0,
    on_progress: Progress | None = None,
    *,
    policies: PoliciesAsked = "as needed",
    misses: Misses | None = None,
    with_gaps: bool = True,
) -> SimResult:
    """Runs the workload until every request is over, or `misses` decided: then only those that came are in the result.
    Where their pass is held, those inside count as completed with the tokens that they have.

    The same arguments give the same result.

    Without gaps, which cost a third of the time where there are no policies to ask, nothing is known of TBT. Policies
    are asked where there is more than one way to go; to ask them `always` changes nothing but time, and `never` is for
    estimates, with the lightest worker instead.
    Raises InvalidRequest where the workload's prefix blocks are no multiple of the cluster's blocks.
    """
    on_progress = on_progress or (lambda done, total: None)
    misses = misses or Misses(Targets(), "joint", len(workload))
    return _Run(spec, workload, seed, on_progress, misses, policies=policies, with_gaps=with_gaps).run()


class _Run:
    """Owns the clock and the events. Events are (when, number, handler, arguments); equal times keep their order."""

    def __init__(
        self,
        spec: ClusterSpec,
        workload: Workload,
        seed: int,
        on_progress: Progress,
        misses: Misses,
        *,
        policies: PoliciesAsked,
        with_gaps: bool,
    ) -> None:
        self._spec = spec
        self._workload = workload
        self._on_progress = on_progress
        self._misses = misses
        self._with_gaps = with_gaps
        prefixes = workload.prefixes
        unit_tokens = prefixes.block_tokens if prefixes else spec.block_tokens
        if unit_tokens % spec.block_tokens:
            raise InvalidRequest(
                f"the workload's prefixes are of blocks of {unit_tokens} tokens, which is no multiple of the "
                f"cluster's block_tokens, {spec.block_tokens}",
                param="block_tokens",
            )
        self._unit_tokens = unit_tokens
        groups = [group for group in spec.groups for _ in range(group.count)]
        nodes = spec.nodes
        self._workers = [
            SimWorker(
                number,
                group,
                nodes[number],
                spec.block_tokens,
                unit_tokens // spec.block_tokens,
                keeps_times=with_gaps,
            )
            for number, group in enumerate(groups)
        ]
        self._by_name = {worker.name: worker for worker in self._workers}
        self._links = Links(spec.network, max(nodes) + 1)
        self._coders = Coders(spec.network, len(groups))
        longest = int(workload.output_tokens.max(initial=1))
        self._policies = SimGateway(spec, self._workers, prefixes, longest, seed)
        self._gateway: SimGateway | SoleChoice | LightestChoice = self._policies
        if policies == "as needed" and SoleChoice.is_enough(spec):
            self._gateway = SoleChoice(self._workers, longest)
        elif policies == "never" and LightestChoice.is_possible(spec):
            self._gateway = LightestChoice(self._workers, longest)
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = itertools.count()
        self._now_s = 0.0
        self._cores = None if spec.contention.is_none else SharedCores(spec.contention, self._workers)
        self._told = [worker.steps.version for worker in self._workers]  # of which a wake event is in the queue
        self._dirty: dict[int, SimWorker] = {}  # changed since their last report
        self._has_tick = False
        self._inside: dict[int, Job] = {}
        self._parked: list[Job] = []  # until some worker comes back
        self._jobs: dict[int, Job] = {}  # that came and are not over
        self._num_arrived = 0
        self._ended = EndedRequests(len(workload))
        self._num_over = 0

    def run(self) -> SimResult:
        for failure in self._spec.failures:
            self._at(failure.at_s, self._on_death, failure)
        starts_s = self._workload.start_s.tolist()
        events, num = self._events, len(starts_s)
        following = 0
        misses = self._misses
        while (following < num or (events and self._num_over < num)) and not misses.is_decided:
            if following < num and (not events or starts_s[following] <= events[0][0]):
                self._now_s = starts_s[following]
                self._arrive(following)
                following += 1
            else:
                self._now_s, _, handler, arguments = heapq.heappop(events)
                handler(*arguments)
        for job in self._parked:
            self._end(job, "failed")
        self._on_progress(num, num)
        return self._result()

    def _at(self, at_s: float, handler: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._events, (at_s, next(self._numbers), handler, arguments))

    # a request's life

    def _arrive(self, index: int) -> None:
        workload = self._workload
        prompt, units = int(workload.prompt_tokens[index]), []
        if workload.prefixes is not None:
            units = workload.prefixes.of(index)[: prompt // self._unit_tokens].tolist()
        job = Job(index, self._now_s, prompt, int(workload.output_tokens[index]), units)
        self._jobs[index] = job
        self._num_arrived += 1
        if self._spec.request_s:
            self._at(self._now_s + self._spec.request_s, self._place, job, ())
        else:
            self._place(job, ())

    def _place(self, job: Job, exclude: tuple[str, ...]) -> None:
        """Puts it on its workers; one that no worker can take waits, is refused, or is placed again elsewhere."""
        try:
            placement = self._gateway.place(job, exclude, self._now_s)
        except (ContextLengthExceeded, NoCapacity):
            self._end(job, "refused")
            return
        except Unavailable:
            if exclude:
                self._at(self._now_s + _REFUSED_WAIT_S, self._place, job, ())
            else:
                self._parked.append(job)
            return
        self._inside[job.index] = job
        job.prefill, job.decode = self._by_name[placement.prefill.worker_id], self._by_name[placement.decode.worker_id]
        job.at = job.prefill
        if self._spec.network.handover == "push" and not placement.is_colocated and job.num_left > 1:
            reserved = job.decode.reserve(job, self._now_s)
            self._schedule(job.decode)
            self._note(job.decode)
            if not reserved:
                self._refused_by(job, exclude)
                return
        if placement.fetched_tokens:
            self._fetch(job, placement)
        job.prefill.prompts.add(job)
        self._poke(job.prefill)

    def _refused_by(self, job: Job, exclude: tuple[str, ...]) -> None:
        job.num_refusals += 1
        assert job.decode is not None
        name = job.decode.name
        self._gateway.forget(job)
        del self._inside[job.index]
        if job.num_refusals >= _MAX_REFUSALS:
            self._end(job, "refused")
        else:
            job.place()
            self._place(job, (*exclude, name))

    def _fetch(self, job: Job, placement: Placement) -> None:
        """The end of its prefix is fetched from who has it, while the beginning is computed."""
        assert job.prefill is not None
        target = job.prefill
        source = self._policies.best_holder(job)
        wait_s = self._links.wait_s(source.node, target.node, self._now_s)
        plan = self._policies.restore_plan(placement, wait_s)
        num_tokens = plan.num_load_blocks * self._unit_tokens
        if not num_tokens:
            return
        job.load_end = placement.cached_tokens + placement.fetched_tokens
        job.front_end = job.load_end - num_tokens
        job.is_loading = True
        end_s = self._links.send(source.node, target.node, self._kv_bytes(job, num_tokens), self._now_s, self._now_s)
        self._at(end_s, self._on_loaded, job, job.attempt)

    def _on_loaded(self, job: Job, attempt: int) -> None:
        if job.attempt == attempt and job.prefill is not None:
            job.is_loading = False
            self._poke(job.prefill)

    def _prefilled(self, job: Job, worker: SimWorker) -> None:
        """A prompt is computed, and a token drawn."""
        now_s = self._now_s
        if job.first_s < 0:
            job.first_s = now_s
            self._misses.first(job, self._spec.answer_s)
        elif self._with_gaps:
            job.later_s.append(np.array([now_s]))
        if not job.is_prefilled:  # else it was preempted and computed again
            job.is_prefilled = True
            self._gateway.prefilled(job, worker, now_s)
        if not job.num_left:
            worker.release(job)
            self._end(job, "completed")
        elif worker is job.decode:
            worker.decode(job)
        elif job.reserved:
            self._send(job)
        else:
            assert job.decode is not None
            job.decode.backlog.append(job)
            self._pull(job.decode)

    def _send(self, job: Job) -> None:
        assert job.prefill is not None
        assert job.decode is not None
        is_pushed = self._spec.network.handover == "push"
        ready_s = max(job.begun_s, 0.0) if is_pushed else self._now_s
        num_bytes = self._kv_bytes(job, job.target)
        end_s = self._links.send(job.prefill.node, job.decode.node, num_bytes, ready_s, self._now_s)
        raw_bytes = num_bytes / self._spec.network.kv_ratio
        coded_s = self._coders.code(job.prefill.number, job.decode.number, raw_bytes, ready_s, self._now_s)
        self._at(max(end_s, coded_s), self._on_sent, job, job.attempt)

    def _on_sent(self, job: Job, attempt: int) -> None:
        """Its KV is where it decodes."""
        if job.attempt != attempt:
            return
        assert job.prefill is not None
        assert job.decode is not None
        job.prefill.release(job)
        job.decode.arrived.append(job)
        job.at = job.decode
        job.state = "arrived"
        self._poke(job.prefill)
        self._poke(job.decode)

    def _pull(self, worker: SimWorker) -> None:
        """Takes over who has waited for room, first come first served."""
        while worker.backlog and worker.reserve(worker.backlog[0], self._now_s):
            self._send(worker.backlog.popleft())
        self._schedule(worker)
        self._note(worker)

    def _kv_bytes(self, job: Job, num_tokens: int) -> float:
        assert job.prefill is not None
        return num_tokens * job.prefill.group.latency.kv_bytes_per_token * self._spec.network.kv_ratio

    def _end(self, job: Job, outcome: Outcome) -> None:
        job.outcome = outcome
        job.end_s = self._now_s
        job.state = "ended"
        if outcome == "completed" and job.later_s:
            job.longest_gap_s, job.tail_gap_s = gaps(job.first_s, job.later_s)
        job.later_s = []
        self._misses.end(job, self._spec.answer_s)
        if self._inside.pop(job.index, None) is not None:
            self._gateway.forget(job)
        self._gateway.end(job, self._now_s)
        self._ended.add(job)
        del self._jobs[job.index]
        self._num_over += 1
        if self._num_over % _PROGRESS_EVERY == 0:
            self._on_progress(self._num_over, len(self._workload))

    # workers

    def _poke(self, worker: SimWorker) -> None:
        """There may be something new to do for it."""
        self._note(worker)
        if not worker.is_alive:
            return
        if worker.steps.wake_s is None:
            self._start(worker)
        else:
            worker.interrupt(self._now_s)
            self._schedule(worker)

    def _start(self, worker: SimWorker) -> None:
        chunks = worker.start(self._now_s)
        if chunks:
            self._at(worker.steps.passage_s, self._on_passed, worker, chunks)
        self._schedule(worker)

    def _schedule(self, worker: SimWorker) -> None:
        if self._cores is not None:
            for one in self._cores.changed(worker, self._now_s):
                self._tell(one)
        self._tell(worker)

    def _tell(self, worker: SimWorker) -> None:
        steps = worker.steps
        if steps.wake_s is not None and self._told[worker.number] != steps.version:
            self._told[worker.number] = steps.version
            self._at(steps.wake_s, self._on_wake, worker, steps.version)

    def _on_wake(self, worker: SimWorker, version: int) -> None:
        if worker.steps.version != version:
            return
        finished = worker.finish(self._now_s)
        for job in finished.prompts:
            self._prefilled(job, worker)
        for job in finished.ended:
            self._end(job, "completed")
        self._note(worker)
        if worker.backlog and (finished.ended or finished.prompts):  # a preempted one may end with its prompt
            self._pull(worker)
        if worker.steps.wake_s is None:
            self._start(worker)

    def _on_passed(self, worker: SimWorker, chunks: list[Chunk]) -> None:
        for job in worker.computed(chunks):
            self._prefilled(job, worker)
        self._poke(worker)

    def _note(self, worker: SimWorker) -> None:
        """Its next load report says something new."""
        self._dirty[worker.number] = worker
        if self._gateway.wants_reports and not self._has_tick:
            self._has_tick = True
            report_s = self._spec.report_s
            self._at((self._now_s // report_s + 1) * report_s, self._on_tick)

    def _on_tick(self) -> None:
        self._has_tick = False
        dirty, self._dirty = self._dirty, {}
        for worker in dirty.values():
            if worker.is_alive:
                self._policies.report(worker, self._now_s)
                if worker.steps.wake_s is not None:
                    self._note(worker)

    # failures

    def _on_death(self, failure: Failure) -> None:
        worker = self._workers[failure.worker]
        if not worker.is_alive:
            return
        worker.die(self._now_s)
        self._schedule(worker)
        self._policies.leave(worker)
        for job in [one for one in self._inside.values() if worker in (one.at, one.decode)]:
            self._fail_over(job)
        for other in self._workers:
            if other.backlog:  # what was reserved for those that went on elsewhere is free
                self._pull(other)
        if failure.back_s is not None:
            self._at(failure.back_s, self._on_return, worker)

    def _fail_over(self, job: Job) -> None:
        """It goes on elsewhere, with the tokens that it has."""
        assert job.at is not None
        assert job.decode is not None
        if job.at.is_alive:  # who was to decode it died
            job.at.withdraw(job)
            self._note(job.at)
        elif job.decode.is_alive:
            if job.reserved:
                job.decode.unreserve(job)
            elif job in job.decode.backlog:
                job.decode.backlog.remove(job)
            self._note(job.decode)
        self._gateway.forget(job)
        del self._inside[job.index]
        job.num_failovers += 1
        job.place()
        if job.num_failovers > _MAX_FAILOVERS:
            self._end(job, "failed")
        else:
            self._place(job, ())

    def _on_return(self, worker: SimWorker) -> None:
        worker.is_alive = True
        self._policies.join(worker, self._now_s)
        parked, self._parked = self._parked, []
        for job in parked:
            self._place(job, ())

    def _end_so_far(self) -> None:
        """Those that have a first token end with the tokens of the steps that are done."""
        for worker in self._workers:
            worker.steps.abort(self._now_s)
        for job in self._jobs.values():
            if job.state == "decoding" and job.decode is not None:
                job.decode.decodes.drop(job)
            if job.first_s >= 0:
                job.outcome, job.end_s = "completed", self._now_s
            if job.later_s:
                job.longest_gap_s, job.tail_gap_s = gaps(job.first_s, job.later_s)

    def _result(self) -> SimResult:
        workers, ended, num, answer_s = self._workers, self._ended, self._num_arrived, self._spec.answer_s
        if self._misses.is_held:
            self._end_so_far()
        for job in self._jobs.values():
            ended.add(job)
        start_s, first_s, begun_s = self._workload.start_s[:num], ended.first_s[:num], ended.begun_s[:num]
        end_s, outputs, outcome = ended.end_s[:num], ended.num_output[:num], ended.outcome[:num]
        with np.errstate(invalid="ignore", divide="ignore"):
            tpot_s = np.where(outputs > 1, (end_s - first_s) / (outputs - 1), np.nan)
        return SimResult(
            start_s,
            np.where(first_s >= 0, first_s + answer_s - start_s, np.nan),
            np.where(outcome == 0, tpot_s, np.nan),
            ended.longest_gap_s[:num],
            ended.tail_gap_s[:num],
            end_s + answer_s,
            np.where(begun_s >= 0, begun_s - start_s, np.nan),
            outcome,
            ended.cached_tokens[:num],
            ended.num_failovers[:num],
            self._spec.num_devices,
            WorkerFigures(
                tuple(worker.name for worker in workers),
                np.array([worker.busy_s for worker in workers]),
                np.array([worker.num_steps for worker in workers]),
                np.array([worker.num_preempted for worker in workers]),
                np.array([worker.peak_pages / worker.kv.num_pages for worker in workers]),
            ),
            self._links.num_bytes,
            self._with_gaps,
        )
