"""One simulated worker: what it computes next, how long that takes, and what the step produces."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from halfmoon.policy.models.chunk_length import ChunkRule, step_decodes
from halfmoon.policy.preemption import Queued, Turns, in_turn, is_overtaken, last_in_turn, take_turns, to_pause
from halfmoon.sim.cluster.cluster_spec import WorkerGroup
from halfmoon.sim.worker.decode_batch import DecodeBatch
from halfmoon.sim.worker.job import Job
from halfmoon.sim.worker.job_blocks import JobBlocks
from halfmoon.sim.worker.kv_memory import KvMemory
from halfmoon.sim.worker.paused_jobs import PausedJobs
from halfmoon.sim.worker.prompt_queue import PromptChunk, PromptQueue
from halfmoon.sim.worker.running_steps import RunningSteps


class Finished(NamedTuple):
    """The products of a finished step."""

    prompts: list[Job]  # have one token more, and all their K and V
    ended: list[Job]  # have all their tokens


class SimWorker:
    """Owns one worker's queues, memory and steps. Knows nothing of other workers or of the gateway.

    While it only decodes, one event at `steps.wake_s` covers all steps until the batch changes. `interrupt` moves that
    event forward to the end of the running step. The blocks of these steps are taken at their beginning and returned if
    fewer steps run.
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
        self.blocks = JobBlocks(self.kv, block_tokens)
        self.paused = PausedJobs(self.blocks)
        self.is_alive = True
        self.busy_s = 0.0
        self.num_steps = 0
        self.num_preempted = 0
        self.prompts = PromptQueue(self)
        self.decodes = DecodeBatch(block_tokens, keeps_times=keeps_times)
        self.backlog: deque[Job] = deque()  # jobs whose KV waits at a prefill worker for room here
        self.arrived: list[Job] = []  # jobs whose KV has arrived; they join with the next step
        self.num_reserved = 0
        self.steps = RunningSteps(group.latency, self.decodes, block_tokens)
        self._chunks: list[PromptChunk] = []
        self._does_decode = False

    # memory

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens`."""
        return self.blocks.num_for(num_tokens)

    @property
    def places(self) -> int:
        """Free slots: sequences that may still be taken."""
        running = len(self.prompts.prefilling) + self.decodes.size
        return self.group.limits.max_running - running - self.num_reserved

    def room(self) -> tuple[int, int]:
        """Available blocks and free slots."""
        return self.kv.available, self.places

    @property
    def allows_pauses(self) -> bool:
        """Whether a job is paused, or might be."""
        return len(self.paused) > 0 or self.decodes.num_pausable > 0

    def admit(self, job: Job, now_s: float) -> bool:
        """Takes memory for all the job's tokens, without the part that the prefix cache has."""
        if self.places <= 0:
            return False
        while not self.blocks.admit(job):
            if not self.paused.move_out(now_s):
                return False
        if not job.generated:
            job.cached_tokens = job.computed
        if job.front_end >= 0:  # a prefix is being fetched
            job.front_end = max(job.front_end, job.computed)
            job.load_end = max(job.load_end, job.front_end)
        return True

    def reserve(self, job: Job, now_s: float) -> bool:
        """Reserves room for a job's KV from another worker and for its next token; False while other jobs wait for
        memory.
        """
        waiting = self.prompts.waiting
        lacks_room = waiting and (self.prompts.is_short or any(item.generated > item.num_before for item in waiting))
        ahead = [*(waiting if lacks_room else ()), *self.paused]
        if is_overtaken(job.pauses, (other.pauses for other in ahead), now_s):
            return False
        if self.allows_pauses:
            self._pause_for(job, now_s)
        if self.places <= 0:
            return False
        if not self.blocks.reserve(job):
            self.interrupt(now_s)  # returns the blocks of future decode steps
            while not self.blocks.reserve(job):
                if not self.paused.move_out(now_s):
                    return False
        self.num_reserved += 1
        return True

    def may_keep(self, job: Job, now_s: float) -> bool:
        """Whether this decode worker accepts a job to compute: it fits now, together with those that wait."""
        waiting = self.prompts.waiting
        num_blocks = sum(self.blocks.num_for(each.target + 1) for each in (job, *waiting))
        if self.places <= len(waiting) + len(self.paused):
            return False
        if num_blocks > self.kv.available:
            self.interrupt(now_s)  # returns the blocks of future decode steps
        return num_blocks <= self.kv.available

    def unreserve(self, job: Job) -> None:
        """Releases a reservation whose KV does not come."""
        if job in self.arrived:
            self.arrived.remove(job)
        self.blocks.unreserve(job)
        self.num_reserved -= 1

    def withdraw(self, job: Job) -> None:
        """Removes a job that waits, is computed or is held here."""
        if job.state != "held":
            self.prompts.remove(job)
        self.blocks.release(job)

    @property
    def num_requests(self) -> int:
        """Requests running, waiting and reserved."""
        prompts = self.prompts
        num_decoding = self.decodes.size + len(self.paused)
        return len(prompts.waiting) + len(prompts.prefilling) + num_decoding + self.num_reserved

    def waiting_tokens(self) -> int:
        """Uncomputed tokens of accepted prompts."""
        jobs = [*self.prompts.waiting, *self.prompts.prefilling]
        return sum(job.target - job.computed for job in jobs)

    def progress(self, now_s: float) -> tuple[int, int]:
        """Tokens of all decoding sequences and available blocks, as of the running step."""
        planned = self.steps.num_planned
        if not planned:
            return self.decodes.context, self.kv.available
        num = self.steps.num_begun(now_s)
        context = self.decodes.context + (num - 1) * self.decodes.num_growing
        return context, self.kv.available + self.decodes.new_blocks(num, planned)

    # steps

    def interrupt(self, now_s: float) -> bool:
        """Ends a run of decode steps with the running one; whether that moves `wake_s` forward."""
        num_cut = self.steps.cut(now_s)
        if num_cut:
            num = self.steps.num_planned
            self.kv.give(self.decodes.new_blocks(num, num + num_cut))
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
        self.prompts.is_short = False
        num_preempted = self.num_preempted
        self._join()
        limits = self.group.limits
        self.prompts.turns = self._take_turns(now_s) if self.allows_pauses else None
        if limits.batching == "prefill-first":
            sets = self._next_prompts(0, now_s)
            if not sets and self.decodes.size:
                self._take_step_blocks(now_s)
        else:
            if self.decodes.size:
                self._take_step_blocks(now_s)
            sets = self._next_prompts(self.decodes.size, now_s)
        self._does_decode = bool(self.decodes.size) and (limits.batching == "chunked" or not sets)
        if sets:
            return self._begin_prompts(sets, now_s)
        if self._does_decode:  # a step with preemptions admits no job; the next one may
            is_settled = self.num_preempted == num_preempted and not self._may_change
            self._begin_decodes(self.decodes.steps_left() if is_settled else 1, now_s)
        return []

    @property
    def _may_change(self) -> bool:
        """Whether time alone may change the batch: somebody waits who might pause another, or rises."""
        return len(self.paused) > 0 or (bool(self.prompts.waiting or self.backlog) and self.allows_pauses)

    def _take_turns(self, now_s: float) -> Turns[Job]:
        """Pauses jobs, lets paused ones go on, and gives room to prompts that others are paused for."""
        uses = self.paused.uses()
        queue = []
        for job in in_turn([*self.prompts.waiting, *self.paused], now_s):
            if job.state == "paused":
                queue.append(Queued(job, self.paused.num_needed(job, uses)))
            else:
                queue.append(Queued(job, self.blocks.num_to_admit(job, uses), job.uncomputed))
        turns = take_turns(
            queue,
            list(self.decodes.jobs.values()),
            self.places,
            self.kv.available + self.paused.num_reclaimable(uses) - self.decodes.new_blocks(0, 1),
            self.group.limits.max_batch_tokens - sum(job.uncomputed for job in self.prompts.prefilling),
            self._num_freed,
            now_s,
        )
        for job in turns.pause:
            self._pause(job, now_s)
        for job in turns.get_room:
            if job.state == "paused":
                self._resume(job, now_s)
            else:
                self.prompts.begin(job, now_s)
        return turns

    def _pause_for(self, job: Job, now_s: float) -> None:
        """Pauses what gives way to a job that lacks a place or blocks, if that is enough. A step may be under way.

        The engine pauses when the step has ended; here the running step's token of a paused job is computed later.
        """
        self.interrupt(now_s)  # returns the blocks of future decode steps
        uses = self.paused.uses()
        num_blocks = self.blocks.num_to_reserve(job, uses)
        is_stepping = self.steps.wake_s is not None and self._does_decode
        growing = 0 if is_stepping else self.decodes.new_blocks(0, 1)
        lacking = num_blocks + growing - self.kv.available - self.paused.num_reclaimable(uses)
        if self.places > 0 and lacking <= 0:
            return
        if self.steps.num_planned:
            self.steps.split()
        jobs = list(self.decodes.jobs.values())
        for other in to_pause(jobs, job.pauses, 1 - self.places, lacking, self._num_freed, now_s) or ():
            if is_stepping and self.decodes.needs_block(other):
                self.kv.give(1)
            self._pause(other, now_s)

    def _pause(self, job: Job, now_s: float) -> None:
        self.decodes.drop(job)
        self.paused.add(job, now_s)

    def _resume(self, job: Job, now_s: float) -> None:
        lacks = self.paused.lacks(job)
        while lacks > self.kv.available:
            if not self.paused.move_out(now_s):
                return
        self.paused.resume(job, now_s)
        self.decodes.add(job, job.join_length)

    def _num_freed(self, job: Job) -> int:
        return self.blocks.num_freed(job, self.decodes.length(job))

    def finish(self, now_s: float) -> Finished:
        """Ends the step that `start` began."""
        self.busy_s += now_s - self.steps.begun_s
        num = self.steps.num_planned
        self.num_steps += num or 1
        ended = self.steps.finish(now_s)
        if not num and self._does_decode:
            ended = self.decodes.advance(now_s)
        for job in ended:
            self.blocks.leave(job)
        chunks, self._chunks = self._chunks, []
        return Finished(self.computed(chunks), ended)

    def computed(self, chunks: list[PromptChunk]) -> list[Job]:
        """Prompts completed by these chunks. Each has one token more, and is held here until the simulation moves
        it.
        """
        done = []
        for job, attempt, cached, num_tokens in chunks:
            if job.attempt != attempt or job.state != "prefilling":
                continue
            self.blocks.make_known(job, cached + num_tokens)
            self.blocks.drop_unseen(job, cached + num_tokens)
            if cached + num_tokens == job.target:
                self.prompts.remove(job)
                job.generated += 1
                job.state = "held"
                done.append(job)
        return done

    def decode(self, job: Job) -> None:
        """Lets a prompt that was computed here decode here, from the next step on."""
        job.state = "decoding"
        self.decodes.add(job, job.target + 1)

    def die(self, now_s: float) -> None:
        """Loses everything except the tokens of finished steps."""
        self.steps.abort(now_s)
        for job in list(self.decodes.jobs.values()):
            self.decodes.drop(job)
        self.is_alive = False
        self.kv.clear()
        self.prompts = PromptQueue(self)
        self.paused.clear()
        self.backlog.clear()
        self.arrived.clear()
        self.num_reserved = 0
        self._chunks = []

    def _join(self) -> None:
        for job in self.arrived:
            self.num_reserved -= 1
            self.blocks.receive(job)
            job.state = "decoding"
            self.decodes.add(job, job.target + 1)
        self.arrived.clear()

    def _take_step_blocks(self, now_s: float) -> None:
        """Takes blocks for one step of the whole batch. Preempts jobs from the last rank on while there are too few."""
        num_blocks = self.decodes.new_blocks(0, 1)
        while num_blocks > self.kv.available and self.paused.move_out(now_s):
            pass
        if num_blocks <= self.kv.available:
            self.kv.take(num_blocks)
            return
        served: set[int] = set()
        jobs = self.decodes.jobs
        for job in in_turn(jobs.values(), now_s):
            if job.rank not in jobs or not self.decodes.needs_block(job):
                continue
            while not self.kv.available and job.rank in jobs:
                self._give_way(job, served, now_s)
            if job.rank in jobs:
                self.kv.take(1)
                served.add(job.rank)

    def _give_way(self, growing: Job, served: set[int], now_s: float) -> None:
        """Pauses the last job in turn and moves it out, or queues it again, to be recomputed with its tokens.

        Jobs in `served` have this step's block already.
        """
        job = last_in_turn([*self.prompts.prefilling[-1:], *self.decodes.jobs.values()], now_s)
        if job.state == "decoding" and job.pauses.gives_way_to(growing.pauses, now_s):
            self.kv.give(1 if job.rank in served else 0)
            self._pause(job, now_s)
            self.paused.move_out(now_s)
            return
        if job.state == "prefilling":
            self.prompts.remove(job)
            self.blocks.release(job)
        else:
            self.decodes.drop(job)
            self.kv.give(1 if job.rank in served else 0)
            self.blocks.leave(job)
            job.target = job.join_length
        job.computed, job.front_end, job.rounds = 0, -1, ()
        job.attempt += 1
        self.num_preempted += 1
        self.prompts.is_short = True
        self.prompts.add(job)

    def _next_prompts(self, num_decodes: int, now_s: float) -> list[list[PromptChunk]]:
        """Chunks for the next step: one set for each group of decodes in a filled pipeline."""
        limits, prompts = self.group.limits, self.prompts
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
        return sets

    def _tokens_beside(self, last: list[PromptChunk]) -> Callable[[Job], int]:
        """Most prompt tokens beside the decodes and these last tokens of prompts, by the first prompt."""
        limits = self.group.limits
        if not limits.follows_targets:
            return lambda _: limits.chunk_tokens
        jobs = [chunk.job for chunk in last]
        context_tokens = self.decodes.context + sum(job.target for job in jobs)
        jobs += self.decodes.jobs.values()
        role, latency = self.group.role, self.group.latency
        targets_s = () if role == "prefill" else (job.tbt_target_s for job in jobs)
        beside = step_decodes(len(jobs), context_tokens, targets_s, role)
        rule = ChunkRule(latency.policy_prefill, latency.policy_step).slowed(self.steps.pace)
        return lambda first: rule.tokens(limits.chunk_tokens, limits.max_batch_tokens, beside, first.computed)

    def _begin_prompts(self, sets: list[list[PromptChunk]], now_s: float) -> list[PromptChunk]:
        batch, context = (self.decodes.size, self.decodes.context) if self._does_decode else (0, 0)
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
        num = self.decodes.affordable_steps(self.steps.most_in_run(most), self.kv.available)
        self.kv.take(self.decodes.new_blocks(1, num))
        self.steps.begin_run(num, now_s)
