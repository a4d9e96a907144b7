"""Blocks on their way to a store on the same host: laid out in shared memory, from which the store takes them."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence

import numpy as np
import xxhash

from halfmoon.errors import DataLoss, Incompatible
from halfmoon.kv.kv_layout import KVBytes, KVLayout
from halfmoon.pb import kvstore_pb2, kvstore_pb2_grpc
from halfmoon.rpc.layout_message import layout_message
from halfmoon.rpc.peer import Peer
from halfmoon.rpc.store.chain import Chain, Stored
from halfmoon.rpc.transport.link import KVLink
from halfmoon.rpc.transport.memfd import SharedSegment, host_id
from halfmoon.rpc.transport.shm import NAME as SHM

log = logging.getLogger(__name__)

_SEGMENT_BYTES = 16 << 20  # minimum; a larger block has a segment of its size
_OFFER_AGAIN_S = 60.0  # a store that could not reach it may have been too busy, or may have been restarted since


class Outbox:
    """Owns the segment, used by one run of blocks at a time, and the time from which it is offered to the store."""

    def __init__(self, peer: Peer, link: KVLink) -> None:
        """link: the alternative for bytes; if it is throttled, so is the outbox."""
        self._peer = peer
        self._stub = kvstore_pb2_grpc.KVStoreStub(peer.channel)
        self._link = link
        self._segment: SharedSegment | None = None
        self._turn = asyncio.Lock()
        self._offer_from_s = -math.inf if SHM in link.settings.transports else math.inf

    async def put(
        self,
        keys: Sequence[bytes],
        layout: KVLayout,
        cells: Sequence[KVBytes],
        chain: Chain,
        salt: bytes,
        *,
        deadline_s: float,
    ) -> Stored | None:
        """Puts as many blocks as fit, like `KVStoreClient.put_run`; None if the store cannot reach them."""
        if self._link.clock.time() < self._offer_from_s:
            return None
        try:
            async with self._turn:
                request = await self._laid_out(keys, layout, cells, chain, salt)
                await self._link.passed(len(request.blocks) * layout.block_bytes)
                response = await self._peer.call(self._stub.Take, request, deadline_s=deadline_s)
        except (Incompatible, OSError) as error:
            if isinstance(error, Incompatible) and error.param != "segment":
                raise
            self._offer_from_s = self._link.clock.time() + _OFFER_AGAIN_S
            log.info("store.not_taking", extra={"reason": str(error)})
            return None
        if not response.num_new <= response.num_held <= len(request.blocks):
            raise DataLoss("the store speaks of more blocks than it was offered")
        return Stored(response.num_held, response.num_new)

    def close(self) -> None:
        """Releases the segment."""
        if self._segment is not None:
            self._segment.close()

    async def _laid_out(
        self, keys: Sequence[bytes], layout: KVLayout, cells: Sequence[KVBytes], chain: Chain, salt: bytes
    ) -> kvstore_pb2.TakeRequest:
        segment = self._with_room(layout.block_bytes)
        num_blocks = min(len(keys), segment.memory.nbytes // layout.block_bytes)
        digests = await asyncio.to_thread(_copied, segment.memory, layout.block_bytes, cells[:num_blocks])
        return kvstore_pb2.TakeRequest(
            segment=f"{host_id()}/{segment.name}",
            layout=layout_message(layout),
            tenant_salt=salt,
            parent=chain.parent,
            depth=chain.depth,
            recompute_s=chain.recompute_s,
            tenant=chain.owner.tenant,
            tenant_quota_bytes=chain.owner.quota_bytes,
            blocks=[
                kvstore_pb2.OfferedBlock(key=key, offset=index * layout.block_bytes, digest=digest)
                for index, (key, digest) in enumerate(zip(keys, digests, strict=False))
            ],
        )

    def _with_room(self, block_bytes: int) -> SharedSegment:
        """A segment with room for a block. Raises OSError if the system has no shared memory."""
        if self._segment is None or self._segment.memory.nbytes < block_bytes:
            self.close()
            self._segment = SharedSegment(max(_SEGMENT_BYTES, block_bytes))
        return self._segment


def _copied(memory: memoryview, block_bytes: int, cells: Sequence[KVBytes]) -> list[int]:
    """Copies the blocks into `memory` one after the other; returns their digests."""
    digests = []
    for index, block in enumerate(cells):
        place = memory[index * block_bytes : (index + 1) * block_bytes]
        np.copyto(np.frombuffer(place, np.uint8), np.frombuffer(block, np.uint8))
        digests.append(xxhash.xxh3_64_intdigest(place))
    return digests
