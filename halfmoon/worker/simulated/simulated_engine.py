"""A `ServingEngine` without a model: the real engine core, with step times from a latency model. No torch.

It serves the worker's servicers like the real engine, so everything that a gateway or another worker sees follows the
protocol: reservations, transfers, block events, token streams, cancellation. Only KV and text are meaningless.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as SequenceOf
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TypeVar

from halfmoon.background import running
from halfmoon.engine.engine_core import EngineCore, Step
from halfmoon.engine.engine_stats import EngineStats
from halfmoon.engine.kv_memory.kv_access import NotWritten
from halfmoon.engine.kv_memory.kv_watch import OnKV
from halfmoon.engine.request import EngineRequest
from halfmoon.engine.request_check import RequestLimits
from halfmoon.engine.scheduling.block_pool import BlockPool
from halfmoon.engine.scheduling.prefix_cache import CacheChanges
from halfmoon.engine.scheduling.restore_order import RestoreOrder
from halfmoon.engine.scheduling.schedule import SchedulerLimits
from halfmoon.engine.step_result import StepResult
from halfmoon.errors import HalfmoonError, NotFound
from halfmoon.kv.codec import LOSSLESS, Codec, encoded_bytes
from halfmoon.kv.device_bytes import KVPlace, KVSource
from halfmoon.kv.kv_layout import KVDtype, KVLayout, KVSlice
from halfmoon.policy.models.chunk_length import ChunkRule
from halfmoon.policy.nested_step import nested_cost
from halfmoon.sim.answer_model import AnswerModel
from halfmoon.sim.latency_sources.worker_profile import WorkerProfile
from halfmoon.worker.simulated.simulated_links import SimulatedLinks
from halfmoon.worker.simulated.simulated_requests import SimulatedRequests

T = TypeVar("T")

_LEAST_STEP_S = 1e-6  # shortest reported step, since no real step takes zero time
_MAX_LAG_S = 0.05  # a delay beyond this is not caught up with: the machine is too slow for the model


_NO_LOGITS = "embeddings, prompt_logprobs, echo with logprobs: simulated workers have no model"
_NEED_A_MODEL = {
    "constraint": "simulated workers cannot follow a structure: they have no model; leave response_format, "
    "structured_outputs and forced tools out, or serve with real workers",
    "pooling": _NO_LOGITS,
    "num_prompt_logprobs": _NO_LOGITS,
}


class SimulatedEngine:
    """Owns the requests' answers and the pace of an `EngineCore`. Event-loop thread only.

    Steps follow each other without a gap: each ends when it is due, counted from the due end of the one before, so
    delays of late timers do not add up. A prompt's KV is reported as written when it would have crossed the modelled
    link; blocks that are loaded or read by others cross it, too.
    """

    def __init__(
        self,
        profile: WorkerProfile,
        layout: KVLayout,
        root: Callable[[bytes], bytes] | None,
        answers: AnswerModel,
        on_step: Callable[[StepResult], None],
        fingerprint: str = "",
    ) -> None:
        """`root` computes the parent of a tenant's first block keys from its salt; with None nothing is cached.

        fingerprint: of the model.
        """
        self.layout = layout
        self.fingerprint = fingerprint
        self.computes_while_loading = True
        self.keeps_partial_blocks = root is not None
        self.layer_loading: None = None  # a modelled step has no layers that could wait
        self.chunk_tokens = profile.chunk_tokens
        self.step_tokens = profile.max_batch_tokens
        self.links = SimulatedLinks(profile, time.monotonic)
        self._requests = SimulatedRequests(answers, self.links)
        self.num_blocks = profile.kv_tokens // layout.block_tokens
        self._profile = profile
        self._on_step = on_step
        self._core = EngineCore(
            BlockPool(self.num_blocks),
            RequestLimits(answers.vocab_size, profile.context_tokens, self.num_blocks, layout, _NEED_A_MODEL),
            SchedulerLimits(profile.max_batch_tokens, profile.chunk_tokens, profile.max_running),
            root,
            self._requests.finish_reason,
        )
        if profile.follows_targets:
            self._core.follow_targets(ChunkRule(profile.prefill, profile.step))
        self._wake = asyncio.Event()
        self._came = asyncio.Event()  # a request, since a step that can be interrupted last looked
        self._is_stepping = False
        self._deferred: list[Callable[[], None]] = []  # until the step has ended

    @asynccontextmanager
    async def running(self) -> AsyncIterator[asyncio.Future[BaseException]]:
        """Runs steps while inside. Yields a future that resolves to the error that ends the stepping, if any."""
        death: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        async with running(self._run()) as stepping:
            stepping.add_done_callback(lambda task: _note_death(task, death))
            yield death

    async def add(self, request: EngineRequest, on_kv: OnKV | None = None, order: RestoreOrder | None = None) -> None:
        """See `AsyncEngine.add`. Raises InvalidRequest for requests that need a model."""
        on_link = None if on_kv is None else partial(self._requests.put_on_link, request.request_id, on_kv)
        self._core.add(request, on_link, order)
        self._requests.enter(request)
        self._wake.set()
        self._came.set()

    async def reserve(self, request: EngineRequest, on_kv: OnKV | None = None) -> int:
        """See `AsyncEngine.reserve`."""
        if self._core.allows_pauses:  # what pauses is in no step
            held_tokens = await self._before_next_step(lambda: self._core.reserve(request, on_kv, time.monotonic()))
        else:
            held_tokens = self._core.reserve(request, on_kv)
        self._requests.enter(request)
        return held_tokens

    async def start(self, request_id: str, first_token_id: int, *, is_private: bool = False) -> None:
        """See `AsyncEngine.start`."""
        self._core.start(request_id, first_token_id, is_private=is_private)
        self._wake.set()

    async def cancel(self, request_id: str) -> bool:
        """See `AsyncEngine.cancel`; does not wait for the end of a step."""
        self._requests.leave(request_id)
        self._wake.set()  # requests that wait for blocks may get some now
        return self._core.cancel(request_id)

    async def kv_write(
        self,
        request_id: str,
        part: KVSlice,
        payload: KVSource,
        codec: Codec = Codec.RAW,
        dtype: KVDtype | None = None,
    ) -> None:
        """See `AsyncEngine.kv_write`; the payload is dropped."""
        self._core.find_in("reserved", request_id)

    async def kv_read(
        self, request_id: str, part: KVSlice, out: KVPlace | None = None, codec: Codec = Codec.RAW
    ) -> memoryview:
        """See `AsyncEngine.kv_read`; the bytes are meaningless."""
        if not self._requests.is_held(request_id):
            raise NotFound(f"request {request_id} is not held here")
        num_sent = self._requests.num_sent(request_id)
        if part.token_end > num_sent:
            raise NotWritten(f"KV of {num_sent} tokens is written so far, not {part.token_end}")
        if isinstance(out, memoryview):
            return out
        shape = self.layout.shape(part.num_layers, part.num_tokens)
        num_bytes = encoded_bytes(Codec.RAW if codec in LOSSLESS else codec, shape, self.layout.dtype)
        return memoryview(bytes(num_bytes))

    async def load_block(self, request_id: str, block: int, payload: KVSource) -> None:
        """See `AsyncEngine.load_block`; the payload is dropped once the modelled link has brought the block."""
        self._check_awaited(request_id, block)
        await self.links.load(self.layout.block_tokens)
        self._check_awaited(request_id, block)

    def note_loaded(self, request_id: str, loaded: SequenceOf[int], given_up: SequenceOf[int] = ()) -> None:
        """See `AsyncEngine.note_loaded`."""
        self._before_next_step(partial(self._core.note_loaded, request_id, loaded, given_up))

    async def move_fence(self, request_id: str, fence: int) -> int:
        """See `AsyncEngine.move_fence`."""
        return await self._before_next_step(partial(self._core.move_fence, request_id, fence))

    async def forget_prefixes(self) -> CacheChanges:
        """See `AsyncEngine.forget_prefixes`."""
        return await self._before_next_step(self._core.forget_prefixes)

    @asynccontextmanager
    async def cached(self, keys: SequenceOf[bytes]) -> AsyncIterator[list[int]]:
        """See `AsyncEngine.cached`."""
        blocks: list[int] = []
        try:
            await self._before_next_step(lambda: blocks.extend(self._core.hold_cached(keys)))
            yield blocks
        finally:
            self._core.let_cached_go(blocks)
            self._wake.set()  # requests that wait for blocks may get some now

    async def read_block(self, block: int, layers: range | None = None) -> memoryview:
        """See `AsyncEngine.read_block`; the bytes are meaningless, and have left on the modelled link."""
        await self.links.read(self.layout.block_tokens)
        return memoryview(bytes(self.layout.block_bytes))

    def check_open(self) -> None:
        """Does nothing: a simulated engine is always open."""

    def stats_now(self) -> EngineStats:
        """See `AsyncEngine.stats_now`."""
        return self._core.stats()

    async def _run(self) -> None:
        due_s = time.monotonic()
        while True:
            step = self._core.begin_step(time.monotonic())
            if not step.schedule.scheduled and not step.schedule.num_preempted:
                self._wake.clear()
                await self._wake.wait()
                due_s = time.monotonic()
                continue
            seconds = self._seconds(step)
            due_s = max(due_s, time.monotonic() - _MAX_LAG_S) + seconds
            self._is_stepping = True
            interrupted_s = await self._until(due_s, step, seconds)
            due_s += interrupted_s
            result = replace(self._ended(step, seconds), interrupted_s=interrupted_s)
            self._is_stepping = False
            self._on_step(result)
            deferred, self._deferred = self._deferred, []
            for call in deferred:
                call()

    async def _until(self, due_s: float, step: Step, seconds: float) -> float:
        """Returns when a step of `seconds`, due at `due_s`, is over: the time of its nested steps, which run here."""
        num_nested, nested_s = 0, 0.0
        self._came.clear()
        while self._profile.nests_steps and step.schedule.can_nest:
            try:
                async with asyncio.timeout(max(due_s - time.monotonic(), 0.0)):
                    await self._came.wait()
            except TimeoutError:
                return nested_s
            self._came.clear()
            left = min((due_s - time.monotonic()) / max(seconds, _LEAST_STEP_S), 1.0)
            nested = self._core.begin_nested(step.schedule, left, num_nested, time.monotonic())
            if nested.schedule.scheduled:
                num_nested += nested_cost(nested.schedule.num_tokens, step.schedule.num_tokens)
                took_s = self._seconds(nested)
                await asyncio.sleep(took_s)
                self._on_step(replace(self._ended(nested, took_s), is_nested=True))
                due_s, nested_s = due_s + took_s, nested_s + took_s
        await asyncio.sleep(max(due_s - time.monotonic(), 0.0))
        return nested_s

    def _before_next_step(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """Calls once no step runs, as the real engine's thread does. The future has the result, or the error."""
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def complete() -> None:
            if done.cancelled():
                return
            try:
                done.set_result(call())
            except HalfmoonError as error:
                done.set_exception(error)

        if self._is_stepping:
            self._deferred.append(complete)
        else:
            complete()
        self._wake.set()
        return done

    def _check_awaited(self, request_id: str, block: int) -> None:
        sequence = self._core.find(request_id)
        if sequence.restore is None or not sequence.blocks or not sequence.restore.is_waited_for(block):
            raise NotFound(f"block {block} of request {request_id} is not, or no longer, to be loaded")

    def _seconds(self, step: Step) -> float:
        """Seconds of a step, in which chunks and decodes share one forward pass."""
        counts = step.counts
        return self._profile.latency.stage_s(
            counts.num_prefill_tokens, counts.num_prefill_pairs, counts.num_decode_seqs, counts.decode_context_tokens
        )

    def _ended(self, step: Step, seconds: float) -> StepResult:
        sampled = [self._requests.next_token(item.sequence) for item in step.schedule.scheduled if item.samples]
        result = self._core.end_step(step, sampled)
        for output in result.outputs:
            if output.finish_reason is not None and not self._requests.is_held(output.request_id):
                self._requests.leave(output.request_id)
        timed = replace(result, duration_s=max(seconds, _LEAST_STEP_S), ended_s=time.monotonic())
        self._core.note_timed(timed)
        return timed


def _note_death(task: asyncio.Task[None], death: asyncio.Future[BaseException]) -> None:
    if not task.cancelled() and not death.done():
        death.set_result(task.exception() or RuntimeError("the stepping ended"))
