"""A worker's engine with modelled latencies: continuous batching, chunked prefill, prefix cache, preemption, no model.

It has no clock: a step says how many seconds it takes, and whoever drives the engine (an event loop in real time, an
event queue on a fake clock) ends it so much later. It knows no tokens either, only how many there are.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import merge

from halfmoon.errors import InvalidRequest, NoCapacity, NotFound
from halfmoon.policy.models.tbt_model import room_in_ms
from halfmoon.sim.latency_sources.worker_profile import WorkerProfile
from halfmoon.sim.modelled_sequence import ModelledRequest, ModelledSequence, ModelledToken, State
from halfmoon.sim.modelled_step import Chunk, Step, StepOutcome
from halfmoon.sim.prefix_blocks import PrefixBlocks
from halfmoon.sim.sequence_queues import SequenceQueues


class ModelledEngine:
    """Owns the blocks of one modelled worker, and which sequence gets some next. At most one step is under way."""

    def __init__(self, profile: WorkerProfile, block_tokens: int) -> None:
        self.profile = profile
        self.blocks = PrefixBlocks(profile.kv_tokens // block_tokens)
        self._block_tokens = block_tokens
        self._queues = SequenceQueues()
        self._num_added = 0
        self._is_short = False  # the last step left somebody waiting for blocks
        self._step_s = 0.0

    @property
    def num_running(self) -> int:
        """Sequences with blocks and something to compute."""
        return self._queues.num_running

    @property
    def num_waiting(self) -> int:
        """Sequences without blocks."""
        return len(self._queues.waiting)

    @property
    def num_reserved(self) -> int:
        """Sequences whose KV is on its way."""
        return self._queues.num_reserved

    @property
    def num_held(self) -> int:
        """Prefilled sequences whose KV is still wanted."""
        return self._queues.num_held

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens to compute before everybody has the next one."""
        queues = self._queues
        queued = sum(one.num_tokens - one.num_computed for one in (*queues.waiting, *queues.prefilling))
        return queued + len(queues.decoding)

    @property
    def has_work(self) -> bool:
        """Whether `begin_step` could find something."""
        return bool(self._queues.num_running or self._queues.waiting)

    def has(self, request_id: str, state: State | None = None) -> bool:
        """Whether the request is here (in that state)."""
        sequence = self._queues.find(request_id)
        return sequence is not None and state in (None, sequence.state)

    def requests(self) -> Iterator[str]:
        """Everybody who is here."""
        return (sequence.request.request_id for sequence in self._queues)

    def add(self, request: ModelledRequest) -> None:
        """Queues a request. Raises InvalidRequest when it can never run here."""
        self._queues.enter(self._checked(request), "waiting")

    def reserve(self, request: ModelledRequest) -> None:
        """Blocks for a request whose KV comes from elsewhere. Raises NoCapacity and InvalidRequest."""
        if self.num_waiting and self._is_short:
            raise NoCapacity(
                f"{self.num_waiting} sequences wait for blocks already", retry_after_ms=self._retry_after_ms()
            )
        if self._has_no_place():
            problem = f"{self.profile.max_running} sequences run or are reserved already"
            raise NoCapacity(problem, retry_after_ms=self._retry_after_ms())
        sequence = self._checked(request)
        try:
            self._take(sequence, self._blocks_for(sequence.num_tokens + 1))
        except NoCapacity as error:
            raise NoCapacity(error.message, retry_after_ms=self._retry_after_ms()) from None
        self._queues.enter(sequence, "reserved")

    def start(self, request_id: str) -> None:
        """The reserved request has its KV and one token more. Raises NotFound."""
        sequence = self._queues.find(request_id)
        if sequence is None or sequence.state != "reserved":
            raise NotFound(f"request {request_id} is not reserved here")
        sequence.num_computed = sequence.num_tokens
        sequence.num_tokens += 1
        self._queues.move(sequence, "decoding")

    def cancel(self, request_id: str) -> bool:
        """Frees a request's blocks in any state; no more tokens. False when it is not here."""
        sequence = self._queues.find(request_id)
        if sequence is not None:
            self._remove(sequence)
        return sequence is not None

    def begin_step(self) -> Step | None:
        """What runs next: decodes first, then chunks of prompts by rank. None: there is nothing, or no room for it."""
        limit, num_preempted = self.profile.max_batch_tokens, 0
        for sequence in tuple(self._queues.decoding):
            if sequence.num_tokens > sequence.num_blocks * self._block_tokens:
                num_preempted += self._make_room(sequence)
        decodes = tuple(self._queues.decoding)
        budget = min(limit - len(decodes), self.profile.chunk_tokens) if decodes else limit
        self._is_short = num_preempted > 0
        chunks = tuple(self._chunks(budget))
        if not decodes and not chunks:
            return None
        self._step_s = self._seconds(chunks, decodes)
        return Step(self._step_s, decodes, chunks, num_preempted)

    def end_step(self, step: Step) -> StepOutcome:
        """Its time is over. What was cancelled meanwhile took its part of the time, and nothing comes of it."""
        tokens: list[ModelledToken] = []
        began: dict[str, int] = {}
        computed: dict[str, int] = {}
        chunks: dict[str, int] = {}
        num_pairs, context_tokens, decode_context_tokens = 0.0, 0, 0
        for sequence in step.decodes:
            decode_context_tokens += sequence.num_tokens
            if sequence.state == "decoding":
                context_tokens += sequence.num_tokens
                sequence.num_computed += 1
                token = sequence.append()
                tokens.append(token)
                if token.is_last:
                    self._remove(sequence)
        for sequence, num_tokens in step.chunks:
            num_pairs += num_tokens * (sequence.num_computed + num_tokens / 2)
            if sequence.state != "prefilling":
                continue
            if sequence.num_computed == sequence.num_cached:
                began[sequence.request.request_id] = sequence.num_cached
            sequence.num_computed += num_tokens
            context_tokens += sequence.num_computed
            computed[sequence.request.request_id] = sequence.num_computed
            chunks[sequence.request.request_id] = num_tokens
            self._name_blocks(sequence)
            if sequence.num_computed == sequence.num_tokens:
                tokens.append(self._first(sequence))
        changes = self.blocks.take_changes()
        return StepOutcome(
            step.seconds,
            tokens,
            sum(chunk.num_tokens for chunk in step.chunks),
            num_pairs,
            len(step.decodes),
            context_tokens,
            decode_context_tokens,
            step.num_preempted,
            began,
            computed,
            chunks,
            changes.stored,
            changes.evicted,
        )

    def _checked(self, request: ModelledRequest) -> ModelledSequence:
        if self._queues.find(request.request_id) is not None:
            raise InvalidRequest(f"request {request.request_id} is here already", param="request_id")
        most = request.num_prompt_tokens + (request.num_done + 1 if request.prefill_only else request.num_output_tokens)
        if self._blocks_for(most) > self.blocks.num_blocks:
            raise InvalidRequest(
                f"the request can need {self._blocks_for(most)} blocks of KV memory, this worker has "
                f"{self.blocks.num_blocks}",
                param="max_tokens",
            )
        num_tokens = request.num_prompt_tokens + request.num_done
        self._num_added += 1
        return ModelledSequence(request, (request.priority, self._num_added), num_tokens)

    def _seconds(self, chunks: tuple[Chunk, ...], decodes: tuple[ModelledSequence, ...]) -> float:
        """The simulator's law: chunks and decodes share a pass."""
        num_new = sum(chunk.num_tokens for chunk in chunks)
        num_pairs = sum(num_tokens * (sequence.num_computed + num_tokens / 2) for sequence, num_tokens in chunks)
        num_decode_tokens = sum(sequence.num_tokens for sequence in decodes)
        return self.profile.latency.stage_s(num_new, num_pairs, len(decodes), num_decode_tokens)

    def _chunks(self, budget: int) -> Iterator[Chunk]:
        for sequence in merge(tuple(self._queues.prefilling), tuple(self._queues.waiting)):
            if budget <= 0:
                return
            if sequence.state == "waiting" and not self._admit(sequence):
                self._is_short = True
                return
            num_tokens = min(sequence.num_tokens - sequence.num_computed, budget)
            budget -= num_tokens
            yield Chunk(sequence, num_tokens)

    def _admit(self, sequence: ModelledSequence) -> bool:
        """Takes blocks for all its tokens, if there are enough and it may run."""
        if self._has_no_place():
            return False
        keys = sequence.request.block_keys[: (sequence.num_tokens - 1) // self._block_tokens]
        num_shared = self.blocks.share(keys)
        sequence.shared = list(keys[:num_shared])
        try:
            self._take(sequence, self._blocks_for(sequence.num_tokens) - num_shared)
        except NoCapacity:
            self._free(sequence)
            return False
        sequence.num_named = num_shared
        sequence.num_computed = sequence.num_cached = num_shared * self._block_tokens
        self._queues.move(sequence, "prefilling")
        return True

    def _has_no_place(self) -> bool:
        return self.num_running + self.num_reserved >= self.profile.max_running

    def _name_blocks(self, sequence: ModelledSequence) -> None:
        """The prefix cache knows the computed blocks from now on."""
        keys = sequence.request.block_keys
        num_full = min(sequence.num_computed // self._block_tokens, len(keys))
        for key in keys[sequence.num_named : num_full]:
            if self.blocks.name(key):
                sequence.num_private -= 1
                sequence.shared.append(key)
        sequence.num_named = max(sequence.num_named, num_full)

    def _first(self, sequence: ModelledSequence) -> ModelledToken:
        token = sequence.append()
        if sequence.request.prefill_only:
            self._queues.move(sequence, "held")
        elif token.is_last:
            self._remove(sequence)
        else:
            self._queues.move(sequence, "decoding")
        return token

    def _make_room(self, sequence: ModelledSequence) -> int:
        """A block for a decoding sequence's next token, preempting the last in rank while none is free."""
        num_preempted = 0
        while sequence.state == "decoding":
            if self.blocks.num_available:
                self._take(sequence, 1)
                break
            self._preempt(self._queues.last_running())
            num_preempted += 1
        return num_preempted

    def _preempt(self, victim: ModelledSequence) -> None:
        """Back to the queue, to be computed again."""
        self._free(victim)
        victim.num_computed = victim.num_cached = victim.num_named = 0
        self._queues.move(victim, "waiting")

    def _remove(self, sequence: ModelledSequence) -> None:
        self._free(sequence)
        self._queues.move(sequence, "removed")

    def _take(self, sequence: ModelledSequence, num_blocks: int) -> None:
        self.blocks.take(num_blocks)
        sequence.num_private += num_blocks

    def _free(self, sequence: ModelledSequence) -> None:
        self.blocks.release(sequence.num_private, sequence.shared)
        sequence.num_private, sequence.shared = 0, []

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_tokens)

    def _retry_after_ms(self) -> int:
        """When the first of those that decode will have made room, at the pace of the last step."""
        return room_in_ms(self._step_s, (one.num_output_left for one in self._queues.decoding))
