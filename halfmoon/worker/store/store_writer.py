"""Writes computed blocks to the store in the background."""

from __future__ import annotations

import logging
from collections.abc import Callable

from halfmoon.engine.async_engine import AsyncEngine
from halfmoon.engine.step_result import BlockChain
from halfmoon.errors import HalfmoonError
from halfmoon.policy.models.latency import PrefillModel
from halfmoon.rpc.chain import Chain
from halfmoon.rpc.kvstore_client import KVStoreClient
from halfmoon.worker.metrics import StoreMetrics
from halfmoon.worker.store.chain_queue import ChainQueue
from halfmoon.worker.store.store_link import StoreLink

log = logging.getLogger(__name__)

_HELD_BYTES = 16 << 20  # bytes of blocks pinned in the prefix cache at a time: they go in one call
_CALL_S = 5.0
_SLOWEST_BYTES_PER_S = 250e3  # anything slower has failed


class StoreWriter:
    """Puts new blocks of the prefix cache into the store. Event-loop thread only.

    Requests never wait for it. The blocks of a chain are read from the prefix cache when their turn comes. Blocks
    evicted by then, or finding the store full or away, are counted and forgotten; the next request with that prefix
    offers them again.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        link: StoreLink,
        chains: ChainQueue,
        metrics: StoreMetrics,
        prefill_model: Callable[[], PrefillModel],
    ) -> None:
        """prefill_model: cost of computing, from which the store learns what its blocks are worth."""
        self._engine = engine
        self._link = link
        self._chains = chains
        self._metrics = metrics
        self._prefill_model = prefill_model

    async def run(self) -> None:
        """Runs as long as the worker."""
        while True:
            chain = await self._chains.take()
            try:
                await self._put(chain)
            finally:
                self._chains.done()

    async def _put(self, chain: BlockChain) -> None:
        depth = 0
        try:
            with self._link.use(chain.tenant_salt) as store:
                depth = len(await store.match(chain.keys, deadline_s=_CALL_S))
                while depth < len(chain.keys):
                    num_put = await self._put_some(store, chain, depth)
                    depth += num_put
                    if not num_put:
                        self._metrics.put_blocks.labels("evicted").inc(len(chain.keys) - depth)
                        return
        except HalfmoonError as error:
            self._metrics.put_blocks.labels("failed").inc(len(chain.keys) - depth)
            log.debug("store.put_failed", extra={"reason": error.message})

    async def _put_some(self, store: KVStoreClient, chain: BlockChain, depth: int) -> int:
        """Puts the next blocks of a chain that are still cached; returns how many the store now holds."""
        layout, keys = self._engine.engine.layout, chain.keys
        most = max(1, _HELD_BYTES // layout.block_bytes)
        async with self._engine.cached(keys[depth : depth + most]) as blocks:
            if not blocks:
                return 0
            cells = [await self._engine.read_block(block) for block in blocks]
            middle = depth * layout.block_tokens + (len(blocks) - 1) * layout.block_tokens // 2
            recompute_s = self._prefill_model().seconds(layout.block_tokens, middle)
            place = Chain(keys[depth - 1] if depth else b"", depth, recompute_s, owner=chain.owner)
            deadline_s = _CALL_S + len(blocks) * layout.block_bytes / _SLOWEST_BYTES_PER_S
            run = keys[depth : depth + len(blocks)]
            stored = await store.put_run(run, layout, cells, place, deadline_s=deadline_s)
        self._metrics.put_blocks.labels("stored").inc(stored.num_new)
        self._metrics.put_blocks.labels("there").inc(stored.num_held - stored.num_new)
        self._metrics.put_bytes.inc(stored.num_new * layout.block_bytes)
        return stored.num_held
