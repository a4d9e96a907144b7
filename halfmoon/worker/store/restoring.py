"""The loads of one request: from several sources at once, each block from one of them, until both sides have met."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from halfmoon.background import logged, running, uncancelled
from halfmoon.engine.kv_memory.kv_watch import OnKV
from halfmoon.engine.request import EngineRequest
from halfmoon.engine.scheduling.layer_gate import LayerGate
from halfmoon.engine.scheduling.restore_order import RestoreOrder
from halfmoon.errors import DeadlineExceeded, HalfmoonError, NoCapacity, NotFound, Unavailable
from halfmoon.kv.codec import Codec
from halfmoon.kv.kv_layout import KVBytes
from halfmoon.rpc.store.kvstore_client import KVStoreClient, TierName
from halfmoon.worker.metrics import StoreMetrics
from halfmoon.worker.serving_engine import PoolingEngine
from halfmoon.worker.store.awake_clock import AwakeClock
from halfmoon.worker.store.holder import Holder
from halfmoon.worker.store.restore_progress import RestoreProgress

log = logging.getLogger(__name__)

_PREFETCH_S = 2.0
_WAIT_SHARE = 0.2  # of a step's patience; a step that would wait longer begins later
_LOADS_AT_ONCE = 2  # of each source: keeps the link busy while a block is written


class RestoringSource(NamedTuple):
    """A holder, and where each block is that it has."""

    holder: Holder
    tiers: Mapping[int, TierName]  # by block


class Restoring:
    """Owns the loads of one request. `add` it to the engine, then `run` concurrently; leaving `run` ends the loads.

    A source that is slow, away, busy or without its blocks is a miss: another one brings them, or they are computed.
    """

    def __init__(
        self,
        engine: PoolingEngine,
        metrics: StoreMetrics,
        request: EngineRequest,
        keys: Sequence[bytes],
        num_here: int,
        sources: Sequence[RestoringSource],
        progress: RestoreProgress,
        predicted_s: float,
        on_end: Callable[[Restoring], None],
        clock: AwakeClock,
        codec_of: Callable[[Holder, KVStoreClient], Codec],
    ) -> None:
        """num_here: leading blocks that the prefix cache has; predicted_s: until both sides meet.

        codec_of: chooses what a holder's blocks travel in, once it is asked for some.
        """
        self.first_key = keys[num_here]
        self.predicted_s = predicted_s
        self.ended = asyncio.Event()
        self._engine = engine
        self._metrics = metrics
        self._on_end = on_end
        self._request = request
        self._keys = keys
        self._sources = sources
        self._progress = progress
        self._clock = clock
        self._codec_of = codec_of
        self._codecs: dict[int, Codec] = {}  # by source
        self._has_begun = asyncio.Event()
        self._news = asyncio.Event()
        self._loads: dict[asyncio.Task[None], int] = {}  # and the number of its source
        self._is_gone = False
        self.must_load = False  # nobody waits for what would be computed: without sources it ends
        self.num_planned_tokens = (progress.num_blocks - progress.fence) * engine.layout.block_tokens
        self.num_loaded_tokens = 0
        self.num_blocks_from_workers = 0
        self.last_s = clock.now_s()  # when the last load ended
        self.ended_s = time.monotonic()  # the same, for the outside
        for source in sources:
            source.holder.num_users += 1

    @property
    def keys_here(self) -> Sequence[bytes]:
        """After the end: keys of the leading blocks that are computed or loaded."""
        return self._keys[: self._progress.num_leading]

    async def add(self, on_kv: OnKV | None) -> None:
        """Adds the request to the engine."""
        order = RestoreOrder(self._progress.num_blocks, self._progress.fence, self._on_progress)
        await self._engine.add(self._request, on_kv, order)

    def abandon(self) -> None:
        """Ends it without a `run`. Idempotent."""
        if not self.ended.is_set():
            self.ended.set()
            self._on_end(self)
            was_any_asked = any(part.was_asked for part in self._progress.sources)
            for source, part in zip(self._sources, self._progress.sources, strict=True):
                source.holder.num_users -= 1
                if was_any_asked and not part.was_asked:
                    source.holder.rate.note_passed_over()

    async def run(self) -> None:
        """Loads until both sides have met. Blocks not loaded by then are computed.

        Raises Unavailable if it `must_load` and all sources fail, or have nothing of what they said to have.
        """
        moving: asyncio.Task[int] | None = None
        try:
            await self._has_begun.wait()
            async with running(logged(self._prefetch())):
                while not self._is_gone:
                    self._replace_late_sources()
                    self._start_layers()
                    self._start_loads()
                    moving = self._moved(moving)
                    if self._progress.is_over and moving is None:
                        return
                    await self._wait_for_news()
            if self.must_load and not self._progress.has_sources:
                raise Unavailable("all holders of the prefix that was to be copied have failed")
        finally:
            tasks = [*self._loads, *([moving] if moving else [])]
            for task in tasks:
                task.cancel()
            self._engine.note_loaded(self._request.request_id, (), range(self._progress.num_blocks))
            self.abandon()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _on_progress(self, num_tokens: int, num_loaded: int) -> None:
        self.num_loaded_tokens = num_loaded
        self._progress.advance(num_tokens, self._clock.now_s())
        self._has_begun.set()
        self._news.set()

    async def _wait_for_news(self) -> None:
        patience_s = self._progress.patience_s
        with suppress(TimeoutError), self._clock.waiting(patience_s):
            async with asyncio.timeout(patience_s):
                await self._news.wait()
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
        fence = self._progress.wanted_fence(self._clock.now_s())
        if fence == self._progress.fence:
            return None
        task = asyncio.create_task(self._engine.move_fence(self._request.request_id, fence))
        if fence > self._progress.fence:
            self._progress.fence = fence  # so that no more blocks are requested in the meantime
        task.add_done_callback(lambda _: self._news.set())
        return task

    def _replace_late_sources(self) -> None:
        for number in self._progress.replaceable(self._clock.now_s()):
            self._drop(number, "slow")
            for task, of_source in self._loads.items():
                if of_source == number:
                    task.cancel()

    def _start_loads(self) -> None:
        parts = self._progress.sources
        for number in sorted(range(len(parts)), key=lambda one: parts[one].load_s_per_block):
            while list(self._loads.values()).count(number) < _LOADS_AT_ONCE:
                blocks = self._progress.claim(self._clock.now_s(), number)
                if not blocks:
                    break
                self._start(number, self._load(number, blocks))

    def _start_layers(self) -> None:
        blocks = self._progress.claim_layers(self._clock.now_s())
        if blocks:
            number = self._progress.layer_source
            self._start(number, self._load(number, blocks, by_layer=True))

    def _start(self, number: int, load: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(load)
        self._loads[task] = number
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._loads[task]
        self._news.set()
        if not task.cancelled() and task.exception() is not None:
            log.error("restore.load_died", exc_info=task.exception())
            self._is_gone = True

    async def _load(self, number: int, blocks: list[int], *, by_layer: bool = False) -> None:
        block_bytes, source = self._engine.layout.block_bytes, self._sources[number]
        rate, came, reason = source.holder.rate, [], "cancelled"
        rate.bytes_under_way += len(blocks) * block_bytes
        try:
            with source.holder.use(self._request.tenant_salt) as client:
                keys = {block: self._keys[block] for block in blocks}
                if number not in self._codecs:
                    self._codecs[number] = self._codec_of(source.holder, client)
                if by_layer:
                    came = await self._load_layers(number, client, keys, blocks)
                else:
                    came = await source.holder.blocks.load(client, keys, self._write, self._codecs[number])
                    self._leave_out(number, blocks, len(came))
            reason = "evicted"
        except NotFound:
            came, reason = [], "unwanted"  # the engine no longer needs them
        except HalfmoonError as error:
            came, reason = [], _reason(error)
            log.info("restore.failed", extra={"address": source.holder.address, "reason": error.message})
            self._drop(number, reason)
        finally:
            rate.bytes_under_way -= len(blocks) * block_bytes
            self._note_ended(number, blocks, came, reason)

    def _leave_out(self, number: int, blocks: list[int], num_served: int) -> None:
        """Takes what a holder does not serve now, all but the leading blocks, out of a load: it is asked for again."""
        if 0 < num_served < len(blocks):
            left = blocks[num_served:]
            del blocks[num_served:]
            self._sources[number].holder.rate.bytes_under_way -= len(left) * self._engine.layout.block_bytes
            self._progress.left_out(left, number)
            self._news.set()

    def _note_ended(self, number: int, blocks: list[int], came: list[int], reason: str) -> None:
        source, metrics, now_s = self._sources[number], self._metrics, self._clock.now_s()
        self.last_s, self.ended_s = now_s, time.monotonic()
        here = set(came)
        missed = [block for block in blocks if block not in here]
        self._progress.came(came, now_s, number)
        lost = self._progress.failed(missed, number)
        self._is_gone |= not self._progress.has_sources
        self._engine.note_loaded(self._request.request_id, came, lost)
        metrics.missed_blocks.labels(source.holder.kind, reason).inc(len(missed))
        self.num_blocks_from_workers += len(came) if source.holder.kind == "worker" else 0
        block_bytes = self._engine.layout.block_bytes
        for block in came:
            tier = source.tiers[block]
            metrics.loaded_bytes.labels(tier if source.holder.kind == "store" else "worker").inc(block_bytes)
            source.holder.rate.observe(tier, block_bytes, self._progress.sources[number].measured_s_per_block)

    def _drop(self, number: int, reason: str) -> None:
        """Asks a source for nothing more."""
        if not self._progress.sources[number].is_gone:
            self._metrics.source_answers.labels(self._sources[number].holder.kind, reason).inc()
            self._sources[number].holder.rate.note_late()
            lost = self._progress.drop(number)
            self._engine.note_loaded(self._request.request_id, (), lost)
        self._is_gone |= not self._progress.has_sources

    async def _load_layers(
        self, number: int, client: KVStoreClient, keys: Mapping[int, bytes], blocks: list[int]
    ) -> list[int]:
        """Loads blocks by layer, and has the engine begin the step behind them as soon as it will hardly wait.

        If the holder serves a part of them only, no step begins before the others are here.
        """
        source, request_id = self._sources[number], self._request.request_id
        num_layers = self._engine.layout.num_layers
        patience_s, began_s, has_asked = self._progress.layer_patience_s, self._clock.now_s(), False
        gate = LayerGate(keys, num_layers, patience_s)
        engine = self._engine.layer_loading
        assert engine is not None, "it was planned without"

        async def write(layers: range, cells: Mapping[int, KVBytes]) -> None:
            nonlocal has_asked
            self._leave_out(number, blocks, len(cells))
            await uncancelled(engine.load_layers(request_id, layers, cells))
            gate.arrived(layers.stop)
            wait_s = self._progress.layer_wait_s(layers.stop / num_layers, self._clock.now_s() - began_s)
            if not has_asked and layers.stop < num_layers and wait_s <= _WAIT_SHARE * patience_s:
                has_asked = True
                engine.arrive_by_layer(request_id, gate)

        try:
            layers_at_once = self._progress.layers_at_once(num_layers)
            return await source.holder.blocks.load_layers(client, keys, layers_at_once, write, self._codecs[number])
        finally:
            gate.fail()
            if not gate.is_open:
                self._metrics.restore_decisions.labels("late").inc()

    async def _write(self, block: int, cells: KVBytes) -> None:
        await uncancelled(self._engine.load_block(self._request.request_id, block, cells))  # no other source writes yet

    async def _prefetch(self) -> None:
        """Has stores fetch blocks from their slower tiers, in the order in which they will be requested."""
        await asyncio.gather(*map(self._prefetch_from, self._sources))

    async def _prefetch_from(self, source: RestoringSource) -> None:
        behind = [block for block in sorted(source.tiers, reverse=True) if block >= self._progress.fence]
        wanted = [self._keys[block] for block in behind if source.tiers[block] != "dram"]
        if not wanted:
            return
        try:
            with source.holder.use(self._request.tenant_salt) as client:
                await client.prefetch(wanted, deadline_s=_PREFETCH_S)
        except HalfmoonError as error:
            log.debug("store.prefetch_failed", extra={"reason": error.message})


def _reason(error: HalfmoonError) -> str:
    """Why a source is not asked any more, as metrics count it."""
    if isinstance(error, NoCapacity):
        return "busy"
    if isinstance(error, DeadlineExceeded):
        return "slow"
    return "away" if isinstance(error, Unavailable) else "failed"
