"""Which tokens run in the next step. No torch, no clock, no asyncio.

There are no phases: every sequence has tokens and a count of computed ones, and a step runs some uncomputed tokens of
some sequences (the unified view of Sarathi-Serve and vLLM V1). A prompt's chunk, a decode step, and the recomputation
after a preemption are the same thing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from halfmoon.engine.scheduling.layer_gate import LayerGate
from halfmoon.engine.scheduling.prefix_cache import PrefixCache
from halfmoon.engine.scheduling.sequence import Sequence
from halfmoon.engine.scheduling.speculation import Speculation
from halfmoon.errors import NoCapacity
from halfmoon.kv.frame_plan import Written

_EVERY_BLOCK = 1 << 62
_MOST_LOGITS = 256  # of a step, for all prompts that need those of each token: a row is as wide as the vocabulary


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What a step may hold. `chunk_tokens` bounds prefill next to decodes, and so the stall of a running request."""

    max_batch_tokens: int = 2048
    chunk_tokens: int = 512
    max_running: int = 64
    speculates: bool = False  # decodes also run guessed tokens (`speculation.py`)
    window_tokens: int | None = None  # no layer lets a token see further back, itself included; None: some does


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """`num_tokens` tokens of `sequence`, from `start` on, run in this step.

    The `num_arriving` tokens between its `num_computed` and `start` arrive layer by layer while the step runs. The last
    ones may be `drafts`: guesses that are not among the sequence's tokens yet.
    """

    sequence: Sequence
    num_tokens: int
    num_arriving: int = 0
    drafts: tuple[int, ...] = ()

    @property
    def start(self) -> int:
        """Position of the first token that runs."""
        return self.sequence.num_computed + self.num_arriving

    @property
    def gate(self) -> LayerGate | None:
        """Where the step waits for the layers that arrive."""
        restore = self.sequence.restore
        return restore.gate if self.num_arriving and restore is not None else None

    @property
    def num_logits(self) -> int:
        """How many of its last tokens the step needs logits of."""
        return self.num_tokens if self.sequence.needs_all_outputs else self.num_drawn

    @property
    def samples(self) -> bool:
        """Whether the step ends with this sequence's newest token, so that the next one is drawn."""
        return self.num_arriving + self.num_tokens - len(self.drafts) == self.sequence.num_uncomputed

    @property
    def num_drawn(self) -> int:
        """How many tokens are drawn: the next one, and what would follow each guess."""
        return 1 + len(self.drafts) if self.samples else 0


@dataclass(frozen=True, slots=True)
class Schedule:
    """One step's work, decodes first."""

    scheduled: tuple[ScheduledSequence, ...]
    num_decode_seqs: int
    num_preempted: int


