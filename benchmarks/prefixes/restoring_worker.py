"""A prefill worker with the demo model in this process and a store in another. Used by restore and second_turn."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Literal, NamedTuple

from halfmoon.background import running
from halfmoon.engine.async_engine import AsyncEngine
from halfmoon.engine.checkpoint.checkpoint import prepare_checkpoint
from halfmoon.engine.config import EngineConfig
from halfmoon.engine.engine import Engine
from halfmoon.engine.warm_up_steps import warm_up_steps
from halfmoon.pb import gateway_pb2, types_pb2
from halfmoon.policy.models.latency import PrefillModel
from halfmoon.rpc.store.kvstore_client import KVStoreClient
from halfmoon.rpc.transport.link import LinkSettings
from halfmoon.worker.main import store_writer
from halfmoon.worker.membership.block_feed import CachedBlocks
from halfmoon.worker.membership.compute_rate import ComputeRate
from halfmoon.worker.metrics import WorkerMetrics
from halfmoon.worker.servicers.prefill_request_scope import PrefillRequestScope
from halfmoon.worker.state import WorkerState
from halfmoon.worker.store.chain_queue import ChainQueue
from halfmoon.worker.store.holder import NamedHolder
from halfmoon.worker.store.restorer import Restorer
from halfmoon.worker.store.source_links import HolderKind, SourceLinks

Method = Literal["compute", "load", "restore"]

_VOCABULARY = range(1000, 30000)


class Restored(NamedTuple):
    """The first token of one prompt, and how it was obtained."""

    ttft_s: float
    token_id: int
    num_loaded_tokens: int


class _SlowCompute(ComputeRate):
    """A compute rate so slow that everything is loaded."""

    @property
    def model(self) -> PrefillModel:
        return PrefillModel(0.0, 1e6, 0.0)


class Worker:
    """Owns the engine and its connections to holders."""

    def __init__(self, engine: AsyncEngine, state: WorkerState, metrics: WorkerMetrics) -> None:
        self.engine = engine
        self.state = state
        self._metrics = metrics
        self._measured = state.compute_rate
        self._num_requests = 0
        # Each has learned the speed of its link.
        self._restorers: dict[tuple[NamedHolder, float | None, bool], tuple[SourceLinks, Restorer]] = {}

    async def prefill(
        self, prompt: Sequence[int], restorer: Restorer | None, sources: Sequence[NamedHolder] = ()
    ) -> Restored:
        """Obtains the first token of `prompt`."""
        began_s = time.perf_counter()
        generation = self._generation(prompt)
        async with PrefillRequestScope(
            self.engine, self.state, generation, restorer=restorer, sources=sources
        ) as scope:
            first = await scope.first
            ttft_s = time.perf_counter() - began_s
            event = scope.event(first).first_token
        return Restored(ttft_s, event.token.token_id, event.num_loaded_tokens)

    async def restore(
        self,
        prompt: Sequence[int],
        address: str,
        mbps: float | None,
        method: Method,
        kind: HolderKind = "store",
        *,
        may_load_by_layer: bool = True,
    ) -> Restored:
        """Obtains the first token of `prompt` with an empty prefix cache, from a store or from another worker."""
        holder = NamedHolder(address, kind)
        await self.forget()
        self.state.compute_rate = _SlowCompute() if method == "load" else self._measured
        try:
            if method == "compute":
                return await self.prefill(prompt, None)
            restorer = self._restorer(holder, mbps, may_load_by_layer)
            return await self.prefill(prompt, restorer, [holder] if kind == "worker" else ())
        finally:
            self.state.compute_rate = self._measured

    async def aclose(self) -> None:
        """Closes the connections to holders."""
        for links, _ in self._restorers.values():
            await links.aclose()

    def _restorer(self, holder: NamedHolder, mbps: float | None, by_layer: bool) -> Restorer:
        if (holder, mbps, by_layer) not in self._restorers:
            limit = LinkSettings(bytes_per_s=mbps and mbps * 1e6)
            own = holder.address if holder.kind == "store" else None
            links = SourceLinks(own, lambda address, kind: KVStoreClient(address, b"", limit, server_role=kind))
            restorer = Restorer(self.engine, self.state, links, self._metrics.store, num_passes=5 if by_layer else 1)
            self._restorers[holder, mbps, by_layer] = links, restorer
        return self._restorers[holder, mbps, by_layer][1]

    async def fill(self, prompt: Sequence[int], store: str) -> Restored:
        """Computes `prompt` and puts its blocks into the store."""
        async with (
            aclosing(SourceLinks(store)) as sources,
            running(store_writer(self.engine, self.state, sources, self._metrics).run()),
        ):
            first = await self.prefill(prompt, None)
            await self.state.chains.settled()
        return first

    async def forget(self) -> None:
        """Empties the prefix cache and the state's copy of its keys."""
        async with self.engine.cached([]):  # the engine's thread has finished earlier work and waits
            self.engine.engine.forget_prefixes()
        self.state.cached_blocks = CachedBlocks()

    def _generation(self, prompt: Sequence[int]) -> types_pb2.Generation:
        self._num_requests += 1
        sampling = types_pb2.SamplingParams(max_tokens=1, top_p=1, repetition_penalty=1, ignore_eos=True)
        return types_pb2.Generation(request_id=str(self._num_requests), prompt_token_ids=prompt, sampling=sampling)


@asynccontextmanager
async def running_worker(num_tokens: int) -> AsyncIterator[Worker]:
    """Runs a worker with room for one prompt of `num_tokens` tokens."""
    checkpoint = await asyncio.to_thread(prepare_checkpoint, "demo")
    config = EngineConfig(num_blocks=num_tokens // 64 + 2)
    engine = await asyncio.to_thread(Engine, checkpoint, config)
    metrics = WorkerMetrics()
    state = WorkerState(gateway_pb2.WorkerIdentity(), engine.layout, metrics, ChainQueue())
    for result in await asyncio.to_thread(warm_up_steps, engine):
        state.compute_rate.observe(result)
    async with (
        AsyncEngine(engine, state.on_step) as async_engine,
        aclosing(Worker(async_engine, state, metrics)) as worker,
    ):
        yield worker


@asynccontextmanager
async def running_store(*arguments: str) -> AsyncIterator[str]:
    """Runs a store process; yields its address."""
    async with killed_at_the_end("services.kvstore", "--dram-bytes", "1GiB", *arguments) as address:
        yield address


@asynccontextmanager
async def killed_at_the_end(module: str, *arguments: str) -> AsyncIterator[str]:
    """Runs a service process, ended by kill -9; yields its address."""
    child = await asyncio.create_subprocess_exec(sys.executable, "-m", module, *arguments, stdout=PIPE, stderr=STDOUT)
    assert child.stdout is not None
    try:
        async for line in child.stdout:
            event = json.loads(line) if line.startswith(b"{") else {}
            if event.get("event") == "service.ready":
                break
        else:
            raise SystemExit(f"{module} did not start")
        draining = asyncio.create_task(child.stdout.read())
        yield event["address"]
    finally:
        child.kill()
        await child.wait()
    await draining


def made_up(num_tokens: int, seed: int) -> list[int]:
    """A prompt of random tokens that no other prompt shares."""
    return random.Random(seed).choices(_VOCABULARY, k=num_tokens)
