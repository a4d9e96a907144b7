"""A worker's vLLM, from its start to its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from halfmoon.engine.checkpoint.checkpoint import Checkpoint
from halfmoon.engine.engine_facts import EngineFacts
from halfmoon.engine.request_check import RequestLimits
from halfmoon.engine.step_result import StepResult
from halfmoon.errors import ServiceFailed
from halfmoon.kv.keys import root_key
from halfmoon.vllm_engine.frontend.engine_arguments import VllmOptions
from halfmoon.vllm_engine.frontend.versions import check_vllm
from halfmoon.vllm_engine.messages import Keep, Report
from halfmoon.vllm_engine.reports import ReportListener
from halfmoon.vllm_engine.requests.vllm_engine import VllmEngine

if TYPE_CHECKING:
    from halfmoon.vllm_engine.frontend.event_reader import EventReader


UNSUPPORTED = {"pooling": "embeddings: a worker that generates with vLLM makes none; serve them by our own engine"}


class VllmHost:
    """Owns vLLM's processes from its creation, which takes minutes, until `running` ends."""

    profile = None  # the gateway learns from the steps that are reported

    def __init__(self, checkpoint: Checkpoint, options: VllmOptions, staging_bytes: int) -> None:
        """Raises Incompatible, InvalidRequest and ServiceFailed. Any thread."""
        check_vllm()
        from halfmoon.vllm_engine.frontend.async_llm import start_vllm

        self._listener = ReportListener(self._on_report, self._on_end)
        listener = self._listener
        self._started = start_vllm(
            options.arguments(),
            checkpoint.eos_token_ids,
            staging_bytes,
            listener.path,
            listener.events_endpoint,
            options.adapters,
        )
        self._checkpoint = checkpoint
        self._engine: VllmEngine | None = None
        started = self._started
        self.facts = EngineFacts(
            model=checkpoint.name,
            fingerprint=checkpoint.fingerprint,
            layout=started.memory.layout,
            context_tokens=min(started.context_tokens, started.num_blocks * started.memory.layout.block_tokens),
            num_blocks=started.num_blocks,
            num_readable_blocks=started.memory.num_blocks,
            step_tokens=started.step_tokens,
            chunk_tokens=started.step_tokens,
            max_running=started.max_running,
            device=f"vllm {started.device}",
            tensor_parallel=options.tensor_parallel,
            adapters=tuple(adapter.fingerprint for adapter in options.adapters),
        )

    def first_steps(self) -> Sequence[StepResult]:
        """Nothing is measured: only a worker that restores needs to know its speed."""
        return ()

    @asynccontextmanager
    async def running(
        self, on_step: Callable[[StepResult], None], on_death: Callable[[BaseException], None]
    ) -> AsyncIterator[VllmEngine]:
        """Serves requests while inside; vLLM has ended outside."""
        started, facts = self._started, self.facts
        limits = RequestLimits(
            started.vocab_size,
            facts.context_tokens,
            facts.num_blocks,
            facts.layout,
            UNSUPPORTED,
            "kv_policy needs our engine, not vLLM's",
        )
        eos = self._checkpoint.eos_token_ids
        engine = VllmEngine(
            started.source,
            started.memory,
            limits,
            eos,
            on_step,
            on_death,
            self._listener.drain,
            partial(root_key, facts.fingerprint, facts.layout),
            started.num_ranks,
            facts.fingerprint,
            facts.step_tokens,
            is_on_cpu=started.device == "cpu",
        )
        self._engine = engine
        self._listener.start()
        reader = self._event_reader(engine)
        try:
            await started.source.load_adapters()
            async with engine:
                yield engine
        finally:
            await asyncio.to_thread(reader.close)
            self._listener.close()
            await asyncio.to_thread(started.source.close)

    def _event_reader(self, engine: VllmEngine) -> EventReader:
        from halfmoon.vllm_engine.frontend.event_reader import EventReader

        loop = asyncio.get_running_loop()

        def on_events(events: Sequence[Any] | None) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(engine.note_blocks, events)

        return EventReader(self._listener.events_endpoint, on_events)

    def _on_report(self, report: Report) -> Keep | None:
        assert self._engine is not None
        return self._engine.handle(report)

    def _on_end(self) -> None:
        assert self._engine is not None
        self._engine.die(ServiceFailed("a process of vLLM ended; the worker's log has its last words"))
