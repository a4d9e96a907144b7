"""Copies blocks out of the writer's shared memory; the call itself carries no KV."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np

from halfmoon.errors import DataLoss, HalfmoonError, Incompatible, InvalidRequest
from halfmoon.kv.owner import KVOwner
from halfmoon.pb import kvstore_pb2
from halfmoon.rpc.transport.mapped import MappedSegments
from services.kvstore.movement.incoming import Arrival, Arrivals, Run, run_metas
from services.kvstore.pool import Pool
from services.kvstore.tiers.dram import Draft, digest
from services.kvstore.wire import named_layout


class SharedMemoryPut:
    """Owns the mappings of the writers' segments. Close it."""

    def __init__(self, pool: Pool, arrivals: Arrivals) -> None:
        self._pool = pool
        self._arrivals = arrivals
        self._segments = MappedSegments()

    async def take(self, request: kvstore_pb2.TakeRequest) -> kvstore_pb2.TakeResponse:
        """Takes one run; returns how many of its leading blocks are here now and how many of them are new.

        Raises if it can take none: Incompatible if the writer's memory cannot be mapped here (`param` is `segment`),
        DataLoss if a block does not match its digest, and whatever `Pool.reserve` and `Pool.commit` raise.
        """
        layout = named_layout(request.layout)
        blocks = request.blocks
        keys = [block.key for block in blocks]
        owner = KVOwner(request.tenant, request.tenant_quota_bytes)
        metas = run_metas(
            keys, request.parent, request.depth, request.tenant_salt, layout, request.recompute_s, owner
        )  # fmt: skip
        run = Run(metas, owner)
        memory = await self._memory(request.segment)
        if any(block.offset + layout.block_bytes > memory.nbytes for block in blocks):
            raise InvalidRequest("a block lies outside its writer's memory", param="blocks")
        async with self._arrivals.expecting(run) as arrival:
            return await self._taken(arrival, memory, blocks[arrival.num_here :])

    async def _memory(self, segment: str) -> memoryview:
        try:
            return await self._segments.memory(segment)
        except HalfmoonError as error:
            raise Incompatible(error.message, param="segment") from error

    def close(self) -> None:
        """Unmaps the writers' memory."""
        self._segments.close()

    async def _taken(
        self, arrival: Arrival, memory: memoryview, blocks: Sequence[kvstore_pb2.OfferedBlock]
    ) -> kvstore_pb2.TakeResponse:
        num_right = await _to_the_end(_copied, arrival.drafts, memory, blocks)
        num_new, failure = 0, arrival.refused
        if num_right < len(arrival.drafts):
            failure = DataLoss("a block is not what its digest says: it changed while it was copied")
        for draft, block in zip(arrival.drafts[:num_right], blocks, strict=False):
            try:
                await self._pool.commit(draft, block.digest)
            except HalfmoonError as error:
                failure = error
                break
            num_new += 1
        if not arrival.num_here + num_new and failure is not None:
            raise failure
        return kvstore_pb2.TakeResponse(num_held=arrival.num_here + num_new, num_new=num_new)


async def _to_the_end(copy: Callable[..., int], *given: object) -> int:
    """Runs `copy` on a thread to its end, since a thread cannot be stopped; a cancelled caller waits for it."""
    copying = asyncio.ensure_future(asyncio.to_thread(copy, *given))
    try:
        return await asyncio.shield(copying)
    finally:
        while not copying.done():
            with suppress(asyncio.CancelledError):  # a cancellation is raised again after this
                await asyncio.wait([copying])


def _copied(drafts: Sequence[Draft], memory: memoryview, blocks: Sequence[kvstore_pb2.OfferedBlock]) -> int:
    """Copies blocks; returns how many leading drafts match their digests. Runs on any thread, the only user of them."""
    for index, (draft, block) in enumerate(zip(drafts, blocks, strict=False)):
        source = memory[block.offset : block.offset + draft.room.view.nbytes]
        np.copyto(np.frombuffer(draft.room.view, np.uint8), np.frombuffer(source, np.uint8))  # releases the GIL
        if digest(draft.room.view) != block.digest:
            return index
    return len(drafts)