class Scheduler:
    """Owns the queues: waiting, running, reserved, held. Takes blocks from the cache, not their content."""

    def __init__(self, cache: PrefixCache, block_tokens: int, limits: SchedulerLimits) -> None:
        self._cache = cache
        self._block_tokens = block_tokens
        self._limits = limits
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._reserved: dict[str, Sequence] = {}
        self._held: dict[str, Sequence] = {}
        self._is_short = False  # the last step left a sequence waiting for blocks or for a place

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        """Sequences without blocks."""
        return tuple(self._waiting)

    @property
    def running(self) -> tuple[Sequence, ...]:
        """Sequences with blocks and uncomputed tokens."""
        return tuple(self._running)

    @property
    def num_reserved(self) -> int:
        """Sequences whose K and V are on their way from another worker."""
        return len(self._reserved)

    @property
    def num_held(self) -> int:
        """Prefilled sequences whose K and V may still be read."""
        return len(self._held)

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence to be computed here from its first token.

        If it loads a part of its prompt, it gets its blocks now, provided that no other sequence needs them: loading
        can begin.
        """
        self._waiting.append(sequence)
        if sequence.restore is not None and not self._is_short:
            wanted = sum(self._blocks_for(len(other.token_ids)) for other in self._waiting)
            places = self._limits.max_running - len(self._running) - len(self._reserved)
            if wanted <= self._cache.num_available and len(self._waiting) <= places:
                self._admit(sequence)

    def reserve(self, sequence: Sequence) -> None:
        """Takes blocks for all its tokens and the next one, now, sharing cached ones: `num_cached` tokens are here.

        Raises NoCapacity when there are none, or while other sequences wait for them: those arrived first.
        """
        if self._waiting and (self._is_short or any(map(_was_preempted, self._waiting))):
            raise NoCapacity(f"{len(self._waiting)} sequences wait for blocks already")
        if len(self._running) + len(self._reserved) >= self._limits.max_running:
            raise NoCapacity(f"{self._limits.max_running} sequences run or are reserved already")
        num_tokens = len(sequence.token_ids)
        if not self._take_blocks(sequence, num_tokens, num_tokens + 1):
            raise NoCapacity(f"{num_tokens + 1} tokens do not fit: {self._cache.num_available} blocks are available")
        sequence.state = "reserved"
        self._reserved[sequence.request_id] = sequence

    def start(self, sequence: Sequence, first_token_id: int, *, is_private: bool = False) -> None:
        """Starts decoding a reserved sequence, whose K and V are in place, with the next step.

        Private K and V never enter the prefix cache, nor what is computed from them.
        """
        del self._reserved[sequence.request_id]
        sequence.num_computed = sequence.num_received = len(sequence.token_ids)
        if is_private:
            sequence.num_known_blocks = _EVERY_BLOCK
        sequence.token_ids.append(first_token_id)
        self._run(sequence)

    def hold(self, sequence: Sequence) -> None:
        """Stops a running sequence, which keeps its blocks until `remove`."""
        self._running.remove(sequence)
        sequence.state = "held"
        self._held[sequence.request_id] = sequence

    def remove(self, sequence: Sequence) -> None:
        """Forgets a sequence in any state and releases its blocks."""
        if sequence.state == "waiting":
            self._waiting.remove(sequence)
        elif sequence.state == "running":
            self._running.remove(sequence)
        else:
            queue = self._reserved if sequence.state == "reserved" else self._held
            del queue[sequence.request_id]
        with sequence.kv_lock:  # lets a copy in progress finish
            self._free(sequence)
            sequence.state = "removed"

    def has_work(self) -> bool:
        """Whether some sequence has uncomputed tokens (it may still lack blocks)."""
        return bool(self._waiting or self._running)

    def schedule(self) -> Schedule:
        """The next step: decodes first, then prefill chunks by rank. Takes the blocks that they need."""
        num_preempted = 0
        scheduled: list[ScheduledSequence] = []
        for sequence in _by_rank(self._running):
            if sequence.num_uncomputed > 1 or sequence.state != "running":
                continue
            if len(scheduled) == self._limits.max_batch_tokens:
                break
            num_preempted += self._make_room(sequence)
            if sequence.state == "running":
                scheduled.append(ScheduledSequence(sequence, 1))
        num_decode_seqs = len(scheduled)
        if self._limits.speculates:
            scheduled = self._with_drafts(scheduled)
        budget = self._limits.max_batch_tokens - sum(item.num_tokens for item in scheduled)
        if num_decode_seqs:
            budget = min(budget, self._limits.chunk_tokens)
        self._is_short = num_preempted > 0
        scheduled.extend(
            self._prefills(budget) if num_decode_seqs else self._by_layer(budget) or self._prefills(budget)
        )
        return Schedule(tuple(scheduled), num_decode_seqs, num_preempted)

    def _with_drafts(self, decodes: list[ScheduledSequence]) -> list[ScheduledSequence]:
        """Adds guesses to decodes, as far as the step and the free blocks have room for them."""
        room, result = self._limits.max_batch_tokens - len(decodes), []
        for item in decodes:
            sequence = item.sequence
            most = min(sequence.sampling.max_tokens - sequence.num_output - 1, room)
            drafts: list[int] = []
            if most > 0 and sequence.sampling.constraint is None and not sequence.request.prefill_only:
                sequence.speculation = sequence.speculation or Speculation()
                drafts = sequence.speculation.drafts(sequence.token_ids, most, len(decodes))
            if drafts and len(sequence.blocks) < self._blocks_for(len(sequence.token_ids) + len(drafts)):
                if self._cache.num_available:
                    sequence.blocks += self._cache.allocate(1, near=sequence.blocks[-1])
                drafts = drafts[: len(sequence.blocks) * self._block_tokens - len(sequence.token_ids)]
            room -= len(drafts)
            result.append(ScheduledSequence(sequence, 1 + len(drafts), drafts=tuple(drafts)))
        return result

    def _prefills(self, budget: int) -> Iterable[ScheduledSequence]:
        """Chunks within `budget` tokens, by rank; what a long prompt leaves to shorter ones goes to the shortest first.

        After the first sequence that cannot be admitted, none is: no sequence starves.
        """
        running = [one for one in self._running if one.num_uncomputed > 1 and one.num_ready(self._block_tokens)]
        queue = _by_rank(running + self._waiting)
        num_logits = _MOST_LOGITS
        while queue and budget > 0:
            sequence = queue.pop(0)
            if sequence.state == "waiting":
                self._is_short = self._is_short or not self._admit(sequence)
                if self._is_short:
                    continue
            num_ready, room = sequence.num_ready(self._block_tokens), budget
            if not num_ready:
                continue
            if num_ready > budget:
                shorter = self._shorter(sequence, queue)
                room -= min(sum(other.num_ready(self._block_tokens) for other in shorter), budget // 2)
                overtaking = set(shorter)
                queue = shorter + [other for other in queue if other not in overtaking]
            num_tokens = min(num_ready, room)
            # Computed blocks cannot be loaded any more: a little at a time, unless others make the step a long one.
            if sequence.restore is not None and not queue:
                num_tokens = min(num_tokens, self._limits.chunk_tokens)
            if sequence.needs_all_outputs:
                num_tokens = min(num_tokens, num_logits)
                num_logits -= num_tokens
            if num_tokens:
                budget -= num_tokens
                yield ScheduledSequence(sequence, num_tokens)

    def _by_layer(self, budget: int) -> list[ScheduledSequence]:
        """The first prompt by rank, alone, if its step can wait for layers that arrive.

        So no decode and no other prompt waits in that step, and giving it up takes nothing back from others.
        """
        tokens = self._block_tokens
        able = [one for one in self._running if one.num_ready(tokens) or one.num_arriving(tokens)]
        first = min((*able, *self._waiting), key=lambda sequence: sequence.rank, default=None)
        num_arriving = 0 if first is None or first.state == "waiting" else first.num_arriving(tokens)
        if first is None or not num_arriving:
            return []
        return [ScheduledSequence(first, min(first.num_uncomputed - num_arriving, budget), num_arriving)]

    def _shorter(self, long: Sequence, later: Iterable[Sequence]) -> list[Sequence]:
        """The `later` sequences that may share a step with a prompt too long for it, shortest first.

        They have its priority, less left to do, and blocks and a place. So a long prompt takes at most twice as long,
        and a short one behind it waits for a step instead of for all of it.
        """
        shorter = []
        free, places = self._cache.num_available, self._limits.max_running - len(self._running) - len(self._reserved)
        for sequence in later:
            if sequence.state == "waiting":
                free -= self._blocks_for(len(sequence.token_ids))
                places -= 1
                if self._is_short or free < 0 or places < 0:
                    break
            if sequence.request.priority == long.request.priority and sequence.num_uncomputed < long.num_uncomputed:
                shorter.append(sequence)
        return sorted(shorter, key=lambda sequence: sequence.num_uncomputed)

    def _admit(self, sequence: Sequence) -> bool:
        """Takes blocks for everything the sequence has to compute, if there are enough."""
        if len(self._running) + len(self._reserved) >= self._limits.max_running:
            return False
        num_tokens = len(sequence.token_ids)
        num_known = 0 if sequence.needs_all_outputs else num_tokens - 1  # at least one token is left to compute
        if not self._take_blocks(sequence, num_known, num_tokens):
            return False
        sequence.num_computed = sequence.num_cached
        sequence.num_loaded = 0
        if sequence.restore is not None:
            sequence.restore.move_fence(max(sequence.restore.fence, sequence.num_known_blocks))
            sequence.skip_loaded(self._block_tokens)
        self._waiting.remove(sequence)
        self._run(sequence)
        return True

    def _take_blocks(self, sequence: Sequence, num_known: int, num_tokens: int) -> bool:
        """Takes blocks for `num_tokens`, sharing what is cached of the first `num_known`; False if too few are left."""
        matched = self._cache.match(sequence, num_known)
        num_blocks = self._blocks_for(num_tokens)
        if num_blocks - len(matched) > self._cache.num_available:
            self._cache.release(matched)
            return False
        sequence.blocks = matched + self._cache.allocate(
            num_blocks - len(matched), near=matched[-1] if matched else None, room=self._room(sequence, num_blocks)
        )
        sequence.num_known_blocks = len(matched)
        sequence.num_cached = len(matched) * self._block_tokens
        return True

    def _make_room(self, sequence: Sequence) -> int:
        """Gets the block for a decoding sequence's next token, preempting the last in rank while none is free."""
        num_preempted = 0
        while len(sequence.blocks) < self._blocks_for(len(sequence.token_ids)) and sequence.state == "running":
            if self._cache.num_available:
                sequence.blocks += self._cache.allocate(1, near=sequence.blocks[-1])
                continue
            self._preempt(max(self._running, key=lambda other: other.rank))
            num_preempted += 1
        return num_preempted

    def _preempt(self, victim: Sequence) -> None:
        """Moves a sequence back to the queue; its tokens stay, its K and V are recomputed (as in vLLM)."""
        self._running.remove(victim)
        with victim.kv_lock:
            self._free(victim)
            victim.written = Written()
            victim.state = "waiting"
            victim.restore = None
        victim.num_computed = 0
        self._waiting.append(victim)

    def _run(self, sequence: Sequence) -> None:
        sequence.state = "running"
        self._running.append(sequence)

    def drop_behind_window(self, sequence: Sequence) -> None:
        """Releases leading blocks that no token from now on sees; the cache keeps them until others need them.

        A prompt that is handed over keeps its blocks: where it goes, they are asked for by position.
        """
        window = self._limits.window_tokens
        if window is None or sequence.request.prefill_only or sequence.restore is not None:
            return
        num_unseen = max(0, sequence.num_computed + 1 - window) // self._block_tokens
        if num_unseen > sequence.num_dropped:
            self._cache.release(sequence.blocks[sequence.num_dropped : num_unseen])
            sequence.num_dropped = num_unseen

    def _free(self, sequence: Sequence) -> None:
        self._cache.release(sequence.blocks[sequence.num_dropped :])
        sequence.blocks, sequence.num_dropped = [], 0

    def _room(self, sequence: Sequence, num_blocks: int) -> int:
        return max(self._blocks_for(sequence.max_tokens_ever) - num_blocks, 0)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_tokens)


def _was_preempted(sequence: Sequence) -> bool:
    """Whether a waiting sequence already produced a token here: it must not wait for sequences that arrive later."""
    return sequence.num_output > len(sequence.request.output_token_ids)


def _by_rank(sequences: Iterable[Sequence]) -> list[Sequence]:
    return sorted(sequences, key=lambda sequence: sequence.rank)
