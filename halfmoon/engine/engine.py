"""One worker's engine: requests in, tokens out, KV in and out. No network, no asyncio.

All methods belong to one thread at a time, but for `kv_write` and `kv_read`, which say when they may run beside it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from functools import partial

from halfmoon.engine.assembly import assemble, kv_layout, most_context_tokens
from halfmoon.engine.block_chains import BlockChains
from halfmoon.engine.block_pool import BlockPool
from halfmoon.engine.checkpoint import Checkpoint
from halfmoon.engine.config import EngineConfig
from halfmoon.engine.engine_stats import EngineStats
from halfmoon.engine.kv_access import KVAccess
from halfmoon.engine.kv_watch import KVWatch, OnKV
from halfmoon.engine.models.weights import Progress
from halfmoon.engine.offload.runner import OffloadRunner
from halfmoon.engine.offload.tiers import TieredKV
from halfmoon.engine.parallel.runner import ParallelRunner
from halfmoon.engine.prefix_cache import PrefixCache
from halfmoon.engine.request import EngineRequest, TokenOutput
from halfmoon.engine.request_check import RequestLimits
from halfmoon.engine.restore_watch import RestoreWatch
from halfmoon.engine.restoring import Restore, RestoreOrder
from halfmoon.engine.sampler import ERROR_TOKEN_ID, SampledToken
from halfmoon.engine.scheduler import Schedule, ScheduledSequence, Scheduler, SchedulerLimits
from halfmoon.engine.sequence import Sequence
from halfmoon.engine.step_counts import step_counts
from halfmoon.engine.step_result import StagedWork, StepResult
from halfmoon.errors import InvalidRequest, NoCapacity, NotFound, ServiceFailed
from halfmoon.kv.device_bytes import KVPlace, KVSource
from halfmoon.kv.keys import root_key
from halfmoon.policy.models.tbt_model import room_in_ms

logger = logging.getLogger(__name__)


class Engine:
    """Owns the sequences by request id; asks the scheduler what runs and the runner to run it."""

    def __init__(self, checkpoint: Checkpoint, config: EngineConfig, on_progress: Progress | None = None) -> None:
        """Loads the weights, telling `on_progress` (done_bytes, total_bytes).

        Raises Incompatible, and ServiceFailed when another rank's process ended. Call `close` when done with it.
        """
        self.checkpoint = checkpoint
        self.config = config
        self.layout = kv_layout(checkpoint.model_config, config)
        most_tokens = most_context_tokens(checkpoint, config)
        self._runner, memory = assemble(checkpoint, config, self.layout, on_progress)
        self._kv = KVAccess(memory)
        self._kv_watch = KVWatch(self.layout)
        self.num_blocks = memory.num_blocks
        self.context_tokens = min(most_tokens, self.num_blocks * config.block_tokens)  # of prompt and output
        self._limits = RequestLimits(checkpoint.model_config.vocab_size, most_tokens, self.num_blocks, self.layout)
        self._pool = memory.pool if isinstance(memory, TieredKV) else BlockPool(self.num_blocks)
        root = partial(root_key, checkpoint.fingerprint, self.layout) if config.prefix_cache else None
        self._cache = PrefixCache(self._pool, config.block_tokens, root)
        limits = SchedulerLimits(config.step_tokens, config.prefill_chunk_tokens, config.max_running)
        self._scheduler = Scheduler(self._cache, config.block_tokens, limits)
        self._sequences: dict[str, Sequence] = {}
        self._num_added = 0
        self._restores = RestoreWatch(self.layout.block_tokens)
        self._chains = BlockChains(self.layout.block_tokens)
        self._step_s = 0.0  # duration of the last step that computed something

    def add(self, request: EngineRequest, on_kv: OnKV | None = None, order: RestoreOrder | None = None) -> None:
        """Queues a request. `on_kv` hears what of a prefill-only one's KV is written, on this thread or the device's.

        With `order`, blocks behind the fence are not computed but waited for: `load_block`, `note_loaded` and
        `move_fence`. Raises InvalidRequest when it can never run here.
        """
        sequence = self._admit(request, order)
        if on_kv is not None:
            self._kv_watch.add(request.request_id, on_kv)
        self._scheduler.add(sequence)
        self._restores.tell(sequence)

    def reserve(self, request: EngineRequest, on_kv: OnKV | None = None) -> None:
        """Blocks for a request whose KV comes from another worker: `kv_write` it all, then `start`.

        `on_kv` hears, on this thread, when it is gone before it was started. Raises InvalidRequest when it can never
        run here and NoCapacity when there is no room now.
        """
        sequence = self._admit(request)
        try:
            self._scheduler.reserve(sequence)
        except NoCapacity as error:
            self._forget(sequence)
            raise NoCapacity(error.message, retry_after_ms=self._retry_after_ms()) from None
        if on_kv is not None:
            self._kv_watch.add(request.request_id, on_kv)

    def kv_write(
        self, request_id: str, layer_start: int, layer_end: int, token_start: int, num_tokens: int, payload: KVSource
    ) -> None:
        """Places canonical KV bytes `[layers, 2, kv_heads, num_tokens, head_dim]` of a reserved request.

        May run on any thread. Raises NotFound for a request that is not reserved (any more), InvalidRequest for a
        wrong size or range.
        """
        self._kv.write(self._find(request_id), layer_start, layer_end, token_start, num_tokens, payload)

    def kv_read(
        self,
        request_id: str,
        layer_start: int,
        layer_end: int,
        token_start: int,
        num_tokens: int,
        out: KVPlace | None = None,
    ) -> memoryview:
        """Canonical KV bytes of a prefill-only request until its `release`, as far as they are written.

        They are put into `out`, if given. May run on any thread, beside a step that computes the rest. Raises
        NotWritten for what is not computed yet or, after a preemption, again; NotFound for a request that is not here
        (any more) or not prefill-only, InvalidRequest for a wrong range.
        """
        return self._kv.read(self._find(request_id), layer_start, layer_end, token_start, num_tokens, out)

    def start(self, request_id: str, first_token_id: int) -> None:
        """All KV of a reserved request is in place: it joins the running batch.

        The next token computed has position `len(output_token_ids) + 1`. Raises NotFound for a request that is not
        reserved, InvalidRequest for a token outside the vocabulary or one that ends the request.
        """
        sequence = self._in_state(request_id, "reserved")
        self._limits.check_token_ids((first_token_id,), "first_token_id")
        self._scheduler.start(sequence, first_token_id)
        self._kv_watch.forget(request_id)
        if sequence.finish_reason(self.checkpoint.eos_token_ids) is not None:
            self._remove(sequence)
            raise InvalidRequest("the first token ends the request; there is nothing to decode", param="first_token_id")

    def cancel(self, request_id: str) -> bool:
        """Frees a request's blocks at once, in any state; no more outputs. False when it is not here (any more)."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return False
        self._remove(sequence)
        return True

    def cancel_all(self) -> None:
        """`cancel` for every request that is here."""
        for request_id in tuple(self._sequences):
            self.cancel(request_id)

    def load_block(self, request_id: str, block: int, payload: KVSource) -> None:
        """Canonical KV bytes of one block behind the fence of a request that was added with an order. Any thread.

        They count once `note_loaded` says so. Raises NotFound when the block is not waited for (any more).
        """
        self._kv.load(self._find(request_id), block, self.layout, payload)

    def note_loaded(self, request_id: str, loaded: SequenceOf[int], given_up: SequenceOf[int] = ()) -> None:
        """`loaded` were loaded, and are right: computing skips them; `given_up` are computed here.

        Where nobody waits for them any more it means nothing.
        """
        sequence = self._sequences.get(request_id)
        if sequence is None or not self._restores.note_loaded(sequence, loaded, given_up):
            return
        self._cache.insert(sequence)
        self._kv_watch.loaded(sequence)
        self._restores.tell(sequence)

    def move_fence(self, request_id: str, fence: int) -> int:
        """Blocks below `fence` are computed after all, the others waited for; gives where it is now.

        That is not below what is computed. Raises NotFound for a request that waits for nothing to be loaded.
        """
        return self._restores.move_fence(self._find(request_id), fence)

    def hold_cached(self, keys: SequenceOf[bytes]) -> list[int]:
        """Keeps the blocks of the leading keys that the prefix cache has, for `read_block`, until `let_cached_go`."""
        return self._cache.hold(keys)

    def read_block(self, block: int) -> memoryview:
        """Canonical KV bytes of a block that is held, all layers. Any thread."""
        return self._kv.read_block(block, self.layout)

    def let_cached_go(self, blocks: SequenceOf[int]) -> None:
        """Ends a `hold_cached`."""
        self._cache.release(blocks)

    def release(self, request_id: str) -> None:
        """Drops the KV of a prefill-only request that has its token. Raises NotFound."""
        self._remove(self._in_state(request_id, "held"))

    def forget_prefixes(self) -> None:
        """Empties the prefix cache, but for what requests use; nobody is told of what was in it."""
        self._cache.forget_idle()
        self._cache.take_changes()

    def has_work(self) -> bool:
        """Whether `step` could have something to compute. It computes nothing while all work waits for blocks."""
        return self._scheduler.has_work()

    def step(self) -> StepResult:
        """Runs one batch. A failure inside it ends its requests with "error"; the engine goes on.

        With several ranks a failure of one of them ends the engine: ServiceFailed. A step whose tokens nobody samples
        returns when this rank is done with it; later stages may still compute.
        """
        started = time.perf_counter()
        schedule = self._scheduler.schedule()
        if not schedule.scheduled:
            return StepResult(num_preempted=schedule.num_preempted)
        counts = step_counts(schedule)
        for item in schedule.scheduled:
            self._restores.tell(item.sequence)  # it may just have got its blocks
        try:
            sampled = self._runner.run(schedule.scheduled, self._kv_watch.begin(schedule.scheduled))
        except ServiceFailed:
            raise
        except Exception:
            logger.exception("step_failed", extra={"num_requests": len(schedule.scheduled)})
            outputs = [self._fail(item.sequence) for item in schedule.scheduled]
        else:
            outputs = self._advance(schedule, sampled)
        self._step_s = time.perf_counter() - started
        changes = self._cache.take_changes()
        return replace(
            counts,
            outputs=tuple(outputs),
            duration_s=self._step_s,
            ended_s=time.monotonic(),
            stored_keys=changes.stored,
            evicted_keys=changes.evicted,
            staged=self._runner.take_work() if isinstance(self._runner, OffloadRunner) else StagedWork(),
            chains=self._chains.take(),
        )

    def stats(self) -> EngineStats:
        """Counts as of now; from another thread than `step`'s they may be of two moments."""
        running, waiting = self._scheduler.running, self._scheduler.waiting
        return EngineStats(
            num_blocks=self.num_blocks,
            num_free_blocks=self._cache.num_available,
            num_cached_blocks=self._cache.num_cached,
            num_running=len(running),
            num_waiting=len(waiting),
            num_reserved=self._scheduler.num_reserved,
            num_held=self._scheduler.num_held,
            num_waiting_tokens=sum(sequence.num_uncomputed for sequence in (*running, *waiting)),
        )

    def check_ranks(self) -> None:
        """Raises ServiceFailed, with the reason, when another rank's process ended."""
        if isinstance(self._runner, ParallelRunner):
            self._runner.check()

    def call_on_failure(self, on_failure: Callable[[], None]) -> None:
        """`on_failure` is called, on any thread, when another rank's process ends on its own, even while idle."""
        if isinstance(self._runner, ParallelRunner):
            self._runner.call_on_failure(on_failure)

    def close(self) -> None:
        """Ends the other ranks' processes. Idempotent; afterwards nothing can be computed or copied."""
        if isinstance(self._runner, ParallelRunner | OffloadRunner):
            self._runner.close()

    def check_integrity(self) -> None:
        """Asserts that block counts and the cache agree with each other."""
        self._cache.check_integrity()

    def _admit(self, request: EngineRequest, order: RestoreOrder | None = None) -> Sequence:
        if request.request_id in self._sequences:
            raise InvalidRequest(f"request {request.request_id} is here already", param="request_id")
        sequence = Sequence(request, self._num_added, None if order is None else Restore(order))
        self._limits.check(sequence)
        if order is not None:
            self._restores.add(request.request_id, order.on_progress)
        self._num_added += 1
        self._sequences[request.request_id] = sequence
        return sequence

    def _advance(self, schedule: Schedule, sampled: list[SampledToken]) -> list[TokenOutput]:
        """Books what a step computed: counts, cache, new tokens, finished requests."""
        tokens = iter(sampled)
        outputs = []
        for item in schedule.scheduled:
            samples = item.samples
            item.sequence.num_computed += item.num_tokens
            item.sequence.skip_loaded(self.layout.block_tokens)
            self._restores.tell(item.sequence)
            has_new = self._cache.insert(item.sequence)
            self._kv_watch.advance(item.sequence)
            if samples:
                self._chains.note(item.sequence, has_new)
                token = next(tokens)
                failed = token.token_id == ERROR_TOKEN_ID
                outputs.append(self._fail(item.sequence) if failed else self._append(item, token))
        return outputs

    def _append(self, item: ScheduledSequence, token: SampledToken) -> TokenOutput:
        sequence = item.sequence
        position = sequence.num_output
        sequence.token_ids.append(token.token_id)
        reason = sequence.finish_reason(self.checkpoint.eos_token_ids)
        if sequence.request.prefill_only:
            self._scheduler.hold(sequence)
        elif reason is not None:
            self._remove(sequence)
        return TokenOutput(sequence.request_id, token.token_id, position, reason, token.logprobs)

    def _fail(self, sequence: Sequence) -> TokenOutput:
        self._kv_watch.forget(sequence.request_id)  # its output says so
        self._remove(sequence)
        return TokenOutput(sequence.request_id, ERROR_TOKEN_ID, sequence.num_output, "error")

    def _remove(self, sequence: Sequence) -> None:
        self._scheduler.remove(sequence)
        self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        del self._sequences[sequence.request_id]
        self._restores.forget(sequence.request_id)
        self._kv_watch.remove(sequence.request_id)

    def _find(self, request_id: str) -> Sequence:
        sequence = self._sequences.get(request_id)
        if sequence is None:
            raise NotFound(f"request {request_id} is not here")
        return sequence

    def _in_state(self, request_id: str, state: str) -> Sequence:
        sequence = self._find(request_id)
        if sequence.state != state:
            raise NotFound(f"request {request_id} is not {state} here")
        return sequence

    def _retry_after_ms(self) -> int:
        """When the first running request will have made room, at the pace of the last step."""
        return room_in_ms(self._step_s, (one.sampling.max_tokens - one.num_output for one in self._scheduler.running))
