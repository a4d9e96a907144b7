"""One simulated worker: what it computes next, how long that takes, and what is there at its end."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from halfmoon.sim.cluster.cluster_spec import WorkerGroup
from halfmoon.sim.cluster.decode_batch import DecodeBatch
from halfmoon.sim.cluster.job import Job
from halfmoon.sim.cluster.job_blocks import JobBlocks
from halfmoon.sim.cluster.kv_memory import KvMemory
from halfmoon.sim.cluster.prompt_queue import PromptChunk, PromptQueue
from halfmoon.sim.cluster.running_steps import RunningSteps


class Finished(NamedTuple):
    """What the end of a step brings."""

    prompts: list[Job]  # have a token more, and all their K and V
    ended: list[Job]  # have all their tokens


class SimWorker:
    """Owns one worker's queues, memory and steps. Knows nothing of other workers and of the gateway.

    While it only decodes, one event covers all steps until somebody comes or goes: `steps.wake_s` is when, and
    `interrupt` brings it forward to the end of the step that is under way. The pages that these steps need are taken
    at their beginning, and given back where fewer steps are done.
    """

    def __init__(
        self,
        number: int,
        group: WorkerGroup,
        node: int,
        page_tokens: int,
        unit_pages: int,
        *,
        keeps_times: bool = True,
    ) -> None:
        """`keeps_times`: of every token that it decodes."""
        self.number = number
        self.name = f"{group.role}-{number}"
        self.group = group
        self.node = node
        self.page_tokens = page_tokens
        kv_tokens = group.latency.kv_tokens if group.kv_tokens is None else group.kv_tokens
        can_cache = group.prefix_cache and group.role != "decode"
        self.kv = KvMemory(kv_tokens // page_tokens, unit_pages, is_cache=can_cache)
        self.pages = JobBlocks(self.kv, page_tokens)
        self.is_alive = True
        self.busy_s = 0.0
        self.num_steps = 0
        self.num_preempted = 0
        self.prompts = PromptQueue(self)
        self.decodes = DecodeBatch(page_tokens, keeps_times=keeps_times)
        self.backlog: deque[Job] = deque()  # their KV waits at a prefill worker for room here
        self.arrived: list[Job] = []  # their KV is here; they join with the next step
        self.num_reserved = 0
        self.steps = RunningSteps(group.latency, self.decodes)
        self._chunks: list[PromptChunk] = []
        self._does_decode = False

    # memory

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold so many tokens."""
        return self.pages.num_for(num_tokens)

    @property
    def places(self) -> int:
        """Sequences that may still be taken."""
        running = len(self.prompts.prefilling) + self.decodes.size
        return self.group.limits.max_running - running - self.num_reserved

    def room(self) -> tuple[int, int]:
        """Pages available and places free."""
        return self.kv.available, self.places

    def admit(self, job: Job) -> bool:
        """Takes memory for all that the job has to compute here, less what the prefix cache has."""
        if self.places <= 0 or not self.pages.admit(job):
            return False
        if not job.generated:
            job.cached_tokens = job.computed
        if job.front_end >= 0:  # a prefix that is being fetched
            job.front_end = max(job.front_end, job.computed)
            job.load_end = max(job.load_end, job.front_end)
        return True

    def reserve(self, job: Job, now_s: float) -> bool:
        """Room for a job whose KV comes from another worker, and for its next token; False while others wait."""
        waiting = self.prompts.waiting
        if waiting and (self.prompts.is_short or any(one.generated for one in waiting)):
            return False
        num_pages = self.pages.num_for(job.target + 1)
        if self.places <= 0 or (num_pages > self.kv.available and not self._has_after_interrupt(num_pages, now_s)):
            return False
        self.pages.reserve(job, num_pages)
        self.num_reserved += 1
        return True

    def unreserve(self, job: Job) -> None:
        """Its KV does not come."""
        if job in self.arrived:
            self.arrived.remove(job)
        self.pages.unreserve(job)
        self.num_reserved -= 1

    def withdraw(self, job: Job) -> None:
        """A job that waits here, is computed here or is held here goes away."""
        if job.state != "held":
            self.prompts.remove(job)
        self.pages.release(job)

    @property
    def num_requests(self) -> int:
        """Running, waiting and reserved."""
        prompts = self.prompts
        return len(prompts.waiting) + len(prompts.prefilling) + self.decodes.size + self.num_reserved

    def waiting_tokens(self) -> int:
        """Of prompts, accepted and not computed."""
        jobs = [*self.prompts.waiting, *self.prompts.prefilling]
        return sum(job.target - job.computed for job in jobs)

    def progress(self, now_s: float) -> tuple[int, int]:
        """Tokens of all decoding sequences and pages available, within the steps under way."""
        planned = self.steps.num_planned
        if not planned:
            return self.decodes.context, self.kv.available
        num = self.steps.num_begun(now_s)
        context = self.decodes.context + (num - 1) * self.decodes.size
        return context, self.kv.available + self.decodes.new_pages(num, planned)

    # steps

    def interrupt(self, now_s: float) -> bool:
        """Ends a run of decode steps with the one that is under way; whether that brings `wake_s` forward."""
        num_cut = self.steps.cut(now_s)
        if num_cut:
            num = self.steps.num_planned
            self.kv.give(self.decodes.new_pages(num, num + num_cut))
        return num_cut > 0

    def set_pace(self, pace: float, now_s: float) -> bool:
        """From now on all takes `pace` times what the latency model says; whether that moves the end of its step."""
        if pace == self.steps.pace:
            return False
        self.interrupt(now_s)
        return self.steps.set_pace(pace, now_s)

    def start(self, now_s: float) -> list[PromptChunk]:
        """Begins the next step, if there is work: `steps.wake_s` says until when.

        Returns the chunks that entered a pipeline and are through at `steps.passage_s`; elsewhere `finish` brings them.
        """
        assert self.steps.wake_s is None, "a step is under way"
        self.prompts.is_short = False
        num_preempted = self.num_preempted
        self._join()
        limits = self.group.limits
        if limits.batching == "prefill-first":
            sets = self._next_prompts(0, now_s)
            if not sets and self.decodes.size:
                self._take_step_pages()
        else:
            if self.decodes.size:
                self._take_step_pages()
            sets = self._next_prompts(self.decodes.size, now_s)
        self._does_decode = bool(self.decodes.size) and (limits.batching == "chunked" or not sets)
        if sets:
            return self._begin_prompts(sets, now_s)
        if self._does_decode:  # a step that preempts admits nobody; the one behind it may
            self._begin_decodes(self.decodes.steps_left() if self.num_preempted == num_preempted else 1, now_s)
        return []

    def finish(self, now_s: float) -> Finished:
        """The step that `start` began is done."""
        self.busy_s += now_s - self.steps.begun_s
        num = self.steps.num_planned
        self.num_steps += num or 1
        ended = self.steps.finish(now_s)
        if not num and self._does_decode:
            ended = self.decodes.advance(now_s)
        for job in ended:
            self.pages.leave(job)
        chunks, self._chunks = self._chunks, []
        return Finished(self.computed(chunks), ended)

    def computed(self, chunks: list[PromptChunk]) -> list[Job]:
        """Prompts that these chunks complete: each has one token more, and the worker holds it until it is told."""
        done = []
        for job, attempt, cached, num_tokens in chunks:
            if job.attempt != attempt or job.state != "prefilling":
                continue
            self.pages.make_known(job, cached + num_tokens)
            if cached + num_tokens == job.target:
                self.prompts.remove(job)
                job.generated += 1
                job.state = "held"
                done.append(job)
        return done

    def decode(self, job: Job) -> None:
        """A prompt that was computed here decodes here, from the next step on."""
        job.state = "decoding"
        self.decodes.add(job, job.target + 1)

    def die(self, now_s: float) -> None:
        """All is lost but the tokens of the steps that are done."""
        self.steps.abort(now_s)
        for job in list(self.decodes.jobs.values()):
            self.decodes.drop(job)
        self.is_alive = False
        self.kv.clear()
        self.prompts = PromptQueue(self)
        self.backlog.clear()
        self.arrived.clear()
        self.num_reserved = 0
        self._chunks = []

    def _join(self) -> None:
        for job in self.arrived:
            self.num_reserved -= 1
            self.pages.receive(job)
            job.state = "decoding"
            self.decodes.add(job, job.target + 1)
        self.arrived.clear()

    def _take_step_pages(self) -> None:
        """Pages for one step of all that decode; the last in rank are preempted while there are not enough."""
        num_pages = self.decodes.new_pages(0, 1)
        if num_pages <= self.kv.available:
            self.kv.take(num_pages)
            return
        served: set[int] = set()
        for rank in sorted(self.decodes.jobs):
            job = self.decodes.jobs.get(rank)
            if job is None or not self.decodes.needs_page(job):
                continue
            while not self.kv.available and rank in self.decodes.jobs:
                self._preempt(served)
            if rank in self.decodes.jobs:
                self.kv.take(1)
                served.add(rank)

    def _preempt(self, served: set[int]) -> None:
        """Back to the queue with its tokens, to be computed again. `served` have their step's page already."""
        prefilling = self.prompts.prefilling
        last = max(self.decodes.jobs)
        if prefilling and prefilling[-1].index > last:
            job = prefilling[-1]
            self.prompts.remove(job)
            self.pages.release(job)
        else:
            job = self.decodes.jobs[last]
            self.decodes.drop(job)
            self.kv.give(1 if last in served else 0)
            self.pages.leave(job)
            job.target = job.join_length
        job.computed, job.front_end = 0, -1
        job.attempt += 1
        self.num_preempted += 1
        self.prompts.is_short = True
        self.prompts.add(job)

    def _next_prompts(self, num_decodes: int, now_s: float) -> list[list[PromptChunk]]:
        """Chunks for the next step: one set for each group of decodes that is in a pipeline at a time."""
        limits, prompts = self.group.limits, self.prompts
        if not prompts.prefilling and not prompts.waiting:
            return []
        sets = []
        for _ in range(self.group.latency.num_stages if self.group.role != "prefill" else 1):
            chunks = prompts.last_tokens(now_s)
            together = num_decodes + len(chunks)
            most = limits.max_batch_tokens - together
            chunks += prompts.chunks(min(most, limits.chunk_tokens) if together else most, now_s)
            if not chunks:
                break
            sets.append(chunks)
        return sets

    def _begin_prompts(self, sets: list[list[PromptChunk]], now_s: float) -> list[PromptChunk]:
        if self.group.role == "prefill" and self.steps.is_pipeline:
            self.steps.enter_pipeline(sets[0], now_s)
            return sets[0]
        batch, context = (self.decodes.size, self.decodes.context) if self._does_decode else (0, 0)
        self._chunks = [chunk for chunks in sets for chunk in chunks]
        self.steps.begin_prompts(sets, batch, context, now_s)
        return []

    def _begin_decodes(self, most: int, now_s: float) -> None:
        """At most so many steps, as far as there are pages for them; those of the first are taken."""
        num = self.decodes.affordable_steps(most, self.kv.available)
        self.kv.take(self.decodes.new_pages(1, num))
        self.steps.begin_run(num, now_s)

    def _has_after_interrupt(self, num_pages: int, now_s: float) -> bool:
        """Pages of decode steps to come are nobody's yet."""
        self.interrupt(now_s)
        return num_pages <= self.kv.available
