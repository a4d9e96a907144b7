"""Continuous batching without a model: schedules steps for requests and books the sampled tokens. No torch.

The engine runs the steps on a model. A simulated worker waits as long as a model would take.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from itertools import islice

from halfmoon.engine.engine_stats import EngineStats
from halfmoon.engine.kv_memory.kv_watch import KVWatch, LayerWatch, OnKV
from halfmoon.engine.request import (
    CONSTRAINT_TOKEN_ID,
    ERROR_TOKEN_ID,
    EngineRequest,
    FinishReason,
    SampledToken,
    TokenOutput,
)
from halfmoon.engine.request_check import RequestLimits
from halfmoon.engine.scheduling.block_chains import BlockChains
from halfmoon.engine.scheduling.layer_gate import LayerGate
from halfmoon.engine.scheduling.paused_sequences import PausedKV
from halfmoon.engine.scheduling.prefix_cache import CacheChanges, PrefixCache
from halfmoon.engine.scheduling.restore_order import Restore, RestoreOrder
from halfmoon.engine.scheduling.restore_watch import RestoreWatch
from halfmoon.engine.scheduling.schedule import Schedule, ScheduledSequence, SchedulerLimits
from halfmoon.engine.scheduling.scheduler import Scheduler
from halfmoon.engine.scheduling.sequence import Sequence, SequenceState
from halfmoon.engine.scheduling.sequence_blocks import CopyTokens
from halfmoon.engine.scheduling.sequence_queues import SequenceQueues
from halfmoon.engine.scheduling.spread_pool import Blocks
from halfmoon.engine.scheduling.step_counts import step_counts
from halfmoon.engine.step_result import StepResult
from halfmoon.errors import InvalidRequest, NoCapacity, NotFound
from halfmoon.policy.models.chunk_length import ChunkRule
from halfmoon.policy.models.learned_chunk_rule import LearnedChunkRule
from halfmoon.policy.models.measured_step import MeasuredStep
from halfmoon.policy.retries import retry_ms_when_full

_FAILURES: Mapping[int, FinishReason] = {ERROR_TOKEN_ID: "error", CONSTRAINT_TOKEN_ID: "constraint"}


@dataclass(frozen=True, slots=True)
class Step:
    """A step to compute: its schedule, its counts, and the watch to notify as layers complete."""

    schedule: Schedule
    counts: StepResult  # without outputs and times
    watch: LayerWatch | None


class EngineCore:
    """Owns the sequences by request id, from arrival to last token. Knows nothing of tensors and time.

    Steps follow each other: `begin_step`, then `end_step` with its tokens. In the middle of one others may begin and
    end, one after the other (`begin_nested`).
    """

    def __init__(
        self,
        pool: Blocks,
        limits: RequestLimits,
        step_limits: SchedulerLimits,
        root: Callable[[bytes], bytes] | None,
        finish_reason: Callable[[Sequence], FinishReason | None],
        paused_kv: PausedKV | None = None,
        copy_tokens: CopyTokens | None = None,
    ) -> None:
        """`root` is the prefix cache's. `finish_reason` returns why a sequence's newest token is its last, or None.

        paused_kv, copy_tokens: see `SequenceQueues`; with the latter the last, partial block of what was
        computed to its end is kept.
        """
        self.layout = limits.layout
        self.num_blocks = limits.num_blocks
        self.last_step_s = 0.0  # duration of the last non-empty step
        self._limits = limits
        self._finish_reason = finish_reason
        self._cache = PrefixCache(pool, self.layout.block_tokens, root)
        self._queues = SequenceQueues(self._cache, self.layout.block_tokens, step_limits, paused_kv, copy_tokens)
        self._scheduler = Scheduler(self._queues)
        self._keeps_ends = copy_tokens is not None
        self._kv_watch = KVWatch(self.layout)
        self._restores = RestoreWatch(self.layout.block_tokens)
        self._chains = BlockChains(self.layout.block_tokens)
        self._sequences: dict[str, Sequence] = {}
        self._num_added = 0
        self._num_looked_at = 0  # of these, when a step began or newcomers were last looked at

    def add(self, request: EngineRequest, on_kv: OnKV | None = None, order: RestoreOrder | None = None) -> None:
        """Queues a request. `on_kv` hears which KV of a prefill-only one is written, on this thread or the device's.

        With `order`, blocks behind the fence are not computed but awaited: `load_block`, `note_loaded` and
        `move_fence`. Raises InvalidRequest if the request can never run here.
        """
        sequence = self._admit(request, order)
        if on_kv is not None:
            self._kv_watch.add(request.request_id, on_kv, 0 if order is None else order.layers_at_once)
        self._queues.add(sequence)
        self._restores.tell(sequence)

    def follow_targets(self, rule: ChunkRule) -> None:
        """From the next step on prompts beside decodes are as long as the decodes' TBT targets leave.

        `rule` is that of the start; it follows the steps that `note_timed` tells of.
        """
        self._scheduler.chunk_rule = LearnedChunkRule(rule)

    def note_timed(self, result: StepResult) -> None:
        """Takes the times of a step that was not empty, from the caller that measures them."""
        self.last_step_s = result.duration_s
        self._scheduler.chunk_rule.note(
            MeasuredStep(
                result.num_decode_rows,
                result.decode_context_tokens,
                result.duration_s - result.layer_wait_s,
                result.num_prefill_tokens,
                result.num_prefill_pairs,
            )
        )

    def reserve(self, request: EngineRequest, on_kv: OnKV | None = None, now_s: float = 0.0) -> int:
        """Reserves blocks for a request whose KV comes from another worker, and pauses answers for it if need be.

        Returns how many of its leading tokens the prefix cache has, which stay until it ends: `kv_write` all the
        others, then `start`. `on_kv` is called, on this thread, if the request ends before it is started. Raises
        InvalidRequest if it can never run here, and NoCapacity if there is no room now.
        """
        sequence = self._admit(request)
        try:
            self._queues.reserve(sequence, now_s)
        except NoCapacity as error:
            self._forget(sequence)
            raise NoCapacity(error.message, retry_after_ms=self._retry_after_ms()) from None
        if on_kv is not None:
            self._kv_watch.add(request.request_id, on_kv)
        return sequence.num_cached

    def start(self, request_id: str, first_token_id: int, *, is_private: bool = False) -> None:
        """Moves a reserved request, whose KV is complete, to the running batch; `is_private`: no other finds its KV.

        The next token computed has position `len(output_token_ids) + 1`. Raises NotFound for a request that is not
        reserved, InvalidRequest for a token outside the vocabulary or one that ends the request.
        """
        sequence = self.find_in("reserved", request_id)
        self._limits.check_token_ids((first_token_id,), "first_token_id")
        self._queues.start(sequence, first_token_id, is_private=is_private)
        self._kv_watch.forget(request_id)
        if self._finish_reason(sequence) is not None:
            self._remove(sequence)
            raise InvalidRequest("the first token ends the request; there is nothing to decode", param="first_token_id")

    def cancel(self, request_id: str) -> bool:
        """Ends a request in any state and frees its blocks at once. Returns False if it is not here (any more)."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return False
        self._remove(sequence)
        return True

    def cancel_all(self) -> None:
        """Cancels every request."""
        for request_id in tuple(self._sequences):
            self.cancel(request_id)

    def note_loaded(self, request_id: str, loaded: SequenceOf[int], given_up: SequenceOf[int] = ()) -> None:
        """Marks blocks as loaded and verified, so that computing skips them; `given_up` blocks are computed here.

        Has no effect on blocks that are no longer awaited.
        """
        sequence = self._sequences.get(request_id)
        if sequence is None or not self._restores.note_loaded(sequence, loaded, given_up):
            return
        self._cache.insert(sequence)
        self._kv_watch.loaded(sequence)
        self._restores.tell(sequence)

    def move_fence(self, request_id: str, fence: int) -> int:
        """Moves the fence: blocks below it are computed, the others awaited. Returns the new fence.

        The fence never moves below computed blocks. Raises NotFound for a request that awaits no blocks.
        """
        return self._restores.move_fence(self.find(request_id), fence)

    def arrive_by_layer(self, request_id: str, gate: LayerGate) -> None:
        """Lets a step compute what is behind the awaited blocks while their layers arrive at `gate`.

        `load_block` writes them, and the step counts them as loaded. No effect on a request that awaits nothing.
        """
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._restores.arrive_by_layer(sequence, gate)

    def hold_cached(self, keys: SequenceOf[bytes]) -> list[int]:
        """Holds the blocks of the leading keys in the prefix cache until `let_cached_go`, and returns them."""
        return self._cache.hold(keys)

    def let_cached_go(self, blocks: SequenceOf[int]) -> None:
        """Ends a `hold_cached`."""
        self._cache.release(blocks)

    def forget_prefixes(self) -> CacheChanges:
        """Empties the prefix cache, except for blocks in use. Returns the changes: no step reports them."""
        self._cache.forget_idle()
        return self._cache.take_changes()

    def has_work(self) -> bool:
        """Whether there is work. A step may still be empty, while all work waits for blocks."""
        return self._queues.has_work()

    @property
    def allows_pauses(self) -> bool:
        """Whether any request is paused, or might be."""
        return self._queues.allows_pauses

    def begin_step(self, now_s: float = 0.0) -> Step:
        """Schedules the next step and its blocks. It is empty if there is no work, or all work waits for blocks."""
        return self._begin(self._scheduler.schedule(now_s))

    def begin_nested(self, outer: Schedule, left: float, num_nested: int, now_s: float = 0.0) -> Step:
        """Schedules what runs in the middle of a step, whose share `left` is to come; it may be empty.

        Looks at the prompts that came since the step began, or since the last call, once (`policy/nested_step.py`).
        num_nested: see `OuterStep`.
        """
        return self._begin(self._scheduler.nested(outer, left, num_nested, self._num_looked_at, now_s))

    def _begin(self, schedule: Schedule) -> Step:
        self._num_looked_at = self._num_added
        counts = step_counts(schedule, self._queues.pause_counts, self.layout.block_tokens)
        for sequence in self._queues.take_admitted():
            self._restores.tell(sequence)
        return Step(schedule, counts, self._kv_watch.begin(schedule.scheduled))

    def end_step(self, step: Step, sampled: list[SampledToken] | None) -> StepResult:
        """Books a computed step; the result has no times. `sampled` has each item's `num_drawn` tokens.

        None means that the step failed; its requests end with "error". A request that was cancelled during the step
        has no output.
        """
        if sampled is None:
            outputs = [self._fail(item.sequence) for item in step.schedule.scheduled]
        else:
            outputs = self._advance(step.schedule, sampled)
        changes = self._cache.take_changes()
        drafting = [item for item in step.schedule.scheduled if item.drafts]
        num_given = Counter(output.request_id for output in outputs) if drafting else Counter()
        return replace(
            step.counts,
            num_right_drafts=sum(max(num_given[item.sequence.request_id] - 1, 0) for item in drafting),
            outputs=tuple(outputs),
            stored_keys=changes.stored,
            evicted_keys=changes.evicted,
            chains=self._chains.take(),
        )

    def give_up_step(self, step: Step) -> None:
        """Forgets a step whose layers did not arrive. Its tokens are computed later; their blocks are still awaited."""
        for item in step.schedule.scheduled:
            self._restores.arrive_by_layer(item.sequence, None)
            self._kv_watch.taken_back(item.sequence)

    def stats(self) -> EngineStats:
        """Returns current counts. Read from another thread than `step`'s, they may be inconsistent."""
        running, waiting = self._queues.running, self._queues.waiting
        decoding = [sequence for sequence in running if sequence.is_decoding]
        return EngineStats(
            num_blocks=self.num_blocks,
            num_free_blocks=self._cache.num_available,
            num_cached_blocks=self._cache.num_cached,
            num_running=len(running),
            num_waiting=len(waiting),
            num_paused=len(self._queues.paused),
            num_reserved=self._queues.num_reserved,
            num_held=self._queues.num_held,
            num_waiting_tokens=sum(sequence.num_uncomputed for sequence in (*running, *waiting)),
            num_prefilling=len(running) - len(decoding),
            decode_context_tokens=sum(
                len(sequence.token_ids) - sequence.num_unseen(self.layout.block_tokens) for sequence in decoding
            ),
        )

    def check_integrity(self) -> None:
        """Asserts that block counts and the cache agree with each other."""
        self._cache.check_integrity()

    def find(self, request_id: str) -> Sequence:
        """Returns the request's sequence. Raises NotFound if it is not here (any more)."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            raise NotFound(f"request {request_id} is not here")
        return sequence

    def find_in(self, state: SequenceState, request_id: str) -> Sequence:
        """Does as `find`. Also raises NotFound if the sequence is in another state."""
        sequence = self.find(request_id)
        if sequence.state != state:
            raise NotFound(f"request {request_id} is not {state} here")
        return sequence

    def _admit(self, request: EngineRequest, order: RestoreOrder | None = None) -> Sequence:
        if request.request_id in self._sequences:
            raise InvalidRequest(f"request {request.request_id} is here already", param="request_id")
        sequence = Sequence(request, self._num_added, None if order is None else Restore(order))
        self._limits.check(sequence)
        if sequence.policy is not None:
            sequence.not_handed_over = sequence.policy.unseen(len(sequence.token_ids), self.layout.block_tokens)
        if order is not None:
            self._restores.add(request.request_id, order.on_progress)
        self._num_added += 1
        self._sequences[request.request_id] = sequence
        return sequence

    def _advance(self, schedule: Schedule, sampled: list[SampledToken]) -> list[TokenOutput]:
        """Updates counts, prefix cache, new tokens and finished requests."""
        tokens = iter(sampled)
        outputs = []
        for item in schedule.scheduled:
            drawn = list(islice(tokens, item.num_drawn))
            if item.sequence.state == "removed":
                continue
            if item.num_arriving:
                self._restores.note_loaded(item.sequence, item.arriving_blocks(self.layout.block_tokens), ())
            output = self._book(item.sequence, item.num_tokens - len(item.drafts), drawn[0] if drawn else None)
            if output is not None:
                outputs.append(output)
            if item.drafts and output is not None:
                further = self._book_drafts(item, drawn)
                last = replace((further or [output])[-1], num_drafts=len(item.drafts), num_right_drafts=len(further))
                outputs[-1:] = [output, *further[:-1], last] if further else [last]
        return outputs

    def _book_drafts(self, item: ScheduledSequence, drawn: list[SampledToken]) -> list[TokenOutput]:
        """Books what was drawn behind guesses, up to the first wrong one: the K and V of the others are written over.

        Each token is booked as a step of its own would have been.
        """
        outputs: list[TokenOutput] = []
        for draft, before, token in zip(item.drafts, drawn[:-1], drawn[1:], strict=True):
            if before.token_id != draft or item.sequence.state != "running":
                break
            output = self._book(item.sequence, 1, token)
            assert output is not None
            outputs.append(output)
        assert item.sequence.speculation is not None
        item.sequence.speculation.note(len(item.drafts), len(outputs))
        return outputs

    def _book(self, sequence: Sequence, num_tokens: int, token: SampledToken | None) -> TokenOutput | None:
        """Counts tokens as computed and appends the one that was drawn after them, if any."""
        sequence.num_computed += num_tokens
        sequence.skip_loaded(self.layout.block_tokens)
        self._restores.tell(sequence)
        has_new = self._cache.insert(sequence)
        self._queues.blocks.drop_unseen(sequence)
        self._kv_watch.advance(sequence)
        if token is None:
            return None
        self._chains.note(sequence, has_new)
        failed = _FAILURES.get(token.token_id)
        return self._fail(sequence, failed) if failed else self._append(sequence, token)

    def _append(self, sequence: Sequence, token: SampledToken) -> TokenOutput:
        position = sequence.num_output
        sequence.token_ids.append(token.token_id)
        reason = self._finish_reason(sequence)
        is_computed = reason is not None or sequence.request.prefill_only
        if sequence.request.keeps_partial or (self._keeps_ends and is_computed):
            self._cache.keep_partial(sequence)
        if sequence.request.keeps_partial:
            self._remove(sequence)
        elif sequence.request.prefill_only:
            self._queues.hold(sequence)
        elif reason is not None:
            self._remove(sequence)
        output = TokenOutput(sequence.request_id, token.token_id, position, reason, token.logprobs)
        if position or not (sequence.prompt_logprobs or sequence.pooled):
            return output
        return replace(output, prompt_logprobs=tuple(sequence.prompt_logprobs), embedding=tuple(sequence.pooled))

    def _fail(self, sequence: Sequence, reason: FinishReason = "error") -> TokenOutput:
        self._kv_watch.forget(sequence.request_id)  # its output reports the failure
        self._remove(sequence)
        return TokenOutput(sequence.request_id, ERROR_TOKEN_ID, sequence.num_output, reason)

    def _remove(self, sequence: Sequence) -> None:
        self._queues.remove(sequence)
        self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        del self._sequences[sequence.request_id]
        self._restores.forget(sequence.request_id)
        self._kv_watch.remove(sequence.request_id)

    def _retry_after_ms(self) -> int:
        """Estimates when the first running request makes room, at the pace of the last step."""
        return retry_ms_when_full(
            self.last_step_s,
            (sequence.sampling.max_tokens - sequence.num_output for sequence in self._queues.running),
        )
