"""Which tokens run in the next step. No torch, no clock, no asyncio.

There are no phases: every sequence has tokens and a count of computed ones, and a step runs some uncomputed tokens of
some sequences (the unified view of Sarathi-Serve and vLLM V1). A prompt's chunk, a decode step, and the recomputation
after a preemption are the same thing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from halfmoon.engine.scheduling.layer_gate import LayerGate
from halfmoon.engine.scheduling.paused_sequences import PauseCounts, PausedKV, PausedSequences
from halfmoon.engine.scheduling.prefix_cache import PrefixCache
from halfmoon.engine.scheduling.sequence import Sequence
from halfmoon.engine.scheduling.speculation import Speculation
from halfmoon.errors import NoCapacity
from halfmoon.kv.frame_plan import Written
from halfmoon.policy.models.chunk_length import CONSTANT_CHUNKS, told_decodes
from halfmoon.policy.preemption import Queued, Turns, in_turn, is_overtaken, last_in_turn, take_turns, to_pause

_EVERY_BLOCK = 1 << 62
_MOST_LOGITS = 256  # of a step, for all prompts that need those of each token: a row is as wide as the vocabulary


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What a step may hold. `chunk_tokens` bounds prefill next to decodes where `Scheduler.chunk_rule` is unknown."""

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
    """Owns the queues: waiting, running, paused, reserved, held. Takes blocks from the cache, not their content."""

    def __init__(
        self, cache: PrefixCache, block_tokens: int, limits: SchedulerLimits, paused_kv: PausedKV | None = None
    ) -> None:
        """paused_kv: takes what paused sequences have computed when others need their blocks; None: it is not kept."""
        self._cache = cache
        self._block_tokens = block_tokens
        self._limits = limits
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._paused = PausedSequences(cache, paused_kv)
        self._turns: Turns[Sequence] = Turns()  # of this step
        self._reserved: dict[str, Sequence] = {}
        self._held: dict[str, Sequence] = {}
        self._is_short = False  # the last step left a sequence waiting for blocks or for a place
        self.chunk_rule = CONSTANT_CHUNKS  # how much of a prompt is computed beside decodes

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        """Sequences without blocks."""
        return tuple(self._waiting)

    @property
    def running(self) -> tuple[Sequence, ...]:
        """Sequences with blocks and uncomputed tokens."""
        return tuple(self._running)

    @property
    def paused(self) -> tuple[Sequence, ...]:
        """Sequences that give way to higher classes."""
        return tuple(self._paused)

    @property
    def allows_pauses(self) -> bool:
        """Whether any sequence is paused, or might be."""
        return len(self._paused) > 0 or any(one.pauses.max_pause_s and one.is_decoding for one in self._running)

    @property
    def pause_counts(self) -> PauseCounts:
        """What is reported of pauses."""
        return self._paused.counts

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
        if sequence.restore is not None and not self._is_short and not self._paused:
            wanted = sum(self._blocks_for(len(other.token_ids)) for other in self._waiting)
            places = self._num_places
            if wanted <= self._cache.num_available and len(self._waiting) <= places:
                self._admit(sequence)

    def reserve(self, sequence: Sequence, now_s: float = 0.0) -> None:
        """Takes blocks for all its tokens and the next one, now, sharing cached ones: `num_cached` tokens are here.

        Answers that give way to it are paused. Raises NoCapacity when there are no blocks, or while other sequences
        wait for them: those arrived first.
        """
        lacks_room = self._waiting and (self._is_short or any(map(_was_preempted, self._waiting)))
        ahead = [*(self._waiting if lacks_room else ()), *self._paused]
        if is_overtaken(sequence.pauses, (other.pauses for other in ahead), now_s):
            raise NoCapacity(f"{len(ahead)} sequences wait for blocks already")
        num_tokens = len(sequence.token_ids)
        if self.allows_pauses:
            self._pause_for(sequence, num_tokens, num_tokens + 1, now_s)
        if self._num_places <= 0:
            raise NoCapacity(f"{self._limits.max_running} sequences run or are reserved already")
        if not self._take_blocks(sequence, num_tokens, num_tokens + 1, now_s):
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
        elif sequence.state == "paused":
            self._paused.take_out(sequence)
        else:
            queue = self._reserved if sequence.state == "reserved" else self._held
            del queue[sequence.request_id]
        with sequence.kv_lock:  # lets a copy in progress finish
            self._free(sequence)
            sequence.state = "removed"

    def has_work(self) -> bool:
        """Whether some sequence has uncomputed tokens (it may still lack blocks)."""
        return bool(self._waiting or self._running or self._paused)

    def schedule(self, now_s: float = 0.0) -> Schedule:
        """The next step: decodes first, then prefill chunks by rank. Takes the blocks that they need."""
        num_preempted = 0
        scheduled: list[ScheduledSequence] = []
        self._turns = self._take_turns(now_s) if self.allows_pauses else Turns()
        for sequence in in_turn(self._running, now_s):
            if sequence.num_uncomputed > 1 or sequence.state != "running":
                continue
            if len(scheduled) == self._limits.max_batch_tokens:
                break
            num_preempted += self._make_room(sequence, now_s)
            if sequence.state == "running":
                scheduled.append(ScheduledSequence(sequence, 1))
        num_decode_seqs = len(scheduled)
        if self._limits.speculates:
            scheduled = self._with_drafts(scheduled)
        budget = self._limits.max_batch_tokens - sum(item.num_tokens for item in scheduled)
        self._is_short = num_preempted > 0
        scheduled.extend(
            self._prefills(budget, now_s, scheduled[:])
            if scheduled
            else self._by_layer(budget) or self._prefills(budget, now_s)
        )
        return Schedule(tuple(scheduled), num_decode_seqs, num_preempted)

    def _take_turns(self, now_s: float) -> Turns[Sequence]:
        """Pauses answers, lets paused ones go on, and gives room to prompts that others are paused for."""
        reclaimable = self._paused.reclaimable()
        waiting = [*self._waiting, *self._paused]
        prompts = sum(sequence.num_uncomputed for sequence in self._running if not sequence.is_decoding)
        turns = take_turns(
            [self._queued(sequence, reclaimable) for sequence in in_turn(waiting, now_s)],
            [sequence for sequence in self._running if sequence.is_decoding],
            self._num_places,
            self._cache.num_available + len(reclaimable) - self._num_growing,
            self._limits.max_batch_tokens - prompts,
            self._num_freed,
            now_s,
        )
        for sequence in turns.pause:
            self._pause(sequence, now_s)
        for sequence in turns.get_room:
            if sequence.state == "paused":
                self._resume(sequence, now_s)
            else:
                self._admit(sequence, now_s)
        return turns

    def _queued(self, sequence: Sequence, reclaimable: set[int]) -> Queued[Sequence]:
        """A sequence that lacks room, with the blocks that it needs besides those that stay in use anyway."""
        num_blocks = self._blocks_for(len(sequence.token_ids))
        if sequence.state == "paused":
            kept = [] if sequence.is_moved_out else sequence.blocks
            num_blocks -= sum(block not in reclaimable for block in kept[sequence.num_dropped :]) + sequence.num_dropped
            return Queued(sequence, num_blocks)
        num_known = 0 if sequence.needs_all_outputs else len(sequence.token_ids) - 1
        num_blocks -= sum(block not in reclaimable for block in self._cache.used(sequence, num_known))
        return Queued(sequence, num_blocks, sequence.num_uncomputed)

    def _pause_for(self, sequence: Sequence, num_known: int, num_tokens: int, now_s: float) -> None:
        """Pauses what gives way to a sequence that lacks a place or blocks, if that is enough."""
        reclaimable = self._paused.reclaimable()
        num_blocks = self._blocks_for(num_tokens)
        num_blocks -= sum(block not in reclaimable for block in self._cache.used(sequence, num_known))
        chosen = to_pause(
            [other for other in self._running if other.is_decoding],
            sequence.pauses,
            1 - self._num_places,
            num_blocks + self._num_growing - self._cache.num_available - len(reclaimable),
            self._num_freed,
            now_s,
        )
        for other in chosen or ():
            self._pause(other, now_s)

    def _pause(self, sequence: Sequence, now_s: float) -> None:
        self._running.remove(sequence)
        self._paused.add(sequence, now_s)

    def _resume(self, sequence: Sequence, now_s: float) -> None:
        """Lets a paused sequence go on, if there are blocks for what it had moved out."""
        if sequence.is_moved_out:
            num_blocks = self._blocks_for(sequence.num_computed) - sequence.num_dropped
            if not self._reclaim(num_blocks - self._cache.num_available, now_s):
                return
            blocks = self._cache.allocate(num_blocks, room=self._room(sequence, num_blocks))
            sequence.blocks = blocks[:1] * sequence.num_dropped + blocks
        self._paused.resume(sequence, now_s)
        self._run(sequence)

    def _num_freed(self, sequence: Sequence) -> int:
        """Blocks that nobody else uses."""
        return sum(self._cache.num_users(block) == 1 for block in sequence.blocks[sequence.num_dropped :])

    def _reclaim(self, num_blocks: int, now_s: float) -> bool:
        """Moves paused sequences out until `num_blocks` more are available; none if they have too few in all.

        Where there is no room for a copy, its K and V are computed again later.
        """
        if num_blocks > len(self._paused.reclaimable()):
            return False
        wanted = self._cache.num_available + num_blocks
        while self._cache.num_available < wanted:
            sequence = self._paused.last_in_blocks(now_s)
            assert sequence is not None, "reclaimable blocks are of paused sequences"
            if not self._paused.save(sequence):
                self._paused.take_out(sequence)
                self._start_over(sequence)
                continue
            with sequence.kv_lock:
                num_dropped = sequence.num_dropped
                self._free(sequence)
                sequence.num_dropped = num_dropped
        return True

    @property
    def _num_growing(self) -> int:
        """Blocks that the decoding sequences' next tokens need."""
        decodes = (sequence for sequence in self._running if sequence.is_decoding)
        return sum(max(self._blocks_for(len(one.token_ids)) - len(one.blocks), 0) for one in decodes)

    @property
    def _num_places(self) -> int:
        return self._limits.max_running - len(self._running) - len(self._reserved)

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

    def _chunk_tokens(self, decodes: list[ScheduledSequence], first: Sequence) -> int:
        """Most prompt tokens beside these decodes, where `first` is the first prompt."""
        requests = [one.sequence.request for one in decodes]
        told_s = (math.inf if request.prefill_only else request.tbt_target_s for request in requests)
        context_tokens = sum(len(one.sequence.token_ids) + len(one.drafts) for one in decodes)
        beside = told_decodes(sum(one.num_tokens for one in decodes), context_tokens, told_s)
        limits = self._limits
        return self.chunk_rule.tokens(limits.chunk_tokens, limits.max_batch_tokens, beside, first.num_computed)

    def _prefills(
        self, budget: int, now_s: float, decodes: list[ScheduledSequence] | None = None
    ) -> Iterable[ScheduledSequence]:
        """Chunks within `budget` tokens, by rank; what a long prompt leaves to shorter ones goes to the shortest first.

        After the first sequence that cannot be admitted, none is: no sequence starves.
        """
        running = [one for one in self._running if one.num_uncomputed > 1 and one.num_ready(self._block_tokens)]
        queue = in_turn(running + self._waiting, now_s)
        num_logits = _MOST_LOGITS
        while queue and budget > 0:
            sequence = queue.pop(0)
            if sequence.state == "waiting":
                is_barred = self._turns.bars and sequence.rank not in self._turns.passed
                self._is_short = self._is_short or is_barred or not self._admit(sequence, now_s)
                if self._is_short:
                    continue
            num_ready = sequence.num_ready(self._block_tokens)
            if not num_ready:
                continue
            if decodes:
                budget, decodes = min(budget, self._chunk_tokens(decodes, sequence)), None
            room = budget
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
        free, places = self._cache.num_available, self._num_places
        for sequence in later:
            if sequence.state == "waiting":
                free -= self._blocks_for(len(sequence.token_ids))
                places -= 1
                if self._is_short or free < 0 or places < 0:
                    break
            if sequence.request.priority == long.request.priority and sequence.num_uncomputed < long.num_uncomputed:
                shorter.append(sequence)
        return sorted(shorter, key=lambda sequence: sequence.num_uncomputed)

    def _admit(self, sequence: Sequence, now_s: float = 0.0) -> bool:
        """Takes blocks for everything the sequence has to compute, if there are enough."""
        if self._num_places <= 0:
            return False
        num_tokens = len(sequence.token_ids)
        num_known = 0 if sequence.needs_all_outputs else num_tokens - 1  # at least one token is left to compute
        if not self._take_blocks(sequence, num_known, num_tokens, now_s):
            return False
        sequence.num_computed = sequence.num_cached
        sequence.num_loaded = 0
        if sequence.restore is not None:
            sequence.restore.move_fence(max(sequence.restore.fence, sequence.num_known_blocks))
            sequence.skip_loaded(self._block_tokens)
        self._waiting.remove(sequence)
        if sequence.pauses.is_paused:  # it was paused, and its K and V found no room
            self._paused.counts.total_s += sequence.pauses.resume(now_s)
        self._run(sequence)
        return True

    def _take_blocks(self, sequence: Sequence, num_known: int, num_tokens: int, now_s: float) -> bool:
        """Takes blocks for `num_tokens`, sharing what is cached of the first `num_known`; False if too few are left."""
        matched = self._cache.match(sequence, num_known)
        num_blocks = self._blocks_for(num_tokens)
        lacking = num_blocks - len(matched) - self._cache.num_available
        if lacking > 0 and not self._reclaim(lacking, now_s):
            self._cache.release(matched)
            return False
        sequence.blocks = matched + self._cache.allocate(
            num_blocks - len(matched), near=matched[-1] if matched else None, room=self._room(sequence, num_blocks)
        )
        sequence.num_known_blocks = len(matched)
        sequence.num_cached = len(matched) * self._block_tokens
        return True

    def _make_room(self, sequence: Sequence, now_s: float) -> int:
        """Gets the block for a decoding sequence's next token.

        While none is free, paused sequences are moved out, or the last in turn gives way: paused, or preempted.
        """
        num_preempted = 0
        while len(sequence.blocks) < self._blocks_for(len(sequence.token_ids)) and sequence.state == "running":
            if self._cache.num_available:
                sequence.blocks += self._cache.allocate(1, near=sequence.blocks[-1])
                continue
            if self._reclaim(1, now_s):
                continue
            victim = last_in_turn(self._running, now_s)
            if victim.is_decoding and victim.pauses.gives_way_to(sequence.pauses, now_s):
                self._pause(victim, now_s)
                continue
            self._preempt(victim)
            num_preempted += 1
        return num_preempted

    def _preempt(self, victim: Sequence) -> None:
        """Moves a sequence back to the queue; its tokens stay, its K and V are recomputed (as in vLLM)."""
        self._running.remove(victim)
        self._start_over(victim)

    def _start_over(self, sequence: Sequence) -> None:
        with sequence.kv_lock:
            self._free(sequence)
            sequence.written = Written()
            sequence.state = "waiting"
            sequence.restore = None
        sequence.num_computed, sequence.num_before = 0, len(sequence.token_ids)
        self._waiting.append(sequence)

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
