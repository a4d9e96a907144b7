"""Writes computed blocks to the pool of stores in the background: each block about once."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import NamedTuple

from halfmoon.engine.step_result import BlockChain
from halfmoon.errors import HalfmoonError
from halfmoon.policy.models.latency import PrefillModel
from halfmoon.policy.placement.store_choice import choose_store, runs
from halfmoon.rpc.store.chain import Chain
from halfmoon.rpc.store.kvstore_client import KVStoreClient, LookUp
from halfmoon.worker.metrics import StoreMetrics
from halfmoon.worker.serving_engine import PoolingEngine
from halfmoon.worker.store.chain_queue import ChainQueue
from halfmoon.worker.store.source_links import SourceLinks
from halfmoon.worker.store.write_delay import LOOK_S, is_computing, may_wait

log = logging.getLogger(__name__)

_HELD_BYTES = 16 << 20  # bytes of blocks pinned in the prefix cache at a time: they go in one call
_CALL_S = 5.0
_OTHERS_S = 1.0  # for the answer of another store than the nearest: one that hangs must not hold up writing
_SLOWEST_BYTES_PER_S = 250e3  # anything slower has failed


class _Looked(NamedTuple):
    address: str
    there: LookUp


class StoreWriter:
    """Puts blocks of the prefix cache that no store has into one of them. Event-loop thread only.

    That is the worker's nearest store, or where it costs least when that one is full (`choose_store`). Requests never
    wait for it, and it waits for them as `may_wait` says. The blocks of a chain are read from the prefix cache when
    their turn comes. Blocks evicted by then, or finding the store full or away, are counted and forgotten; the next
    request with that prefix offers them again.
    """

    def __init__(
        self,
        engine: PoolingEngine,
        sources: SourceLinks,
        chains: ChainQueue,
        metrics: StoreMetrics,
        prefill_model: Callable[[], PrefillModel],
        is_running: Callable[[str], bool] = lambda request_id: False,
        longest_wait_s: float = 0.0,
    ) -> None:
        """prefill_model: cost of computing, from which the store learns what its blocks are worth.

        is_running: whether a request holds its blocks. longest_wait_s: for an idle engine; 0: nothing waits.
        """
        self._engine = engine
        self._sources = sources
        self._chains = chains
        self._metrics = metrics
        self._prefill_model = prefill_model
        self._is_running = is_running
        self._longest_wait_s = longest_wait_s
        self._computed_s = 0.0  # when the engine was last seen to compute

    async def run(self) -> None:
        """Runs as long as the worker."""
        while True:
            await self._chains.until_some()
            while self._may_wait():  # noqa: ASYNC110 - the engine has no event for the end of a request
                await asyncio.sleep(LOOK_S)
            chain = await self._chains.take()
            try:
                await self._put(chain)
            finally:
                self._chains.done()

    def _may_wait(self) -> bool:
        if self._longest_wait_s <= 0 or self._chains.is_ending:
            return False
        stats, now_s = self._engine.stats_now(), time.monotonic()
        self._computed_s = now_s if is_computing(stats) else self._computed_s
        return may_wait(
            stats,
            min(now_s - self._computed_s, self._chains.quiet_s),
            self._chains.waited_s,
            self._longest_wait_s,
            self._chains.num_blocks(lambda request_id: not self._is_running(request_id)),
            is_half_full=self._chains.is_half_full,
        )

    async def _put(self, chain: BlockChain) -> None:
        looks = [self._look(address, chain) for address in self._sources.stores]  # the nearest first
        looked = [one for one in await asyncio.gather(*looks) if one is not None]
        if not looked:
            self._metrics.put_blocks.labels("failed").inc(len(chain.keys))
            return
        held = frozenset[int]().union(*(one.there.tiers for one in looked))
        chosen = looked[choose_store([one.there.room_idle_s for one in looked])]
        is_near = chosen.address == self._sources.stores[0]
        nearest = looked[0].there.tiers
        self._metrics.put_blocks.labels("there").inc(len(nearest))
        self._metrics.put_blocks.labels("elsewhere").inc(len(held) - len(nearest))
        num_left = len(chain.keys) - len(held)
        try:
            with self._sources.to(chosen.address).use(chain.tenant_salt) as store:
                for run in runs(len(chain.keys), set(range(len(chain.keys))) - held):
                    async with aclosing(self._put_run(store, chain, run, "stored" if is_near else "spilled")) as puts:
                        async for num_held in puts:
                            num_left -= num_held
        except HalfmoonError as error:
            self._metrics.put_blocks.labels("failed").inc(num_left)
            log.debug("store.put_failed", extra={"reason": error.message})
        else:
            self._metrics.put_blocks.labels("evicted").inc(num_left)

    async def _look(self, address: str, chain: BlockChain) -> _Looked | None:
        try:
            deadline_s = _CALL_S if address == self._sources.stores[0] else _OTHERS_S
            with self._sources.to(address).use(chain.tenant_salt) as store:
                return _Looked(address, await store.look_up(chain.keys, with_room=True, deadline_s=deadline_s))
        except HalfmoonError as error:
            log.debug("store.away", extra={"store": address, "reason": error.message})
            return None

    async def _put_run(
        self, store: KVStoreClient, chain: BlockChain, run: range, outcome: str
    ) -> AsyncGenerator[int, None]:
        """Puts a run of blocks, until one is no longer cached; yields how many more the store holds now."""
        while run and (num_held := await self._put_some(store, chain, run, outcome)):
            yield num_held
            run = run[num_held:]

    async def _put_some(self, store: KVStoreClient, chain: BlockChain, run: range, outcome: str) -> int:
        """Puts the next blocks of a run that are still cached; returns how many the store holds now."""
        layout, keys, depth = self._engine.layout, chain.keys, run.start
        most = max(1, _HELD_BYTES // layout.block_bytes)
        async with self._engine.cached(keys[depth : min(depth + most, run.stop)]) as blocks:
            if not blocks:
                return 0
            cells = [await self._engine.read_block(block) for block in blocks]
            middle = depth * layout.block_tokens + (len(blocks) - 1) * layout.block_tokens // 2
            recompute_s = self._prefill_model().seconds(layout.block_tokens, middle)
            place = Chain(keys[depth - 1] if depth else b"", depth, recompute_s, owner=chain.owner)
            deadline_s = _CALL_S + len(blocks) * layout.block_bytes / _SLOWEST_BYTES_PER_S
            wanted = keys[depth : depth + len(blocks)]
            stored = await store.put_run(wanted, layout, cells, place, deadline_s=deadline_s)
        self._metrics.put_blocks.labels(outcome).inc(stored.num_new)
        self._metrics.put_blocks.labels("there").inc(stored.num_held - stored.num_new)
        self._metrics.put_bytes.inc(stored.num_new * layout.block_bytes)
        return stored.num_held
