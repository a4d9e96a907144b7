"""One simulated worker: what it computes next, how long that takes, and what the step produces."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from halfmoon.policy.models.chunk_length import ChunkRule, step_decodes
from halfmoon.policy.nested_step import OuterStep, nested_cost
from halfmoon.policy.preemption import is_overtaken, to_pause
from halfmoon.sim.cluster.cluster_spec import WorkerGroup
from halfmoon.sim.worker.job import Job
from halfmoon.sim.worker.job_queues import JobQueues
from halfmoon.sim.worker.kv_memory import KvMemory
from halfmoon.sim.worker.prompt_queue import PromptChunk, is_plain
from halfmoon.sim.worker.running_steps import RunningSteps


class Finished(NamedTuple):
    """The products of a finished step."""

    prompts: list[Job]  # have one token more, and all their K and V
    ended: list[Job]  # have all their tokens


class SimWorker:
    """Owns one worker's steps, and what runs in them. Knows nothing of other workers or of the gateway.

    While it only decodes, one event at `steps.wake_s` covers all steps until the batch changes. `interrupt` moves that
    event forward to the end of the running step. The blocks of these steps are taken at their beginning and returned if
    fewer steps run. In the middle of a step of prompts others may run (`policy/nested_step.py`).
    """

    def __init__(
        self,
        number: int,
        group: WorkerGroup,
        node: int,
        block_tokens: int,
        prefix_block_size: int,
        *,
        keeps_times: bool = True,
    ) -> None:
        """`keeps_times`: record the time of every decoded token."""
        self.number = number
        self.name = f"{group.role}-{number}"
        self.group = group
        self.node = node
        self.block_tokens = block_tokens
        kv_tokens = group.latency.kv_tokens if group.kv_tokens is None else group.kv_tokens
        self.kv = KvMemory(kv_tokens // block_tokens, prefix_block_size, is_cache=group.prefix_cache)
        self.queues = JobQueues(group.limits, self.kv, block_tokens, keeps_times=keeps_times)
        self.steps = RunningSteps(group.latency, self.queues.decodes, block_tokens)
        self.is_alive = True
        self.busy_s = 0.0
        self.num_steps = 0
        self._chunks: list[PromptChunk] = []
        self._does_decode = False
        self._can_nest = False  # prompts may run in the middle of the step
        self._nested: list[PromptChunk] = []  # of the nested step that runs
        self._num_nested = 0  # see `OuterStep`

    # room, also while a step is under way

    def reserve(self, job: Job, now_s: float) -> bool:
        """Reserves room for a job's KV from another worker and for its next token; False while other jobs wait for
        memory.
        """
        queues, waiting = self.queues, self.queues.prompts.waiting
        lacks_room = waiting and (queues.prompts.is_short or any(item.generated > item.num_before for item in waiting))
        ahead = [*(waiting if lacks_room else ()), *queues.paused]
        if is_overtaken(job.pauses, (other.pauses for other in ahead), now_s):
            return False
        if queues.allows_pauses:
            self._pause_for(job, now_s)
        if queues.places <= 0:
            return False
        if not queues.blocks.reserve(job):
            self.interrupt(now_s)  # returns the blocks of future decode steps
            while not queues.blocks.reserve(job):
                if not queues.paused.move_out(now_s):
                    return False
        queues.num_reserved += 1
        return True

    def may_keep(self, job: Job, now_s: float) -> bool:
        """Whether this decode worker accepts a job to compute: it fits now, together with those that wait."""
        queues, waiting = self.queues, self.queues.prompts.waiting
        num_blocks = sum(queues.blocks.num_for(each.target + 1) for each in (job, *waiting))
        if queues.places <= len(waiting) + len(queues.paused):
            return False
        if num_blocks > self.kv.available:
            self.interrupt(now_s)  # returns the blocks of future decode steps
        return num_blocks <= self.kv.available

    def progress(self, now_s: float) -> tuple[int, int]:
        """Tokens of all decoding sequences and available blocks, as of the running step."""
        planned, decodes = self.steps.num_planned, self.queues.decodes
        if not planned:
            return decodes.context, self.kv.available
        num = self.steps.num_begun(now_s)
        context = decodes.context + (num - 1) * decodes.num_growing
        return context, self.kv.available + decodes.new_blocks(num, planned)

    # steps

    def interrupt(self, now_s: float) -> bool:
        """Ends a run of decode steps with the running one; whether that moves `wake_s` forward."""
        num_cut = self.steps.cut(now_s)
        if num_cut:
            num = self.steps.num_planned
            self.kv.give(self.queues.decodes.new_blocks(num, num + num_cut))
        return num_cut > 0

    def set_pace(self, pace: float, now_s: float) -> bool:
        """Makes everything take `pace` times the latency model's time from now on; whether that moves the end of the
        step.
        """
        if pace == self.steps.pace:
            return False
        self.interrupt(now_s)
        return self.steps.set_pace(pace, now_s)

    def start(self, now_s: float) -> list[PromptChunk]:
        """Begins the next step if there is work, and sets `steps.wake_s`.

        Returns the chunks that entered a pipeline, which leave it at `steps.passage_s`. Otherwise `finish` returns
        them.
        """
        assert self.steps.wake_s is None, "a step is under way"
        queues = self.queues
        queues.prompts.is_short = self._can_nest = False
        queues.prompts.newcomers.clear()
        num_preempted = queues.num_preempted
        queues.join()
        limits = self.group.limits
        queues.prompts.turns = queues.take_turns(now_s) if queues.allows_pauses else None
        if limits.batching == "prefill-first":
            sets = self._next_prompts(0, now_s)
            if not sets and queues.decodes.size:
                queues.take_step_blocks(now_s)
        else:
            if queues.decodes.size:
                queues.take_step_blocks(now_s)
            sets = self._next_prompts(queues.decodes.size, now_s)
        self._does_decode = bool(queues.decodes.size) and (limits.batching == "chunked" or not sets)
        if sets:
            return self._begin_prompts(sets, now_s)
        if self._does_decode:  # a step with preemptions admits no job; the next one may
            is_settled = queues.num_preempted == num_preempted and not queues.may_change
            self._begin_decodes(queues.decodes.steps_left() if is_settled else 1, now_s)
        return []

    def _pause_for(self, job: Job, now_s: float) -> None:
        """Pauses what gives way to a job that lacks a place or blocks, if that is enough. A step may be under way.

        The engine pauses when the step has ended; here the running step's token of a paused job is computed later.
        """
        queues = self.queues
        self.interrupt(now_s)  # returns the blocks of future decode steps
        uses = queues.paused.uses()
        num_blocks = queues.blocks.num_to_reserve(job, uses)
        is_stepping = self.steps.wake_s is not None and self._does_decode
        growing = 0 if is_stepping else queues.decodes.new_blocks(0, 1)
        lacking = num_blocks + growing - self.kv.available - queues.paused.num_reclaimable(uses)
        if queues.places > 0 and lacking <= 0:
            return
        if self.steps.num_planned:
            self.steps.split()
        jobs = list(queues.decodes.jobs.values())
        for other in to_pause(jobs, job.pauses, 1 - queues.places, lacking, queues.num_freed, now_s) or ():
            if is_stepping and queues.decodes.needs_block(other):
                self.kv.give(1)
            queues.pause(other, now_s)

    def nest(self, now_s: float) -> None:
        """Begins a step in the middle of the running one, if there are newcomers that do not wait for its end."""
        prompts = self.queues.prompts
        if not self._can_nest or self._nested or not prompts.newcomers:
            return
        num_tokens = sum(chunk.num_tokens for chunk in self._chunks)
        outer = OuterStep(num_tokens, len(self._chunks), self.steps.left(now_s), self._num_nested)
        self._nested = prompts.nested(outer, now_s)
        if self._nested:
            self._num_nested += nested_cost(sum(chunk.num_tokens for chunk in self._nested), num_tokens)
            self.steps.nest(self._nested, now_s)

    def finish(self, now_s: float) -> Finished:
        """Ends the step that `start` began, or the one that `nest` began: then the outer step goes on."""
        if self._nested:
            self.num_steps += 1
            self.steps.resume(now_s)
            chunks, self._nested = self._nested, []
            return Finished(self.queues.computed(chunks), [])
        self.busy_s += now_s - self.steps.begun_s
        num = self.steps.num_planned
        self.num_steps += num or 1
        ended = self.steps.finish(now_s)
        if not num and self._does_decode:
            ended = self.queues.decodes.advance(now_s)
        for job in ended:
            self.queues.blocks.leave(job)
        chunks, self._chunks = self._chunks, []
        return Finished(self.queues.computed(chunks), ended)

    def die(self, now_s: float) -> None:
        """Loses everything except the tokens of finished steps."""
        self.steps.abort(now_s)
        self.queues.lose_all(now_s)
        self.is_alive = False
        self._chunks, self._nested = [], []

    def _next_prompts(self, num_decodes: int, now_s: float) -> list[list[PromptChunk]]:
        """Chunks for the next step: one set for each group of decodes in a filled pipeline."""
        limits, prompts = self.group.limits, self.queues.prompts
        if not prompts.prefilling and not prompts.waiting:
            return []
        sets = []
        latency = self.group.latency
        for _ in range(latency.num_stages if latency.fills_stages and self.group.role != "prefill" else 1):
            chunks = prompts.last_tokens(now_s)
            together = num_decodes + len(chunks)
            room = limits.max_batch_tokens - together
            beside = self._tokens_beside(chunks) if together else None
            chunks += prompts.chunks(room, now_s, beside)
            if not chunks:
                break
            sets.append(chunks)
            self._can_nest = not together and self._nests and all(is_plain(chunk.job) for chunk in chunks)
        self._num_nested = 0
        return sets

    @property
    def _nests(self) -> bool:
        group = self.group
        return group.limits.nests_steps and group.role == "prefill" and not self.steps.is_pipeline

    def _tokens_beside(self, last: list[PromptChunk]) -> Callable[[Job], int]:
        """Most prompt tokens beside the decodes and these last tokens of prompts, by the first prompt."""
        limits = self.group.limits
        if not limits.follows_targets:
            return lambda _: limits.chunk_tokens
        jobs = [chunk.job for chunk in last]
        context_tokens = self.queues.decodes.context + sum(job.target for job in jobs)
        jobs += self.queues.decodes.jobs.values()
        role, latency = self.group.role, self.group.latency
        targets_s = () if role == "prefill" else (job.tbt_target_s for job in jobs)
        beside = step_decodes(len(jobs), context_tokens, targets_s, role)
        rule = ChunkRule(latency.policy_prefill, latency.policy_step).slowed(self.steps.pace)
        return lambda first: rule.tokens(limits.chunk_tokens, limits.max_batch_tokens, beside, first.computed)

    def _begin_prompts(self, sets: list[list[PromptChunk]], now_s: float) -> list[PromptChunk]:
        batch, context = (self.queues.decodes.size, self.queues.decodes.context) if self._does_decode else (0, 0)
        chunks = [chunk for chunks in sets for chunk in chunks]
        fills = self.group.latency.fills_stages
        if self.steps.is_pipeline and not (fills and (batch or self.group.role != "prefill")):
            samples = not fills and (batch > 0 or any(chunk.is_last for chunk in chunks))
            self.steps.enter_pipeline(chunks, now_s, batch, context, waits=samples)
            if not samples:
                return chunks
        else:
            self.steps.begin_prompts(sets, batch, context, now_s)
        self._chunks = chunks
        return []

    def _begin_decodes(self, most: int, now_s: float) -> None:
        """Begins at most `most` steps, as far as there are blocks. The first step's blocks are taken already."""
        num = self.queues.decodes.affordable_steps(self.steps.most_in_run(most), self.kv.available)
        self.kv.take(self.queues.decodes.new_blocks(1, num))
        self.steps.begin_run(num, now_s)
