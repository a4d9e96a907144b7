"""A worker's engine with modelled latencies: continuous batching, chunked prefill, prefix cache, preemption, no model.

It has no clock: a step says how many seconds it takes, and whoever drives the engine (an event loop in real time, an
event queue on a fake clock) ends it so much later. It knows no tokens either, only how many there are.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import merge
from typing import Literal, NamedTuple

from halfmoon.errors import InvalidRequest, NoCapacity, NotFound
from halfmoon.sim.prefix_blocks import PrefixBlocks
from halfmoon.sim.worker_profile import WorkerProfile

State = Literal["waiting", "prefilling", "decoding", "reserved", "held", "removed"]


@dataclass(frozen=True, slots=True)
class ModelledRequest:
    """A request as far as its latency goes."""

    request_id: str
    num_prompt_tokens: int
    num_output_tokens: int  # when it will end
    num_done: int = 0  # of the output, computed before on another worker
    block_keys: tuple[bytes, ...] = ()  # of the prompt's full blocks; none: nothing of it is cached
    priority: int = 0  # smaller goes first
    prefill_only: bool = False  # one token, then its KV is held until `cancel`


class ModelledToken(NamedTuple):
    """One generated token; `position` counts output tokens from 0."""

    request_id: str
    position: int
    is_last: bool


@dataclass(eq=False, slots=True)
class _Sequence:
    """`num_tokens` are there, `num_computed` of them have their KV in blocks: all but one of them while decoding."""

    request: ModelledRequest
    rank: tuple[int, int]
    num_tokens: int
    state: State = "waiting"
    num_computed: int = 0
    num_cached: int = 0
    num_private: int = 0  # blocks
    shared: list[bytes] = field(default_factory=list)  # keys of known blocks, which come before the private ones
    num_named: int = 0  # leading blocks that were offered to the prefix cache, or found there

    @property
    def num_blocks(self) -> int:
        return self.num_private + len(self.shared)

    def __lt__(self, other: _Sequence) -> bool:
        return self.rank < other.rank


class Chunk(NamedTuple):
    """Prompt tokens of one sequence in a step."""

    sequence: _Sequence
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Step:
    """What runs now, and how long it takes. To be given back to `end_step` then."""

    seconds: float
    decodes: tuple[_Sequence, ...]
    chunks: tuple[Chunk, ...]
    num_preempted: int


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a step did."""

    seconds: float
    tokens: list[ModelledToken]
    num_prefill_tokens: int
    num_prefill_pairs: float  # each of those with the tokens that it attends to
    num_decodes: int
    context_tokens: int  # of its sequences, after it
    decode_context_tokens: int  # of those that decoded, before it
    num_preempted: int
    began: dict[str, int]  # requests of which the first tokens were computed: how many were cached
    computed: dict[str, int]  # prompts of which something was computed: tokens whose KV is there now
    chunks: dict[str, int]  # tokens of theirs that this step computed
    stored: tuple[bytes, ...]  # keys that the prefix cache knows now
    evicted: tuple[bytes, ...]  # and does not know any more


