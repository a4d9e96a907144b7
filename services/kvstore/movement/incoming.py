"""Runs of successive blocks arriving in the pool; only one sender brings a block at a time."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from halfmoon.catalog.block_identity import BlockMeta, block_id
from halfmoon.errors import AlreadyHere, HalfmoonError, InvalidRequest
from halfmoon.kv.kv_layout import KVLayout
from halfmoon.kv.owner import SHARED, KVOwner
from services.kvstore.pool import Pool
from services.kvstore.tiers.dram import Draft

MAX_BLOCKS = 1024  # in one run
_MAX_DEPTH = 0xFFFF_FFFF  # a record has 32 bits for it


@dataclass(frozen=True, slots=True)
class Run:
    """Successive blocks of a prompt that a sender offers. Raises InvalidRequest if they cannot be a run."""

    metas: Sequence[BlockMeta]
    owner: KVOwner = SHARED

    def __post_init__(self) -> None:
        if not 1 <= len(self.metas) <= MAX_BLOCKS:
            raise InvalidRequest(f"a run is of 1 to {MAX_BLOCKS} blocks", param="keys")
        if len({self.metas[0].parent, *(meta.id for meta in self.metas)}) != len(self.metas) + 1:
            raise InvalidRequest("a block cannot come before itself", param="parent")
        if self.metas[-1].depth > _MAX_DEPTH:
            raise InvalidRequest(f"a block has at most {_MAX_DEPTH} others before it", param="depth")
        if not all(0 <= meta.recompute_s < math.inf for meta in self.metas):
            raise InvalidRequest("costs cannot be negative or infinite", param="recompute_s")


def run_metas(
    keys: Sequence[bytes],
    parent: bytes,
    depth: int,
    salt: bytes,
    layout: KVLayout,
    recompute_s: float,
    owner: KVOwner = SHARED,
) -> list[BlockMeta]:
    """Metadata of blocks that follow `parent` (a key, empty for none). Raises InvalidRequest for an invalid key."""
    before = block_id(parent, salt) if parent else None
    metas = []
    for index, key in enumerate(keys):
        metas.append(BlockMeta(block_id(key, salt), before, depth + index, layout, recompute_s, tenant=owner.tenant))
        before = metas[-1].id
    return metas


@dataclass(slots=True)
class Arrival:
    """Room for a run's missing blocks: the first `drafts`, and in `refused` why the others got none."""

    num_here: int
    drafts: Sequence[Draft]
    refused: HalfmoonError | None = None

    def check_whole(self) -> None:
        """Raises AlreadyHere if the first block is here, or the error with which the rest was refused."""
        if self.num_here:
            raise AlreadyHere(f"{self.num_here} of the blocks are here")
        if self.refused is not None:
            raise self.refused


class Arrivals:
    """Owns which blocks are arriving."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._coming: dict[bytes, asyncio.Event] = {}

    @asynccontextmanager
    async def expecting(self, run: Run) -> AsyncIterator[Arrival]:
        """Reserves room for a run while inside. Nobody else can bring these blocks in the meantime.

        Waits for other senders of these blocks, block after block in the order of their ids, so that no two senders
        wait for each other.
        """
        async with AsyncExitStack() as stack:
            for block in sorted(meta.id for meta in run.metas):
                await stack.enter_async_context(self._alone(block))
            arrival = self._reserve(run)
            try:
                yield arrival
            finally:
                for draft in arrival.drafts:
                    self._pool.discard(draft)

    @asynccontextmanager
    async def _alone(self, block: bytes) -> AsyncIterator[None]:
        while (other := self._coming.get(block)) is not None:
            await other.wait()
        mine = self._coming[block] = asyncio.Event()
        try:
            yield
        finally:
            del self._coming[block]
            mine.set()

    def _reserve(self, run: Run) -> Arrival:
        metas = list(run.metas)
        self._pool.set_quota(run.owner)
        num_here = next((n for n, meta in enumerate(metas) if not self._pool.take_over(meta)), len(metas))
        drafts: list[Draft] = []
        for meta in metas[num_here:]:
            try:
                drafts.append(self._pool.reserve(meta, after=drafts[-1] if drafts else None))
            except HalfmoonError as error:
                return Arrival(num_here, drafts, error)
        return Arrival(num_here, drafts)
