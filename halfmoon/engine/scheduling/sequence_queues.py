"""Where each sequence is: waiting, running, paused, reserved or held, and who gives way to whom. No torch."""

from __future__ import annotations

from halfmoon.engine.scheduling.paused_sequences import PauseCounts, PausedKV, PausedSequences
from halfmoon.engine.scheduling.prefix_cache import EVERY_BLOCK, PrefixCache
from halfmoon.engine.scheduling.schedule import SchedulerLimits
from halfmoon.engine.scheduling.sequence import Sequence
from halfmoon.engine.scheduling.sequence_blocks import CopyTokens, SequenceBlocks
from halfmoon.errors import NoCapacity
from halfmoon.kv.frame_plan import Written
from halfmoon.policy.preemption import Queued, Turns, in_turn, is_overtaken, last_in_turn, take_turns, to_pause


class SequenceQueues:
    """Owns the queues, and which sequence gets places and blocks. Takes blocks from the cache, not their content."""

    def __init__(
        self,
        cache: PrefixCache,
        block_tokens: int,
        limits: SchedulerLimits,
        paused_kv: PausedKV | None = None,
        copy_tokens: CopyTokens | None = None,
    ) -> None:
        """paused_kv: takes what paused sequences have computed when others need their blocks; None: it is not kept.

        copy_tokens: see `SequenceBlocks`.
        """
        self.blocks = SequenceBlocks(cache, block_tokens, limits.window_tokens, copy_tokens)
        self.is_short = False  # the last step left a sequence waiting for blocks or for a place
        self.block_tokens = block_tokens
        self.limits = limits
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._paused = PausedSequences(cache, paused_kv)
        self._reserved: dict[str, Sequence] = {}
        self._held: dict[str, Sequence] = {}
        self._admitted: list[Sequence] = []  # of those that load KV

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

    @property
    def num_places(self) -> int:
        """How many more sequences may run or be reserved."""
        return self.limits.max_running - len(self._running) - len(self._reserved)

    @property
    def has_room_for_waiting(self) -> bool:
        """Whether all that wait have places and blocks, whatever the prefix cache has of them."""
        wanted = sum(self.blocks.num_for(len(other.token_ids)) for other in self._waiting)
        return not self.is_short and wanted <= self.blocks.num_available and len(self._waiting) <= self.num_places

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence to be computed here from its first token.

        If it loads a part of its prompt, it gets its blocks now, provided that no other sequence needs them: loading
        can begin.
        """
        self._waiting.append(sequence)
        if sequence.restore is not None and not self._paused and self.has_room_for_waiting:
            self.admit(sequence)

    def reserve(self, sequence: Sequence, now_s: float = 0.0) -> None:
        """Takes blocks for all its tokens and the next one, now, sharing cached ones: `num_cached` tokens are here.

        Answers that give way to it are paused. Raises NoCapacity when there are no blocks, or while other sequences
        wait for them: those arrived first.
        """
        lacks_room = self._waiting and (self.is_short or any(map(_was_preempted, self._waiting)))
        ahead = [*(self._waiting if lacks_room else ()), *self._paused]
        if is_overtaken(sequence.pauses, (other.pauses for other in ahead), now_s):
            raise NoCapacity(f"{len(ahead)} sequences wait for blocks already")
        num_tokens = len(sequence.token_ids) - len(sequence.not_handed_over) * self.block_tokens
        num_known = 0 if sequence.not_handed_over else num_tokens
        if self.allows_pauses:
            self._pause_for(sequence, num_known, num_tokens + 1, now_s)
        if self.num_places <= 0:
            raise NoCapacity(f"{self.limits.max_running} sequences run or are reserved already")
        if not self._take_blocks(sequence, num_known, num_tokens + 1, now_s):
            raise NoCapacity(f"{num_tokens + 1} tokens do not fit: {self.blocks.num_available} blocks are available")
        if sequence.not_handed_over:
            self.blocks.leave_gap(sequence)
            sequence.num_known_blocks = EVERY_BLOCK  # the prefix cache finds no prefix with a gap
        sequence.state = "reserved"
        self._reserved[sequence.request_id] = sequence

    def start(self, sequence: Sequence, first_token_id: int, *, is_private: bool = False) -> None:
        """Starts decoding a reserved sequence, whose K and V are in place, with the next step.

        Private K and V never enter the prefix cache, nor what is computed from them.
        """
        del self._reserved[sequence.request_id]
        sequence.num_computed = sequence.num_received = len(sequence.token_ids)
        if is_private:
            sequence.num_known_blocks = EVERY_BLOCK
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
            self.blocks.free(sequence)
            sequence.state = "removed"

    def has_work(self) -> bool:
        """Whether some sequence has uncomputed tokens (it may still lack blocks)."""
        return bool(self._waiting or self._running or self._paused)

    def take_turns(self, now_s: float) -> Turns[Sequence]:
        """Pauses answers, lets paused ones go on, and gives room to prompts that others are paused for."""
        reclaimable = self._paused.reclaimable()
        waiting = [*self._waiting, *self._paused]
        prompts = sum(sequence.num_uncomputed for sequence in self._running if not sequence.is_decoding)
        turns = take_turns(
            [self._queued(sequence, reclaimable) for sequence in in_turn(waiting, now_s)],
            [sequence for sequence in self._running if sequence.is_decoding],
            self.num_places,
            self.blocks.num_available + len(reclaimable) - self.blocks.num_growing(self._running),
            self.limits.max_batch_tokens - prompts,
            self.blocks.num_freed,
            now_s,
        )
        for sequence in turns.pause:
            self._pause(sequence, now_s)
        for sequence in turns.get_room:
            if sequence.state == "paused":
                self._resume(sequence, now_s)
            else:
                self.admit(sequence, now_s)
        return turns

    def admit(self, sequence: Sequence, now_s: float = 0.0) -> bool:
        """Takes blocks for everything the sequence has to compute, if there are enough."""
        if self.num_places <= 0:
            return False
        num_tokens = len(sequence.token_ids)
        num_more = self.blocks.num_chosen(sequence)
        if not self._take_blocks(sequence, sequence.num_reusable, num_tokens, now_s, num_more, is_computed=True):
            return False
        self.blocks.prepare_choice(sequence)
        sequence.num_computed = sequence.num_cached
        sequence.num_loaded = 0
        if sequence.restore is not None:
            sequence.restore.move_fence(max(sequence.restore.fence, sequence.num_known_blocks))
            sequence.skip_loaded(self.block_tokens)
            self._admitted.append(sequence)
        self._waiting.remove(sequence)
        if sequence.pauses.is_paused:  # it was paused, and its K and V found no room
            self._paused.counts.total_s += sequence.pauses.resume(now_s)
        self._run(sequence)
        return True

    def take_admitted(self) -> list[Sequence]:
        """The sequences that load KV and have got their blocks since the last call."""
        admitted, self._admitted = self._admitted, []
        return admitted

    def make_room(self, sequence: Sequence, now_s: float) -> int:
        """Gets the block for a decoding sequence's next token.

        While none is free, paused sequences are moved out, or the last in turn gives way: paused, or preempted.
        """
        num_preempted = 0
        while self.blocks.num_lacking(sequence) and sequence.state == "running":
            if self.blocks.num_available:
                self.blocks.grow(sequence)
                continue
            if self._reclaim(1, now_s):
                continue
            victim = last_in_turn(self._running, now_s)
            if victim.is_decoding and victim.pauses.gives_way_to(sequence.pauses, now_s):
                self._pause(victim, now_s)
                continue
            self._running.remove(victim)
            self._start_over(victim)
            num_preempted += 1
        return num_preempted

    def _queued(self, sequence: Sequence, reclaimable: set[int]) -> Queued[Sequence]:
        """A sequence that lacks room, with the blocks that it needs besides those that stay in use anyway."""
        num_tokens = len(sequence.token_ids)
        if sequence.state == "paused":
            kept = [] if sequence.is_moved_out else sequence.kept_blocks
            num_kept = sum(block not in reclaimable for block in kept) + len(sequence.dropped)
            return Queued(sequence, self.blocks.num_for(num_tokens) - num_kept)
        return Queued(sequence, self.blocks.to_admit(sequence, reclaimable).num_blocks, sequence.num_uncomputed)

    def _pause_for(self, sequence: Sequence, num_known: int, num_tokens: int, now_s: float) -> None:
        """Pauses what gives way to a sequence that lacks a place or blocks, if that is enough."""
        reclaimable = self._paused.reclaimable()
        num_blocks = self.blocks.num_unused(sequence, num_known, num_tokens, reclaimable)
        chosen = to_pause(
            [other for other in self._running if other.is_decoding],
            sequence.pauses,
            1 - self.num_places,
            num_blocks + self.blocks.num_growing(self._running) - self.blocks.num_available - len(reclaimable),
            self.blocks.num_freed,
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
            num_blocks = self.blocks.num_for(sequence.num_computed) - len(sequence.dropped)
            if not self._reclaim(num_blocks - self.blocks.num_available, now_s):
                return
            self.blocks.refill(sequence)
        self._paused.resume(sequence, now_s)
        self._run(sequence)

    def _reclaim(self, num_blocks: int, now_s: float) -> bool:
        """Moves paused sequences out until `num_blocks` more are available; none if they have too few in all.

        Halved blocks may turn out to be too few when all are out.

        Where there is no room for a copy, its K and V are computed again later.
        """
        if num_blocks > len(self._paused.reclaimable()):
            return False
        wanted = self.blocks.num_available + num_blocks
        while self.blocks.num_available < wanted:
            sequence = self._paused.last_in_blocks(now_s)
            if sequence is None:
                return False
            if not self._paused.save(sequence):
                self._paused.take_out(sequence)
                self._start_over(sequence)
                continue
            with sequence.kv_lock:
                dropped = sequence.dropped
                self.blocks.free(sequence)
                sequence.dropped = dropped
        return True

    def _take_blocks(
        self,
        sequence: Sequence,
        num_known: int,
        num_tokens: int,
        now_s: float,
        num_more: int = 0,
        *,
        is_computed: bool = False,
    ) -> bool:
        """Takes blocks for `num_tokens`, sharing what is cached of the first `num_known`; leaves `num_more` available.

        `is_computed`: what is not cached is computed here, so it may go on within a block. Returns False if too few
        blocks are left.
        """
        shared = self.blocks.share(sequence, num_known)
        lacking = self.blocks.num_for(num_tokens) + num_more - len(shared) - self.blocks.num_available
        if lacking > 0 and not self._reclaim(lacking, now_s):
            self.blocks.give_up(shared)
            return False
        self.blocks.fill(sequence, shared, num_tokens, num_known if is_computed else 0)
        return True

    def _start_over(self, sequence: Sequence) -> None:
        """Moves a sequence back to the queue; its tokens stay, its K and V are recomputed (as in vLLM)."""
        with sequence.kv_lock:
            self.blocks.free(sequence)
            sequence.written = Written()
            sequence.state = "waiting"
            sequence.restore = None
        sequence.num_computed, sequence.num_before = 0, len(sequence.token_ids)
        self._waiting.append(sequence)

    def _run(self, sequence: Sequence) -> None:
        sequence.state = "running"
        self._running.append(sequence)


def _was_preempted(sequence: Sequence) -> bool:
    """Whether a waiting sequence already produced a token here: it must not wait for sequences that arrive later."""
    return sequence.num_output > len(sequence.request.output_token_ids)
