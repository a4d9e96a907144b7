"""One worker's engine: computes requests on a model, and reads and writes their KV. No network, no asyncio.

Methods are called by one thread at a time, except `kv_write`, `kv_read` and others documented as "any thread".
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from ctypes import c_int
from dataclasses import replace
from functools import partial

from halfmoon.architectures.model_config import ModelConfig
from halfmoon.engine.assembly import assemble, kv_layout, most_context_tokens, with_chosen_host
from halfmoon.engine.checkpoint.checkpoint import Checkpoint
from halfmoon.engine.config import EngineConfig
from halfmoon.engine.device_path import check_device
from halfmoon.engine.engine_core import EngineCore, Step
from halfmoon.engine.engine_stats import QUIET_S
from halfmoon.engine.kv_memory.kv_access import KVAccess
from halfmoon.engine.kv_memory.kv_arena import KVArena
from halfmoon.engine.kv_memory.kv_budget import paused_budget_bytes
from halfmoon.engine.kv_memory.kv_by_ticket import KVByTicket
from halfmoon.engine.kv_memory.kv_watch import OnKV
from halfmoon.engine.kv_memory.paused_kv import HostCopies
from halfmoon.engine.model_runner import ModelRunner
from halfmoon.engine.models.weights import Progress
from halfmoon.engine.offload.runner import OffloadRunner
from halfmoon.engine.offload.tiers import TieredKV
from halfmoon.engine.parallel.runner import ParallelRunner
from halfmoon.engine.request import EngineRequest, SampledToken
from halfmoon.engine.request_check import RequestLimits
from halfmoon.engine.scheduling.block_pool import BlockPool
from halfmoon.engine.scheduling.interruptible_step import InterruptibleStep
from halfmoon.engine.scheduling.layer_gate import LayerLate
from halfmoon.engine.scheduling.schedule import SchedulerLimits
from halfmoon.engine.step_result import StagedWork, StepResult
from halfmoon.errors import ServiceFailed
from halfmoon.kv.device_bytes import KVPlace, KVSource
from halfmoon.kv.keys import root_key
from halfmoon.kv.kv_layout import KVSlice
from halfmoon.policy.models.gathering import gathering_pause_s
from halfmoon.policy.nested_step import nested_cost

logger = logging.getLogger(__name__)

PREFAULT_EVERY_S = 0.01  # until it is quiet; a page takes 0.3 ms, or 5 where a host gives memory slowly
_ONE_DEVICE_ONLY = {"pooling": "embeddings: not with several ranks, or with KV on the host"}


class Engine(EngineCore):
    """Computes the core's steps on a model. Owns the runner and the KV memory."""

    def __init__(self, checkpoint: Checkpoint, config: EngineConfig, on_progress: Progress | None = None) -> None:
        """Loads the weights, calling `on_progress(done_bytes, total_bytes)`.

        Raises Incompatible, and ServiceFailed if another rank's process ended. Call `close` when done.
        """
        check_device(config.device)
        self.checkpoint = checkpoint
        layout = kv_layout(checkpoint.model_config, config)
        self.config = config = with_chosen_host(checkpoint, config, layout)
        self._shares_cores = config.shares_cores
        most_tokens = most_context_tokens(checkpoint, config)
        self._runner, memory, self._weights = assemble(checkpoint, config, layout, on_progress)
        reached = memory if isinstance(memory, ParallelRunner) else KVByTicket(memory, layout)
        self._kv = KVAccess(reached)
        self.ranks = reached.ranks  # that pass KV on to those of other workers; None: they cannot
        self.context_tokens = min(most_tokens, memory.num_blocks * config.block_tokens)  # prompt and output
        self._memory = memory
        self._between_layers: Callable[[], None] | None = None
        self._asked = c_int()  # whether that is wanted: kernels read it
        self._running: InterruptibleStep | None = None  # that can be interrupted
        self._pool = memory.pool if isinstance(memory, TieredKV | ParallelRunner) else BlockPool(memory.num_blocks)
        super().__init__(
            self._pool,
            RequestLimits(
                checkpoint.model_config.vocab_size,
                most_tokens,
                memory.num_blocks,
                layout,
                {} if isinstance(self._runner, ModelRunner) else _ONE_DEVICE_ONLY,
                _why_no_policy(checkpoint.model_config, config),
            ),
            SchedulerLimits(
                config.step_tokens,
                config.prefill_chunk_tokens,
                config.max_running,
                config.speculation == "ngram",
                None if config.offload is not None else checkpoint.model_config.longest_window,
            ),
            partial(root_key, checkpoint.fingerprint, layout) if config.prefix_cache else None,
            lambda sequence: sequence.finish_reason(checkpoint.eos_token_ids),
            HostCopies(memory, layout, paused_budget_bytes(config, memory.num_blocks * layout.block_bytes)),
            memory.copy_tokens if isinstance(memory, KVArena) else None,
        )

    def reserve(self, request: EngineRequest, on_kv: OnKV | None = None, now_s: float | None = None) -> int:
        """See `EngineCore.reserve`; None: now."""
        return super().reserve(request, on_kv, time.monotonic() if now_s is None else now_s)

    def cancel(self, request_id: str) -> bool:
        """See `EngineCore.cancel`. Raises StepRuns in the middle of a step of the request."""
        if self._running is not None:
            self._running.check_absent(request_id)
        return super().cancel(request_id)

    def kv_write(self, request_id: str, part: KVSlice, payload: KVSource) -> None:
        """Writes canonical KV bytes `[layers, 2, kv_heads, num_tokens, head_dim]` of a reserved request.

        May run on any thread. Raises NotFound for a request that is not, or no longer, reserved, InvalidRequest for a
        wrong size or range, or tokens that `reserve` found here.
        """
        self._kv.write(self.find(request_id), part, payload)

    def kv_read(self, request_id: str, part: KVSlice, out: KVPlace | None = None) -> memoryview:
        """Reads canonical KV bytes of a prefill-only request until it is cancelled, as far as they are written.

        Copies them to `out`, if given. May run on any thread, during a step that computes the rest. Raises NotWritten
        for KV not computed yet, or not recomputed after a preemption; NotFound for a request that is absent or not
        prefill-only; InvalidRequest for a wrong range.
        """
        return self._kv.read(self.find(request_id), part, out)

    @property
    def loads_by_layer(self) -> bool:
        """Whether a step can wait for layers: not over several ranks, with KV on the host, or on a GPU (not tried)."""
        return isinstance(self._runner, ModelRunner) and self._runner.is_on_cpu

    @property
    def can_be_interrupted(self) -> bool:
        """Whether others can run between the layers of a step: where it could wait for one, and weights stay here."""
        return self.loads_by_layer and self._weights is None

    def load_block(self, request_id: str, block: int, payload: KVSource, layers: range | None = None) -> None:
        """Writes the canonical KV bytes of one block behind the fence of a request added with an order. Any thread.

        Of all layers or some successive ones.
        They count from `note_loaded` on. Raises NotFound if the block is not, or no longer, awaited.
        """
        self._kv.load(self.find(request_id), block, self.layout, payload, layers)

    def read_block(self, block: int, layers: range | None = None) -> memoryview:
        """Reads the canonical KV bytes of a held block, of all layers or of some successive ones. Any thread."""
        return self._kv.read_block(block, self.layout, layers)

    def prefault_pause_s(self, idle_s: float) -> float | None:
        """How long to wait before the next `prefault`, `idle_s` after the last step; None: until something changes.

        Where others compute on these cores, for a request that has its place here or with what was computed here, they
        come first.
        """
        if not self._shares_cores:
            return 0.0
        if self._queues.num_reserved:
            return None
        return 0.0 if idle_s > QUIET_S else PREFAULT_EVERY_S

    def prefault(self) -> bool:
        """Has some of the KV memory ready that comes next; returns whether there is more to do. For idle time."""
        memory, pool = self._memory, self._pool
        return isinstance(memory, KVArena) and isinstance(pool, BlockPool) and memory.prefault(pool.num_ever_used)

    def pause_s(self) -> float:
        """How long the next step may wait, from the end of the last one, for answers on their way; 0: not at all."""
        running = self._queues.running
        if not self._shares_cores or self._queues.waiting or not all(sequence.is_decoding for sequence in running):
            return 0.0
        targets_s = (sequence.request.tbt_target_s for sequence in running)
        return gathering_pause_s(self.last_step_s, len(running), self._queues.num_reserved, targets_s)

    def step(self) -> StepResult:
        """Runs one step. A failure inside it ends its requests with "error"; the engine goes on.

        If one of several ranks fails, the engine ends with ServiceFailed. A step that samples no tokens returns when
        this rank has finished it; later stages may still compute.
        """
        started = time.perf_counter()
        step = self.begin_step(time.monotonic())
        if not step.schedule.scheduled:
            return step.counts
        if self._between_layers is None or not step.schedule.can_nest:
            return self._compute(step, started)
        self._running = InterruptibleStep(step.schedule, self.layout.num_layers, self._between_layers, self._asked)
        try:
            return self._compute(step, started, self._running)
        finally:
            self._running = None

    def call_between_layers(self, call: Callable[[], None]) -> None:
        """Calls `call` after an `interrupt` before the next layer of a step of prompts, where the engine can.

        Then, `nested_step` may be called, and all methods but `step`; `cancel` may raise StepRuns.
        """
        if self.can_be_interrupted:
            self._between_layers = call

    def interrupt(self) -> None:
        """Asks for a call between layers, of this step or the next one. Any thread."""
        self._asked.value = 1

    def nested_step(self) -> StepResult | None:
        """Runs prompts that came during the running step in the middle of it (`policy/nested_step.py`), if any do."""
        outer = self._running
        assert outer is not None, "no step can be interrupted"
        started = time.perf_counter()
        step = self.begin_nested(outer.schedule, outer.left, outer.num_nested, time.monotonic())
        if not step.schedule.scheduled:
            return None
        outer.num_nested += nested_cost(step.schedule.num_tokens, outer.schedule.num_tokens)
        return replace(self._compute(step, started), is_nested=True)

    def _compute(self, step: Step, started: float, running: InterruptibleStep | None = None) -> StepResult:
        scheduled = step.schedule.scheduled
        gates = [item.gate for item in scheduled if item.gate is not None]
        sampled: list[SampledToken] | None = None
        try:
            if isinstance(self._runner, ModelRunner):
                sampled = self._runner.run(scheduled, step.watch, running)
            else:
                sampled = self._runner.run(scheduled, step.watch)
        except ServiceFailed:
            raise
        except LayerLate:
            self.give_up_step(step)
            return self.step()  # nothing waits for a layer again before it is asked to
        except Exception:
            if running is not None and running.error is not None:
                raise
            logger.exception("step_failed", extra={"num_requests": len(scheduled)})
        result = self.end_step(step, sampled)
        interrupted_s = 0.0 if running is None else running.interrupted_s
        timed = replace(
            result,
            duration_s=time.perf_counter() - started - interrupted_s,
            interrupted_s=interrupted_s,
            ended_s=time.monotonic(),
            layer_wait_s=sum(gate.waited_s for gate in gates),
            num_spread_tokens=self._runner.num_spread_tokens if isinstance(self._runner, ParallelRunner) else 0,
            staged=self._staged_work(),
        )
        self.note_timed(timed)
        return timed

    def _staged_work(self) -> StagedWork:
        staged = StagedWork()
        if isinstance(self._runner, OffloadRunner | ParallelRunner):
            staged = self._runner.take_work()
        if self._weights is None:
            return staged
        num_bytes, wait_s = self._weights.take_work()
        return replace(staged, weight_bytes=num_bytes, weight_wait_s=wait_s)

    def check_ranks(self) -> None:
        """Raises ServiceFailed, with the reason, if another rank's process ended."""
        if isinstance(self._runner, ParallelRunner):
            self._runner.check()

    def call_on_failure(self, on_failure: Callable[[], None]) -> None:
        """Calls `on_failure`, on any thread, when another rank's process ends on its own, even while idle."""
        if isinstance(self._runner, ParallelRunner):
            self._runner.call_on_failure(on_failure)

    def close(self) -> None:
        """Ends the other ranks' processes. Idempotent; afterwards nothing can be computed or copied."""
        if isinstance(self._runner, ParallelRunner | OffloadRunner):
            self._runner.close()
        if self._weights is not None:
            self._weights.close()


def _why_no_policy(model: ModelConfig, config: EngineConfig) -> str | None:
    """Why requests cannot have a `kv_policy` here; None: they can."""
    if config.offload is not None or config.sequence_parallel > 1:
        return "kv_policy: not with --offload-kv host, nor with --sequence-parallel"
    if any(window is not None for window in model.windows):
        return "kv_policy: this model's layers have windows of their own"
    return None
