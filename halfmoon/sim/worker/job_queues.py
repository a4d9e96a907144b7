"""The jobs on one simulated worker, by what becomes of them next, and the blocks that they get and give back."""

from __future__ import annotations

from collections import deque

from halfmoon.policy.preemption import Queued, Turns, in_turn, last_in_turn, take_turns
from halfmoon.policy.shared_step import ToAdmit
from halfmoon.sim.cluster.cluster_spec import BatchLimits
from halfmoon.sim.worker.decode_batch import DecodeBatch
from halfmoon.sim.worker.job import Job
from halfmoon.sim.worker.job_blocks import JobBlocks
from halfmoon.sim.worker.kv_memory import KvMemory
from halfmoon.sim.worker.paused_jobs import PausedJobs
from halfmoon.sim.worker.prompt_queue import PromptChunk, PromptQueue


class JobQueues:
    """Owns one worker's queues and memory, as the engine's `SequenceQueues`. Knows nothing of steps that run."""

    def __init__(self, limits: BatchLimits, kv: KvMemory, block_tokens: int, *, keeps_times: bool) -> None:
        """`keeps_times`: record the time of every decoded token."""
        self.kv = kv
        self.blocks = JobBlocks(kv, block_tokens)
        self.prompts = PromptQueue(self, limits.max_batch_tokens)
        self.backlog: deque[Job] = deque()  # jobs whose KV waits at a prefill worker for room here
        self.arrived: list[Job] = []  # jobs whose KV has arrived; they join with the next step
        self.num_reserved = 0
        self.decodes = DecodeBatch(block_tokens, keeps_times=keeps_times)
        self.paused = PausedJobs(self.blocks)
        self.num_preempted = 0
        self._limits = limits

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

    # room

    def to_admit(self, job: Job) -> ToAdmit:
        """What a waiting job needs."""
        return self.blocks.to_admit(job, {})

    def num_blocks(self, job: Job) -> int:
        """Blocks of a waiting job's tokens, wherever they are."""
        return self.blocks.num_for(job.target)

    @property
    def places(self) -> int:
        """Free slots: sequences that may still be taken."""
        running = len(self.prompts.prefilling) + self.decodes.size
        return self._limits.max_running - running - self.num_reserved

    def room(self) -> tuple[int, int]:
        """Available blocks and free slots."""
        return self.kv.available, self.places

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

    def lose_all(self, now_s: float) -> None:
        """Forgets all jobs and blocks; those that decode keep the tokens that they have."""
        for job in list(self.decodes.jobs.values()):
            self.decodes.drop(job)
        self.kv.clear()
        self.prompts = PromptQueue(self, self._limits.max_batch_tokens)
        self.paused.clear(now_s)
        self.backlog.clear()
        self.arrived.clear()
        self.num_reserved = 0

    # from one queue to the next

    def join(self) -> None:
        """Lets jobs whose KV has arrived decode."""
        for job in self.arrived:
            self.num_reserved -= 1
            self.blocks.receive(job)
            self.decode(job)
        self.arrived.clear()

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
        """Lets a job whose prompt is computed decode here, from the next step on."""
        job.state = "decoding"
        self.decodes.add(job, job.target + 1)

    def take_step_blocks(self, now_s: float) -> None:
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
            self.pause(job, now_s)
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

    # pauses

    @property
    def allows_pauses(self) -> bool:
        """Whether a job is paused, or might be."""
        return len(self.paused) > 0 or self.decodes.num_pausable > 0

    @property
    def may_change(self) -> bool:
        """Whether time alone may change the batch: somebody waits who might pause another, or rises."""
        return len(self.paused) > 0 or (bool(self.prompts.waiting or self.backlog) and self.allows_pauses)

    def take_turns(self, now_s: float) -> Turns[Job]:
        """Pauses jobs, lets paused ones go on, and gives room to prompts that others are paused for."""
        uses = self.paused.uses()
        queue = []
        for job in in_turn([*self.prompts.waiting, *self.paused], now_s):
            if job.state == "paused":
                queue.append(Queued(job, self.paused.num_needed(job, uses)))
            else:
                queue.append(Queued(job, self.blocks.to_admit(job, uses).num_blocks, job.uncomputed))
        turns = take_turns(
            queue,
            list(self.decodes.jobs.values()),
            self.places,
            self.kv.available + self.paused.num_reclaimable(uses) - self.decodes.new_blocks(0, 1),
            self._limits.max_batch_tokens - sum(job.uncomputed for job in self.prompts.prefilling),
            self.num_freed,
            now_s,
        )
        for job in turns.pause:
            self.pause(job, now_s)
        for job in turns.get_room:
            if job.state == "paused":
                self._resume(job, now_s)
            else:
                self.prompts.begin(job, now_s)
        return turns

    def pause(self, job: Job, now_s: float) -> None:
        """Pauses a job that decodes."""
        self.decodes.drop(job)
        self.paused.add(job, now_s)

    def _resume(self, job: Job, now_s: float) -> None:
        lacks = self.paused.lacks(job)
        while lacks > self.kv.available:
            if not self.paused.move_out(now_s):
                return
        self.paused.resume(job, now_s)
        self.decodes.add(job, job.join_length)

    def num_freed(self, job: Job) -> int:
        """Blocks that a job which decodes would free."""
        return self.blocks.num_freed(job, self.decodes.length(job))
