"""A `ServingEngine` without a model: a modelled engine in real time. No torch.

It answers the worker's servicers as the real one does, so everything that a gateway or another worker sees is the
protocol's own: reservations, transfers, block events, token streams, cancellation. Only KV and text mean nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from halfmoon.background import running
from halfmoon.engine.engine_stats import EngineStats
from halfmoon.engine.kv_access import NotWritten
from halfmoon.engine.kv_watch import OnKV
from halfmoon.engine.request import EngineRequest, FinishReason, TokenLogprobs, TokenOutput
from halfmoon.engine.request_check import RequestLimits
from halfmoon.engine.sequence import Sequence
from halfmoon.engine.step_result import StepResult
from halfmoon.errors import Incompatible, InvalidRequest, NotFound
from halfmoon.kv.codec import Codec, encoded_bytes
from halfmoon.kv.device_bytes import KVPlace, KVSource
from halfmoon.kv.frame_plan import Written
from halfmoon.kv.keys import block_keys
from halfmoon.kv.kv_layout import KVDtype, KVLayout
from halfmoon.rpc.transport.limiter import LinkLimiter
from halfmoon.sim.modelled_engine import ModelledEngine
from halfmoon.sim.modelled_sequence import ModelledRequest, ModelledToken
from halfmoon.sim.modelled_step import StepOutcome
from halfmoon.worker.answer_model import AnswerModel

_LEAST_STEP_S = 1e-6  # as reported: nothing is measured in no time
_MAX_LAG_S = 0.05  # steps that are this late are not caught up with: the machine is too slow for the model


@dataclass(slots=True)
class _Entry:
    """One request that is here, and how much of its KV has crossed the modelled link."""

    request: EngineRequest
    num_output: int
    on_kv: OnKV | None
    num_queued: int = 0  # tokens whose KV was put on the link
    num_sent: int = 0  # tokens whose KV has crossed it


class SimulatedEngine:
    """Owns the requests' answers and the pace of a modelled engine. Event-loop thread only.

    Steps follow each other without a gap: one ends when it is due, counted from the due end of the one before, so
    timers that fire late do not add up. A prompt's KV is told as written when it would have crossed the modelled link.
    """

    def __init__(
        self,
        modelled: ModelledEngine,
        layout: KVLayout,
        root: Callable[[bytes], bytes] | None,
        answers: AnswerModel,
        on_step: Callable[[StepResult], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`root` gives the parent of a tenant's first block keys by its salt; with None nothing is cached."""
        profile = modelled.profile
        self.layout = layout
        self._modelled = modelled
        self._root = root
        self._answers = answers
        self._on_step = on_step
        self._clock = clock
        self._limits = RequestLimits(answers.vocab_size, profile.context_tokens, modelled.blocks.num_blocks, layout)
        self._link = LinkLimiter(profile.link_bytes_per_s or None, profile.link_latency_s)
        self._entries: dict[str, _Entry] = {}
        self._wake = asyncio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[asyncio.Future[BaseException]]:
        """Steps while inside. What is given resolves to what killed the stepping, if anything does."""
        death: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        async with running(self._run()) as stepping:
            stepping.add_done_callback(lambda task: _note_death(task, death))
            yield death

    async def add(self, request: EngineRequest, on_kv: OnKV | None = None) -> None:
        """As `AsyncEngine.add`. Raises Incompatible for what needs a model."""
        tokens = (*request.prompt_token_ids, *request.output_token_ids)
        entry = self._checked(request, on_kv)
        self._modelled.add(_modelled(request, entry.num_output, self._keys(request.tenant_salt, tokens)))
        self._entries[request.request_id] = entry
        self._wake.set()

    async def reserve(self, request: EngineRequest, on_kv: OnKV | None = None) -> None:
        """As `AsyncEngine.reserve`."""
        entry = self._checked(request, on_kv)
        self._modelled.reserve(_modelled(request, entry.num_output, ()))
        self._entries[request.request_id] = entry

    async def start(self, request_id: str, first_token_id: int) -> None:
        """As `AsyncEngine.start`."""
        self._limits.check_token_ids((first_token_id,), "first_token_id")
        self._modelled.start(request_id)
        self._entries[request_id].on_kv = None
        self._wake.set()

    async def cancel(self, request_id: str) -> bool:
        """As `AsyncEngine.cancel`."""
        entry = self._entries.pop(request_id, None)
        was_here = self._modelled.cancel(request_id)
        if entry is not None and entry.on_kv is not None:
            entry.on_kv(None)
        self._wake.set()  # who waits for blocks may have some now
        return was_here

    async def kv_write(
        self,
        request_id: str,
        layer_start: int,
        layer_end: int,
        token_start: int,
        num_tokens: int,
        payload: KVSource,
        codec: Codec = Codec.RAW,
        dtype: KVDtype | None = None,
    ) -> None:
        """As `AsyncEngine.kv_write`; what arrives is dropped."""
        if not self._modelled.has(request_id, "reserved"):
            raise NotFound(f"request {request_id} is not reserved here")

    async def kv_read(
        self,
        request_id: str,
        layer_start: int,
        layer_end: int,
        token_start: int,
        num_tokens: int,
        out: KVPlace | None = None,
        codec: Codec = Codec.RAW,
    ) -> memoryview:
        """As `AsyncEngine.kv_read`, of bytes without a meaning."""
        entry = self._entries.get(request_id)
        if entry is None or not entry.request.prefill_only:
            raise NotFound(f"request {request_id} is not held here")
        if token_start + num_tokens > entry.num_sent:
            raise NotWritten(f"KV of {entry.num_sent} tokens is written so far, not {token_start + num_tokens}")
        if isinstance(out, memoryview):
            return out
        shape = self.layout.shape(layer_end - layer_start, num_tokens)
        return memoryview(bytes(encoded_bytes(codec, shape, self.layout.dtype)))

    def check_open(self) -> None:
        """It is always open."""

    def stats_now(self) -> EngineStats:
        """As `AsyncEngine.stats_now`."""
        modelled = self._modelled
        return EngineStats(
            num_blocks=modelled.blocks.num_blocks,
            num_free_blocks=modelled.blocks.num_available,
            num_cached_blocks=modelled.blocks.num_known,
            num_running=modelled.num_running,
            num_waiting=modelled.num_waiting,
            num_reserved=modelled.num_reserved,
            num_held=modelled.num_held,
            num_waiting_tokens=modelled.num_waiting_tokens,
        )

    async def _run(self) -> None:
        due_s = self._clock()
        while True:
            step = self._modelled.begin_step()
            if step is None:
                self._wake.clear()
                await self._wake.wait()
                due_s = self._clock()
                continue
            due_s = max(due_s, self._clock() - _MAX_LAG_S) + step.seconds
            await asyncio.sleep(max(due_s - self._clock(), 0.0))
            outcome = self._modelled.end_step(step)
            self._tell_written(outcome)
            self._on_step(self._result(outcome))

    def _keys(self, salt: bytes, tokens: tuple[int, ...]) -> tuple[bytes, ...]:
        return () if self._root is None else tuple(block_keys(self._root(salt), tokens, self.layout.block_tokens))

    def _checked(self, request: EngineRequest, on_kv: OnKV | None) -> _Entry:
        sampling = request.sampling
        if sampling.constraint is not None:
            raise Incompatible("a simulated worker cannot follow a structure: it has no model", param="constraint")
        if request.request_id in self._entries:
            raise InvalidRequest(f"request {request.request_id} is here already", param="request_id")
        self._limits.check(Sequence(request, 0))
        num_output = self._answers.num_tokens(
            sampling.seed, sampling.max_tokens, sampling.min_tokens, ignore_eos=sampling.ignore_eos
        )
        for position in range(sampling.min_tokens, num_output) if sampling.stop_token_ids else ():
            if self._token_id(request, position) in sampling.stop_token_ids:
                num_output = position + 1
                break
        return _Entry(request, max(num_output, len(request.output_token_ids) + 1), on_kv)

    def _token_id(self, request: EngineRequest, position: int) -> int:
        return self._answers.token_id(request.sampling.seed, position, request.prompt_token_ids)

    def _tell_written(self, outcome: StepOutcome) -> None:
        """KV leaves as it is computed, what the prefix cache had with the first of it; the link takes its time."""
        for request_id, num_tokens in outcome.computed.items():
            entry = self._entries.get(request_id)
            if entry is None or entry.on_kv is None or num_tokens <= entry.num_queued:
                continue
            num_bytes = (num_tokens - entry.num_queued) * self._modelled.profile.kv_token_bytes
            entry.num_queued = num_tokens
            now_s = self._clock()
            wait_s = self._link.arrival_s(num_bytes, now_s) - now_s
            if wait_s > 0:
                asyncio.get_running_loop().call_later(wait_s, self._tell, entry, num_tokens)
            else:
                self._tell(entry, num_tokens)

    def _tell(self, entry: _Entry, num_tokens: int) -> None:
        """Timers of one moment fire in any order: KV is never taken back."""
        is_here = self._entries.get(entry.request.request_id) is entry
        if is_here and entry.on_kv is not None and num_tokens > entry.num_sent:
            entry.num_sent = num_tokens
            entry.on_kv(Written(num_tokens))

    def _result(self, outcome: StepOutcome) -> StepResult:
        return StepResult(
            outputs=tuple(self._output(token) for token in outcome.tokens),
            num_prefill_tokens=outcome.num_prefill_tokens,
            num_prefill_pairs=outcome.num_prefill_pairs,
            num_decode_seqs=outcome.num_decodes,
            context_tokens=outcome.context_tokens,
            decode_context_tokens=outcome.decode_context_tokens,
            num_preempted=outcome.num_preempted,
            duration_s=max(outcome.seconds, _LEAST_STEP_S),
            ended_s=self._clock(),
            num_cached_tokens=outcome.began,
            num_computed_tokens=outcome.chunks,
            stored_keys=outcome.stored,
            evicted_keys=outcome.evicted,
        )

    def _output(self, token: ModelledToken) -> TokenOutput:
        entry = self._entries[token.request_id]
        request, reason = entry.request, None
        if token.is_last:
            reason = _finish_reason(request, token.position)
            if not request.prefill_only:
                del self._entries[token.request_id]
        token_id = self._token_id(request, token.position)
        logprobs = None if request.sampling.num_top_logprobs is None else TokenLogprobs(0.0, ())
        return TokenOutput(token.request_id, token_id, token.position, reason, logprobs)


def _finish_reason(request: EngineRequest, position: int) -> FinishReason:
    return "length" if position + 1 >= request.sampling.max_tokens else "stop"


def _modelled(request: EngineRequest, num_output: int, keys: tuple[bytes, ...]) -> ModelledRequest:
    return ModelledRequest(
        request.request_id,
        len(request.prompt_token_ids),
        num_output,
        len(request.output_token_ids),
        keys,
        request.priority,
        request.prefill_only,
    )


def _note_death(task: asyncio.Task[None], death: asyncio.Future[BaseException]) -> None:
    if not task.cancelled() and not death.done():
        death.set_result(task.exception() or RuntimeError("the stepping ended"))
