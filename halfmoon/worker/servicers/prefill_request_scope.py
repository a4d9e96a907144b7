"""One request in a prefill worker's engine, from its arrival until its KV is elsewhere or it is detached."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack

from halfmoon.background import cancelled
from halfmoon.engine.kv_memory.kv_watch import OnKV
from halfmoon.errors import ConstraintFailed, HalfmoonError, NotFound
from halfmoon.kv.frame_plan import Written
from halfmoon.pb import prefill_pb2, types_pb2
from halfmoon.rpc.telemetry.spans import NO_SPAN, Span, current_span, reason_of, span_scope
from halfmoon.worker.servicers.request_phases import Phase
from halfmoon.worker.servicers.token_streams import FirstOutput
from halfmoon.worker.servicers.wire import prompt_logprob_message, request_from, token_message
from halfmoon.worker.serving_engine import ServingEngine
from halfmoon.worker.sharing.segment_loads import SegmentLoads
from halfmoon.worker.sharing.segments import Segments
from halfmoon.worker.state import WorkerState, now_s
from halfmoon.worker.store.holder import NamedHolder
from halfmoon.worker.store.restorer import Restorer
from halfmoon.worker.store.restoring import Restoring


class PrefillRequestScope:
    """Owns the request while inside. Leaving frees its blocks unless it was detached. `first` is its first token."""

    def __init__(
        self,
        engine: ServingEngine,
        state: WorkerState,
        generation: types_pb2.Generation,
        *,
        prefill_only: bool = True,
        held_tokens: int = 0,
        on_kv: OnKV | None = None,
        restorer: Restorer | None = None,
        sources: Sequence[NamedHolder] = (),
        must_load: bool = False,
        keeps_partial: bool = False,
        shares: prefill_pb2.PromptShares | None = None,
        called_s: float | None = None,
        span: Span | None = None,
    ) -> None:
        """Creates the scope; entering it adds the request to the engine. Raises InvalidRequest for unusable `shares`.

        The decode worker has the KV of the first `held_tokens`. `on_kv` is called as KV is written, as in
        `AsyncEngine.add`. `restorer` loads known prefixes from its store and `sources`; entering raises NotFound if it
        `must_load` and they have nothing to load, and `needed` raises Unavailable once they all fail.
        `keeps_partial`: see `EngineRequest`. `shares`: other workers compute parts of the prompt; a worker whose steps
        cannot wait for layers computes all of it. The request arrived at `called_s`, or now. Its spans are children of
        `span`, or of the current one.
        """
        self._engine = engine
        self._state = state
        self._generation = generation
        self._arrival_s = now_s()
        self._called_s = self._arrival_s if called_s is None else called_s
        self._request = request_from(
            generation,
            prefill_only=prefill_only,
            arrival_s=self._arrival_s,
            held_tokens=held_tokens,
            keeps_partial=keeps_partial,
        )
        self._on_kv = on_kv
        has_sources = restorer is not None and (bool(sources) or restorer.has_stores)
        sampling = self._request.sampling
        needs_all = sampling.num_prompt_logprobs is not None or sampling.pooling == "mean"
        needs_all = needs_all and not generation.output_token_ids
        segments = None
        if shares is not None and restorer is not None and restorer.engine.layer_loading is not None and not needs_all:
            num_tokens = len(self._request.prompt_token_ids) + len(self._request.output_token_ids)
            segments = Segments.read(shares, num_tokens, state.layout.block_tokens)
        self._segments = segments
        self._sharing = ExitStack()
        self._restorer = restorer if segments is not None or (has_sources and not needs_all) else None
        self._sources = sources
        self._must_load = must_load
        self._restoring: Restoring | SegmentLoads | None = None
        self._loading: asyncio.Task[None] | None = None
        self._kept = True
        self._span = span or current_span()
        self._restore_span = NO_SPAN
        self._asked_s = self._arrival_s  # when the store was asked
        self._decided_s = self._arrival_s
        self.first: asyncio.Future[FirstOutput] = state.router.expect_first(
            generation.request_id, generation.gateway_id
        )
        if not prefill_only:
            state.router.keep(generation)

    async def __aenter__(self) -> PrefillRequestScope:
        try:
            await self._add()
        except BaseException as error:
            self._sharing.close()
            self.first.cancel()
            self._state.router.forget(self._request.request_id)
            self._restore_span.end(error=reason_of(error))
            raise
        return self

    async def _add(self) -> None:
        if self._restorer is not None and self._segments is not None:
            self._restoring = self._shared(self._restorer, self._segments)
        elif self._restorer is not None:
            self._restoring = await self._plan(self._restorer)
        if self._restoring is None:
            if self._must_load:
                raise NotFound("no source has more of this prefix that is quicker to load than to compute")
            await self._engine.add(self._request, self._on_kv)
            return
        try:
            await self._restoring.add(self._on_kv)
        except BaseException:
            self._restoring.abandon()
            raise
        with span_scope(self._restore_span):
            self._loading = asyncio.create_task(self._restoring.run())

    def _shared(self, restorer: Restorer, segments: Segments) -> SegmentLoads:
        """Opens what this worker computes of the prompt to the others, whose segments it loads."""
        engine, request, keys = restorer.engine, self._request, restorer.keys(self._request)
        prompt = self._sharing.enter_context(self._state.shared_prompts.computing(request.request_id, keys))
        self._on_kv = _both(prompt.on_kv, self._on_kv)
        model = self._state.compute_rate.model
        return SegmentLoads(engine, restorer.metrics, request, keys, segments, restorer.holders, model)

    async def _plan(self, restorer: Restorer) -> Restoring | None:
        self._asked_s = now_s()
        self._restore_span = self._span.child("restore", self._asked_s)
        with span_scope(self._restore_span):
            restoring = await restorer.plan(self._request, self._sources)
        if restoring is not None:
            restoring.must_load = self._must_load
        self._decided_s = now_s()
        return restoring

    async def __aexit__(self, *exc: object) -> None:
        try:
            if self._loading is not None:
                await cancelled(self._loading)
        finally:  # the call may be cancelled while it waits
            self._sharing.close()
            if self._restoring is not None:
                self._restoring.abandon()  # a task that is cancelled before its first step does nothing
            if self._kept:
                self.first.cancel()
                self._state.router.forget(self._request.request_id)
                await asyncio.shield(self._engine.cancel(self._request.request_id))
        self._restore_span.end(error="ended before the first token")

    @property
    def needed(self) -> Sequence[asyncio.Task[None]]:
        """What must not fail, as nobody waits for what would be computed instead."""
        return [self._loading] if self._must_load and self._loading is not None else []

    def detach(self) -> None:
        """Leaves the request in the engine; it continues without this call."""
        self._kept = False

    def event(self, first: FirstOutput) -> prefill_pb2.PrefillEvent:
        """Builds the gateway's FirstToken. Raises HalfmoonError if the engine failed, ConstraintFailed."""
        if first.output.finish_reason == "constraint":
            raise ConstraintFailed
        if first.output.finish_reason == "error":
            raise HalfmoonError("the worker failed while computing this prompt: see its log")
        restoring, block_tokens = self._restoring, self._state.layout.block_tokens
        num_loaded = 0 if restoring is None else restoring.num_loaded_tokens
        num_shared = num_loaded if self._segments is not None else 0  # computed elsewhere at the same time
        num_from_workers = 0 if restoring is None else restoring.num_blocks_from_workers * block_tokens
        num_tokens = len(self._request.prompt_token_ids) + len(self._request.output_token_ids)
        self._state.note_prompt(num_tokens, first.num_cached_tokens, num_loaded, num_from_workers)
        queue = Phase("queue", self._arrival_s, max(self._arrival_s, first.began_s))
        restore = self._restored()
        if self._span.is_recording:
            restore.end(self._restore_span)
            for phase in (queue, *first.chunks):
                phase.record(self._span)
        restored = () if self._restorer is None else (restore,)
        event = prefill_pb2.PrefillEvent(
            first_token=prefill_pb2.FirstToken(
                token=token_message(first.output),
                num_cached_tokens=first.num_cached_tokens + num_loaded - num_shared,
                num_loaded_tokens=num_loaded - num_shared,
                num_shared_tokens=num_shared,
                queue_s=max(0.0, first.began_s - self._arrival_s),
                compute_s=first.ended_s - first.began_s,
                embedding=first.output.embedding,
                prompt_logprobs=map(prompt_logprob_message, first.output.prompt_logprobs),
                phases=[phase.message(self._called_s) for phase in (queue, *restored, *first.chunks)],
            )
        )
        self._state.router.note_first(self._generation, event.first_token)
        return event

    def _restored(self) -> Phase:
        """The restore phase, from asking the store to the last load, or to the decision to load nothing."""
        restoring = self._restoring
        if restoring is None:
            return Phase("restore", self._asked_s, self._decided_s)
        return Phase(
            "restore", self._asked_s, restoring.ended_s, restoring.num_loaded_tokens, restoring.num_planned_tokens
        )


def _both(first: OnKV, second: OnKV | None) -> OnKV:
    """A listener that notifies both."""

    def notify(written: Written | None) -> None:
        first(written)
        if second is not None:
            second(written)

    return notify
