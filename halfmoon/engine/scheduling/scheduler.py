"""Which tokens run in the next step. No torch, no clock, no asyncio.

There are no phases: every sequence has tokens and a count of computed ones, and a step runs some uncomputed tokens of
some sequences (the unified view of Sarathi-Serve and vLLM V1). A prompt's chunk, a decode step, and the recomputation
after a preemption are the same thing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from operator import itemgetter

from halfmoon.engine.scheduling.schedule import Schedule, ScheduledSequence
from halfmoon.engine.scheduling.sequence import Sequence
from halfmoon.engine.scheduling.sequence_queues import SequenceQueues
from halfmoon.engine.scheduling.speculation import Speculation
from halfmoon.policy.models.chunk_length import CONSTANT_CHUNKS, decodes_with_targets
from halfmoon.policy.models.learned_chunk_rule import LearnedChunkRule
from halfmoon.policy.nested_step import OuterStep, admit_nested
from halfmoon.policy.preemption import Turns, in_turn
from halfmoon.policy.shared_step import ToAdmit, is_long, share_out, shorter_ones

_MOST_AHEAD = 16  # tokens of an answer that came from another worker, if it goes ahead of the decodes
_AHEAD_SHARE = 0.7  # of the time of the step with the decodes that a step without them takes then
_MOST_LOGITS = 256  # of a step, for all prompts that need those of each token: a row is as wide as the vocabulary


class Scheduler:
    """Composes steps from the sequences in `queues`."""

    def __init__(self, queues: SequenceQueues) -> None:
        self.queues = queues
        self.chunk_rule = LearnedChunkRule(CONSTANT_CHUNKS)  # how much of a prompt is computed beside decodes
        self._blocks = queues.blocks
        self._block_tokens = queues.block_tokens
        self._limits = queues.limits
        self._turns: Turns[Sequence] = Turns()  # of this step
        self._decodes_wait = False  # in this step

    def schedule(self, now_s: float = 0.0) -> Schedule:
        """The next step: decodes first, then prefill chunks by rank. Takes the blocks that they need."""
        num_preempted = 0
        scheduled: list[ScheduledSequence] = []
        self._turns = self.queues.take_turns(now_s) if self.queues.allows_pauses else Turns()
        for sequence in in_turn(self.queues.running, now_s):
            if sequence.num_uncomputed > 1 or sequence.state != "running":
                continue
            if len(scheduled) == self._limits.max_batch_tokens:
                break
            num_preempted += self.queues.make_room(sequence, now_s)
            if sequence.state == "running":
                scheduled.append(ScheduledSequence(sequence, 1))
        num_decode_seqs = len(scheduled)
        if self._limits.speculates:
            scheduled = self._with_drafts(scheduled)
        budget = self._limits.max_batch_tokens - sum(item.num_tokens for item in scheduled)
        self.queues.is_short = num_preempted > 0
        if not scheduled:
            return Schedule(tuple(self._by_layer(budget) or self._prefills(budget, now_s)), 0, num_preempted)
        prefills = [*self._prefills(budget, now_s, scheduled)]
        self._decodes_wait = not self._decodes_wait and self._go_ahead(prefills, scheduled)
        if self._decodes_wait:
            return Schedule(tuple(prefills), 0, num_preempted)
        return Schedule((*scheduled, *prefills), num_decode_seqs, num_preempted)

    def nested(self, outer: Schedule, left: float, num_nested: int, since: int, now_s: float) -> Schedule:
        """The prompts that came as number `since` or later and run in the middle of a running step, if any.

        `left` and `num_nested` are an `OuterStep`'s. Only prompts that are handed over run nested: the next token of
        others would wait for the outer step. None does while one of a higher priority is here, or one decodes, or if
        not all that wait have room.
        """
        waiting, step = self.queues.waiting, OuterStep(outer.num_tokens, len(outer.scheduled), left, num_nested)
        newcomers = [one for one in waiting if one.order >= since and _can_nest(one)]
        if not newcomers or not outer.can_nest or not self.queues.has_room_for_waiting or self.queues.allows_pauses:
            return Schedule((), 0, 0)
        if any(one.is_decoding for one in self.queues.running):
            return Schedule((), 0, 0)
        priority = min(one.request.priority for one in (*waiting, *self.queues.running))
        able = in_turn([one for one in newcomers if one.request.priority == priority], now_s)

        def tokens_of(one: Sequence) -> int:
            return one.num_uncomputed - (self._blocks.to_admit(one).num_cached if one.state == "waiting" else 0)

        admitted = admit_nested(step, able, tokens_of, lambda one: self.queues.admit(one, now_s))
        return Schedule(tuple(ScheduledSequence(one, one.num_uncomputed) for one in admitted), 0, 0)

    def _go_ahead(self, prefills: list[ScheduledSequence], decodes: list[ScheduledSequence]) -> bool:
        """Whether answers that came from another worker run before the decodes: their clients wait for the next token.

        So where time grows with the tokens of a step, as on CPUs, and two steps take hardly longer than one.
        """
        step = self.chunk_rule.rule.step
        have_text = all(item.samples and item.sequence.request.output_token_ids for item in prefills)
        num_tokens = sum(item.num_tokens for item in prefills)
        if not prefills or not have_text or num_tokens > _MOST_AHEAD or not any(step):
            return False
        rows, context_tokens = self._rows(prefills)
        decode_rows, decode_context_tokens = self._rows(decodes)
        together_s = step.seconds(rows + decode_rows, context_tokens + decode_context_tokens)
        return step.seconds(rows, context_tokens) <= _AHEAD_SHARE * together_s

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
            if drafts and self._blocks.num_lacking(sequence, len(drafts)):
                if self._blocks.num_available:
                    self._blocks.grow(sequence)
                drafts = drafts[: len(sequence.blocks) * self._block_tokens - len(sequence.token_ids)]
            room -= len(drafts)
            result.append(ScheduledSequence(sequence, 1 + len(drafts), drafts=tuple(drafts)))
        return result

    def _chunk_tokens(self, decodes: list[ScheduledSequence], first: Sequence) -> int:
        """Most prompt tokens beside these decodes, where `first` is the first prompt."""
        requests = [one.sequence.request for one in decodes]
        targets_s = (math.inf if request.prefill_only else request.tbt_target_s for request in requests)
        beside = decodes_with_targets(*self._rows(decodes), targets_s)
        limits = self._limits
        return self.chunk_rule.tokens(limits.chunk_tokens, limits.max_batch_tokens, beside, first.num_computed)

    def _prefills(
        self, budget: int, now_s: float, decodes: list[ScheduledSequence] | None = None
    ) -> Iterable[ScheduledSequence]:
        """Chunks within `budget` tokens, by rank; a long prompt shares them with shorter ones (`shared_step`).

        After the first sequence that cannot be admitted, none is: no sequence starves.
        """
        running = [one for one in self.queues.running if one.num_uncomputed > 1 and one.num_ready(self._block_tokens)]
        queue = in_turn([*running, *self.queues.waiting], now_s)
        num_logits, step_tokens, is_alone = _MOST_LOGITS, self._limits.max_batch_tokens, True
        while queue and budget > 0:
            sequence = queue.pop(0)
            if sequence.state == "waiting":
                is_short = self.queues.is_short or self._turns.is_barred(sequence)
                self.queues.is_short = is_short or not self.queues.admit(sequence, now_s)
                if self.queues.is_short:
                    continue
            num_ready = sequence.num_ready(self._block_tokens)
            if sequence.needs_all_outputs:
                num_ready = min(num_ready, num_logits)
            if not num_ready:
                continue
            if decodes:
                budget, decodes = min(budget, self._chunk_tokens(decodes, sequence)), None
            num_tokens = min(num_ready, budget)
            is_awaited = sequence.restore is not None and sequence.restore.is_shared
            if is_long(num_ready, budget, step_tokens, is_awaited=is_awaited):
                shorter = self._shorter(sequence, num_ready, queue)
                share, others = share_out(num_ready, shorter, itemgetter(0), budget, step_tokens)
                if others and sequence.num_at_once(share) <= share:
                    num_tokens, budget = share, share + sum(num for _, num in others)
                    queue, is_alone = [other for (_, other), _ in others], False
            # Computed blocks cannot be loaded any more: a little at a time, unless others make the step a long one.
            if sequence.restore is not None and not is_awaited and not queue and is_alone:
                num_tokens = min(num_tokens, self._limits.chunk_tokens)
            if sequence.needs_all_outputs:
                num_logits -= num_tokens
            num_tokens = sequence.num_at_once(num_tokens)
            if num_tokens:
                budget -= num_tokens
                yield ScheduledSequence(sequence, num_tokens)

    def _by_layer(self, budget: int) -> list[ScheduledSequence]:
        """The first prompt by rank, alone, if its step can wait for layers that arrive.

        So no decode and no other prompt waits in that step, and giving it up takes nothing back from others.
        """
        tokens = self._block_tokens
        able = [one for one in self.queues.running if one.num_ready(tokens) or one.num_arriving(tokens)]
        first = min((*able, *self.queues.waiting), key=lambda sequence: sequence.rank, default=None)
        num_arriving = 0 if first is None or first.state == "waiting" else first.num_arriving(tokens)
        if first is None or not num_arriving:
            return []
        return [ScheduledSequence(first, min(first.num_ready(tokens, num_arriving), budget), num_arriving)]

    def _shorter(self, long: Sequence, num_tokens: int, later: Iterable[Sequence]) -> list[tuple[int, Sequence]]:
        """See `shorter_ones`: those that have the long one's priority."""

        def to_admit(other: Sequence) -> ToAdmit | None:
            return None if self._turns.is_barred(other) else self._blocks.to_admit(other)

        def tokens_of(other: Sequence, num_cached: int) -> int:
            may_share = other.request.priority == long.request.priority
            return other.num_ready(self._block_tokens, num_cached) if may_share else 0

        places = 0 if self.queues.is_short else self.queues.num_places
        return shorter_ones(num_tokens, later, self._blocks.num_available, places, to_admit, tokens_of)

    def _rows(self, items: Iterable[ScheduledSequence]) -> tuple[int, int]:
        """Tokens that run, and those that their sequences see, as a step model counts them (`step_counts`)."""
        counts = [(item.num_tokens, item.num_seen(self._block_tokens)) for item in items]
        return sum(rows for rows, _ in counts), sum(context_tokens for _, context_tokens in counts)


def _can_nest(sequence: Sequence) -> bool:
    """Whether all of a prompt that waits can run at once, whatever else runs."""
    is_plain = sequence.restore is None and sequence.policy is None and not sequence.needs_all_outputs
    return is_plain and sequence.request.prefill_only
