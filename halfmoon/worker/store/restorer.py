"""Restores a known prefix: loaded from the back, computed from the front, until both meet (Cake)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from halfmoon.engine.kv_memory.kv_watch import OnKV
from halfmoon.engine.request import EngineRequest
from halfmoon.engine.scheduling.restore_order import RestoreOrder
from halfmoon.errors import HalfmoonError, NotFound
from halfmoon.kv.keys import block_keys, root_key
from halfmoon.kv.kv_layout import KVBytes
from halfmoon.policy.models.latency import PrefillModel
from halfmoon.policy.placement.restore_plan import RestorePlan
from halfmoon.rpc.kvstore_client import TierName
from halfmoon.worker.metrics import StoreMetrics
from halfmoon.worker.state import WorkerState
from halfmoon.worker.store.block_source import BlockSource
from halfmoon.worker.store.load_rate import LoadRate
from halfmoon.worker.store.restore_progress import RestoreProgress
from halfmoon.worker.store.store_link import StoreLink

if TYPE_CHECKING:
    from halfmoon.engine.async_engine import AsyncEngine  # needs torch

log = logging.getLogger(__name__)

_LOADS_AT_ONCE = 2  # keeps the link busy while a block is written
_ASK_AT_LEAST_S = 0.05


class Restorer:
    """Decides what to load for each prompt. Owns the learned speed of the store. Event-loop thread only."""

    def __init__(
        self,
        engine: AsyncEngine,
        state: WorkerState,
        link: StoreLink,
        metrics: StoreMetrics,
        ask_at_most_s: float = 2.0,
    ) -> None:
        self.engine = engine
        self.ask_at_most_s = ask_at_most_s  # limit on the store's answer about what it holds
        self.link = link
        self.metrics = metrics
        self.source = BlockSource(engine.engine.layout)
        self.rate = LoadRate()
        self._state = state

    async def plan(self, request: EngineRequest) -> Restoring | None:
        """Plans how to restore what the prefix cache lacks; None if nothing is to be loaded."""
        engine = self.engine.engine
        block_tokens = engine.layout.block_tokens
        tokens = [*request.prompt_token_ids, *request.output_token_ids]
        num_whole = (len(tokens) - 1) // block_tokens  # at least one token is left to compute
        root = root_key(engine.checkpoint.fingerprint, engine.layout, request.tenant_salt)
        keys = block_keys(root, tokens[: num_whole * block_tokens], block_tokens)
        num_here = self._state.cached_blocks.depth(keys)
        if num_here == num_whole:
            return None
        model = self._state.compute_rate.model
        ask_s = model.seconds((num_whole - num_here) * block_tokens, num_here * block_tokens) / 4
        tiers = await self._match(request, keys, min(max(ask_s, _ASK_AT_LEAST_S), self.ask_at_most_s))
        if len(tiers) <= num_here:
            return None
        return self._decide(request, keys[: len(tiers)], tiers, num_here, model)

    async def _match(self, request: EngineRequest, keys: Sequence[bytes], deadline_s: float) -> list[TierName]:
        try:
            with self.link.use(request.tenant_salt) as store:
                return await store.match(keys, deadline_s=deadline_s)
        except HalfmoonError as error:
            self.metrics.restore_decisions.labels("away").inc()
            log.debug("store.away", extra={"reason": error.message})
            return []

    def _decide(
        self,
        request: EngineRequest,
        keys: Sequence[bytes],
        tiers: Sequence[TierName],
        num_here: int,
        model: PrefillModel,
    ) -> Restoring | None:
        layout, config = self.engine.engine.layout, self.engine.engine.config
        s_per_byte = self.rate.s_per_byte(tiers[num_here:])
        progress = RestoreProgress(
            len(keys), layout.block_tokens, config.prefill_chunk_tokens, model, s_per_byte * layout.block_bytes,
            config.step_tokens,
        )  # fmt: skip
        costs = progress.costs(
            num_here * layout.block_tokens, s_per_byte * layout.block_bytes, s_per_byte * self.rate.bytes_under_way
        )
        waiting_tokens = self.engine.engine.stats().num_waiting_tokens
        costs = costs._replace(compute_queue_s=costs.compute_queue_s + waiting_tokens * model.b)
        plan = progress.begin(num_here, costs)
        self._note(plan)
        return Restoring(self, request, keys, tiers, progress) if plan.num_load_blocks else None

    def _note(self, plan: RestorePlan) -> None:
        self.metrics.restore_decisions.labels(plan.method).inc()
        log.info(
            "restore.planned",
            extra={
                "compute_blocks": plan.num_compute_blocks,
                "load_blocks": plan.num_load_blocks,
                "predicted_s": round(plan.seconds, 4),
            },
        )


class Restoring:
    """Owns the loads of one request. `add` it to the engine, then `run` concurrently; leaving `run` ends the loads."""

    def __init__(
        self,
        restorer: Restorer,
        request: EngineRequest,
        keys: Sequence[bytes],
        tiers: Sequence[TierName],
        progress: RestoreProgress,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._restorer = restorer
        self._engine = restorer.engine
        self._request = request
        self._keys = keys
        self._tiers = tiers
        self._progress = progress
        self._now_s = now_s
        self._has_begun = asyncio.Event()
        self._news = asyncio.Event()
        self._loads: set[asyncio.Task[None]] = set()
        self._is_gone = False
        self.num_planned_tokens = (progress.num_blocks - progress.fence) * restorer.engine.engine.layout.block_tokens
        self.num_loaded_tokens = 0
        self.last_s = now_s()  # when the last load ended

    async def add(self, on_kv: OnKV | None) -> None:
        """Adds the request to the engine."""
        order = RestoreOrder(self._progress.num_blocks, self._progress.fence, self._on_progress)
        await self._engine.add(self._request, on_kv, order)

    async def run(self) -> None:
        """Loads until both sides have met. Blocks not loaded by then are computed."""
        await self._has_begun.wait()
        moving: asyncio.Task[int] | None = None
        try:
            await self._prefetch()
            while not self._is_gone:
                self._start_loads()
                moving = self._moved(moving)
                if self._progress.is_over and moving is None:
                    return
                await self._wait_for_news()
        finally:
            tasks = [*self._loads, *([moving] if moving else [])]
            for task in tasks:
                task.cancel()
            self._engine.note_loaded(self._request.request_id, (), range(self._progress.num_blocks))
            await asyncio.gather(*tasks, return_exceptions=True)

    def _on_progress(self, num_tokens: int, num_loaded: int) -> None:
        self.num_loaded_tokens = num_loaded
        self._progress.advance(num_tokens, self._now_s())
        self._has_begun.set()
        self._news.set()

    async def _wait_for_news(self) -> None:
        try:
            async with asyncio.timeout(self._progress.patience_s):
                await self._news.wait()
        except TimeoutError:
            pass
        self._news.clear()

    def _moved(self, moving: asyncio.Task[int] | None) -> asyncio.Task[int] | None:
        """Applies a finished move of the fence and starts the next one if one is due."""
        if moving is not None and not moving.done():
            return moving
        if moving is not None:
            try:
                self._progress.fence = moving.result()
            except HalfmoonError:  # everything is here, or the request is gone
                self._is_gone = True
                return None
        fence = self._progress.wanted_fence(self._now_s())
        if fence == self._progress.fence:
            return None
        task = asyncio.create_task(self._engine.move_fence(self._request.request_id, fence))
        if fence > self._progress.fence:
            self._progress.fence = fence  # so that no more blocks are requested in the meantime
        task.add_done_callback(lambda _: self._news.set())
        return task

    def _start_loads(self) -> None:
        while len(self._loads) < _LOADS_AT_ONCE and (blocks := self._progress.claim(self._now_s())):
            task = asyncio.create_task(self._load(blocks))
            self._loads.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._loads.discard(task)
        self._news.set()
        if not task.cancelled() and task.exception() is not None:
            log.error("restore.load_died", exc_info=task.exception())
            self._is_gone = True

    async def _load(self, blocks: list[int]) -> None:
        num_bytes = len(blocks) * self._engine.engine.layout.block_bytes
        rate, metrics = self._restorer.rate, self._restorer.metrics
        came: list[int] = []
        rate.bytes_under_way += num_bytes
        try:
            with self._restorer.link.use(self._request.tenant_salt) as store:
                keys = {block: self._keys[block] for block in blocks}
                came = await self._restorer.source.load(store, keys, self._write)
        except NotFound:
            came = []  # the engine no longer needs them
        except HalfmoonError as error:
            log.info("restore.failed", extra={"reason": error.message})
            self._is_gone = True
        finally:
            rate.bytes_under_way -= num_bytes
        self.last_s = self._now_s()
        lost = [block for block in blocks if block not in came]
        self._engine.note_loaded(self._request.request_id, came, lost)
        self._progress.came(came, self._now_s())
        self._progress.failed(lost)
        metrics.missed_blocks.inc(len(lost))
        for block in came:
            tier = self._tiers[block]
            metrics.loaded_bytes.labels(tier).inc(num_bytes // len(blocks))
            rate.observe(tier, num_bytes // len(blocks), self._progress.measured_s_per_block)

    async def _write(self, block: int, cells: KVBytes) -> None:
        await self._engine.load_block(self._request.request_id, block, cells)

    async def _prefetch(self) -> None:
        """Has the store fetch blocks from its slower tiers, in the order in which they will be requested."""
        behind = zip(self._keys[self._progress.fence :], self._tiers[self._progress.fence :], strict=True)
        wanted = [key for key, tier in behind if tier != "dram"]
        if wanted:
            try:
                with self._restorer.link.use(self._request.tenant_salt) as store:
                    await store.prefetch(wanted[::-1], deadline_s=self._restorer.ask_at_most_s)
            except HalfmoonError as error:
                log.debug("store.prefetch_failed", extra={"reason": error.message})