class ModelledEngine:
    """Owns the sequences of one modelled worker and its blocks. At most one step is under way."""

    def __init__(self, profile: WorkerProfile, block_tokens: int) -> None:
        self.profile = profile
        self.blocks = PrefixBlocks(profile.kv_tokens // block_tokens)
        self._block_tokens = block_tokens
        self._sequences: dict[str, _Sequence] = {}
        self._waiting: list[_Sequence] = []  # by rank
        self._prefilling: list[_Sequence] = []  # by rank
        self._decoding: dict[_Sequence, None] = {}  # in the order of joining
        self._decode_tokens = 0  # of all that decode
        self._num_reserved = 0
        self._num_added = 0
        self._is_short = False  # the last step left somebody waiting for blocks
        self._step_s = 0.0

    @property
    def num_running(self) -> int:
        """Sequences with blocks and something to compute."""
        return len(self._prefilling) + len(self._decoding)

    @property
    def num_waiting(self) -> int:
        """Sequences without blocks."""
        return len(self._waiting)

    @property
    def num_reserved(self) -> int:
        """Sequences whose KV is on its way."""
        return self._num_reserved

    @property
    def num_held(self) -> int:
        """Prefilled sequences whose KV is still wanted."""
        return len(self._sequences) - self.num_running - len(self._waiting) - self._num_reserved

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens to compute before everybody has the next one."""
        queued = sum(one.num_tokens - one.num_computed for one in (*self._waiting, *self._prefilling))
        return queued + len(self._decoding)

    @property
    def has_work(self) -> bool:
        """Whether `begin_step` could find something."""
        return bool(self._decoding or self._prefilling or self._waiting)

    def has(self, request_id: str, state: State | None = None) -> bool:
        """Whether the request is here (in that state)."""
        sequence = self._sequences.get(request_id)
        return sequence is not None and state in (None, sequence.state)

    def requests(self) -> Iterator[str]:
        """Everybody who is here."""
        return iter(tuple(self._sequences))

    def add(self, request: ModelledRequest) -> None:
        """Queues a request. Raises InvalidRequest when it can never run here."""
        insort(self._waiting, self._enter(request))

    def reserve(self, request: ModelledRequest) -> None:
        """Blocks for a request whose KV comes from elsewhere. Raises NoCapacity and InvalidRequest."""
        if self._waiting and self._is_short:
            raise NoCapacity(
                f"{len(self._waiting)} sequences wait for blocks already", retry_after_ms=self._retry_after_ms()
            )
        if self.num_running + self._num_reserved >= self.profile.max_running:
            problem = f"{self.profile.max_running} sequences run or are reserved already"
            raise NoCapacity(problem, retry_after_ms=self._retry_after_ms())
        sequence = self._enter(request)
        try:
            self._take(sequence, self._blocks_for(sequence.num_tokens + 1))
        except NoCapacity as error:
            del self._sequences[request.request_id]
            raise NoCapacity(error.message, retry_after_ms=self._retry_after_ms()) from None
        sequence.state = "reserved"
        self._num_reserved += 1

    def start(self, request_id: str) -> None:
        """The reserved request has its KV and one token more. Raises NotFound."""
        sequence = self._sequences.get(request_id)
        if sequence is None or sequence.state != "reserved":
            raise NotFound(f"request {request_id} is not reserved here")
        self._num_reserved -= 1
        sequence.num_computed = sequence.num_tokens
        sequence.num_tokens += 1
        self._decode(sequence)

    def cancel(self, request_id: str) -> bool:
        """Frees a request's blocks in any state; no more tokens. False when it is not here."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._remove(sequence)
        return sequence is not None

    def begin_step(self) -> Step | None:
        """What runs next: decodes first, then chunks of prompts by rank. None: there is nothing, or no room for it."""
        limit, num_preempted = self.profile.max_batch_tokens, 0
        for sequence in tuple(self._decoding):
            if sequence.num_tokens > sequence.num_blocks * self._block_tokens:
                num_preempted += self._make_room(sequence)
        decodes = tuple(self._decoding)
        budget = min(limit - len(decodes), self.profile.chunk_tokens) if decodes else limit
        self._is_short = num_preempted > 0
        chunks = tuple(self._chunks(budget))
        if not decodes and not chunks:
            return None
        self._step_s = self._seconds(chunks, len(decodes))
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
                self._decode_tokens += 1
                tokens.append(self._append(sequence))
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

    def _enter(self, request: ModelledRequest) -> _Sequence:
        if request.request_id in self._sequences:
            raise InvalidRequest(f"request {request.request_id} is here already", param="request_id")
        most = request.num_prompt_tokens + (request.num_done + 1 if request.prefill_only else request.num_output_tokens)
        if self._blocks_for(most) > self.blocks.num_blocks:
            raise InvalidRequest(
                f"the request can need {self._blocks_for(most)} blocks of KV memory, this worker has "
                f"{self.blocks.num_blocks}",
                param="max_tokens",
            )
        num_tokens = request.num_prompt_tokens + request.num_done
        sequence = _Sequence(request, (request.priority, self._num_added), num_tokens)
        self._num_added += 1
        self._sequences[request.request_id] = sequence
        return sequence

    def _seconds(self, chunks: tuple[Chunk, ...], num_decodes: int) -> float:
        """The simulator's law: chunks and decodes share a pass."""
        num_new = sum(chunk.num_tokens for chunk in chunks)
        num_pairs = sum(num_tokens * (sequence.num_computed + num_tokens / 2) for sequence, num_tokens in chunks)
        return self.profile.latency.stage_s(num_new, num_pairs, num_decodes, self._decode_tokens)

    def _chunks(self, budget: int) -> Iterator[Chunk]:
        for sequence in merge(tuple(self._prefilling), tuple(self._waiting)):
            if budget <= 0:
                return
            if sequence.state == "waiting" and not self._admit(sequence):
                self._is_short = True
                return
            num_tokens = min(sequence.num_tokens - sequence.num_computed, budget)
            budget -= num_tokens
            yield Chunk(sequence, num_tokens)

    def _admit(self, sequence: _Sequence) -> bool:
        """Takes blocks for all its tokens, if there are enough and it may run."""
        if self.num_running + self._num_reserved >= self.profile.max_running:
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
        sequence.state = "prefilling"
        self._waiting.remove(sequence)
        insort(self._prefilling, sequence)
        return True

    def _name_blocks(self, sequence: _Sequence) -> None:
        """The prefix cache knows the computed blocks from now on."""
        keys = sequence.request.block_keys
        num_full = min(sequence.num_computed // self._block_tokens, len(keys))
        for key in keys[sequence.num_named : num_full]:
            if self.blocks.name(key):
                sequence.num_private -= 1
                sequence.shared.append(key)
        sequence.num_named = max(sequence.num_named, num_full)

    def _first(self, sequence: _Sequence) -> ModelledToken:
        self._prefilling.remove(sequence)
        sequence.state = "held"
        sequence.num_tokens += 1
        token = self._token(sequence)
        if not sequence.request.prefill_only:
            if token.is_last:
                self._remove(sequence)
            else:
                self._decode(sequence)
        return token

    def _append(self, sequence: _Sequence) -> ModelledToken:
        sequence.num_tokens += 1
        token = self._token(sequence)
        if token.is_last:
            self._remove(sequence)
        return token

    def _token(self, sequence: _Sequence) -> ModelledToken:
        request = sequence.request
        num_output = sequence.num_tokens - request.num_prompt_tokens
        return ModelledToken(request.request_id, num_output - 1, num_output >= request.num_output_tokens)

    def _decode(self, sequence: _Sequence) -> None:
        sequence.state = "decoding"
        self._decoding[sequence] = None
        self._decode_tokens += sequence.num_tokens

    def _make_room(self, sequence: _Sequence) -> int:
        """A block for a decoding sequence's next token, preempting the last in rank while none is free."""
        num_preempted = 0
        while sequence.state == "decoding":
            if self.blocks.num_available:
                self._take(sequence, 1)
                break
            self._preempt(max((*self._decoding, *self._prefilling)))
            num_preempted += 1
        return num_preempted

    def _preempt(self, victim: _Sequence) -> None:
        """Back to the queue, to be computed again."""
        self._leave_queue(victim)
        self._free(victim)
        victim.num_computed = victim.num_cached = victim.num_named = 0
        victim.state = "waiting"
        insort(self._waiting, victim)

    def _remove(self, sequence: _Sequence) -> None:
        self._leave_queue(sequence)
        self._free(sequence)
        sequence.state = "removed"
        del self._sequences[sequence.request.request_id]

    def _leave_queue(self, sequence: _Sequence) -> None:
        match sequence.state:
            case "waiting":
                self._waiting.remove(sequence)
            case "prefilling":
                self._prefilling.remove(sequence)
            case "decoding":
                del self._decoding[sequence]
                self._decode_tokens -= sequence.num_tokens
            case "reserved":
                self._num_reserved -= 1

    def _take(self, sequence: _Sequence, num_blocks: int) -> None:
        self.blocks.take(num_blocks)
        sequence.num_private += num_blocks

    def _free(self, sequence: _Sequence) -> None:
        self.blocks.release(sequence.num_private, sequence.shared)
        sequence.num_private, sequence.shared = 0, []

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_tokens)

    def _retry_after_ms(self) -> int:
        """When the first of those that decode will have made room, at the pace of the last step."""
        left = [
            one.request.num_output_tokens - one.num_tokens + one.request.num_prompt_tokens for one in self._decoding
        ]
        return min(max(int(1000 * self._step_s * min(left, default=1)), 10), 10_000)
