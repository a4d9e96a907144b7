"""Lends blocks in shared memory to processes on the same host.

A loan keeps its blocks in place until the reader ends its side of the call, dies, or is silent for `lease_s`. Only the
store's last message confirms that the loan held to the end. Without it, the bytes may have been overwritten while they
were read, and the reader must discard them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from halfmoon.catalog.block_identity import block_id
from halfmoon.errors import HalfmoonError, Incompatible, InvalidRequest
from halfmoon.pb import kvstore_pb2
from halfmoon.rpc.layout_message import layout_message
from halfmoon.rpc.transfer import next_message
from services.kvstore.pool import Loan, Pool

_MAX_BLOCKS = 4096


class SharedMemoryGet:
    """Owns only the segment's name; a loan lives in its call."""

    def __init__(self, pool: Pool, lease_s: float, segment: str | None) -> None:
        """segment: `<host id>/<name>` of the arena; None if it is not shared."""
        self._pool = pool
        self._lease_s = lease_s
        self._segment = segment

    async def lend(
        self, requests: AsyncIterator[kvstore_pb2.BorrowRequest]
    ) -> AsyncIterator[kvstore_pb2.BorrowResponse]:
        """Serves one loan. Raises Incompatible if the memory is not shared, DeadlineExceeded if the lease ends it."""
        if self._segment is None:
            raise Incompatible("this store's memory is not shared")
        request = await next_message(requests, self._lease_s)
        if request is None or len(request.keys) > _MAX_BLOCKS:
            raise InvalidRequest(f"a loan is of 1 to {_MAX_BLOCKS} blocks", param="keys")
        blocks = [block_id(key, request.tenant_salt) for key in request.keys]
        loans: list[Loan] = []
        try:
            await self._take(blocks, loans)
            yield kvstore_pb2.BorrowResponse(
                segment=self._segment, lease_s=self._lease_s, blocks=[_lent(loan) for loan in loans]
            )
            while await next_message(requests, self._lease_s) is not None:
                continue
            yield kvstore_pb2.BorrowResponse()
        finally:
            for loan in loans:
                self._pool.give_back(loan)

    async def _take(self, blocks: list[bytes], loans: list[Loan]) -> None:
        """Acquires the leading blocks that are in the arena or can be loaded there."""
        num_here = self._pool.prefetch(blocks)
        for block in blocks[:num_here]:
            try:
                loan = await self._pool.acquire(block)
            except HalfmoonError:
                return
            if loan.block is None:
                return
            loans.append(loan)


def _lent(loan: Loan) -> kvstore_pb2.LentBlock:
    assert loan.block is not None
    assert loan.block.meta.layout is not None
    return kvstore_pb2.LentBlock(
        offset=loan.block.room.offset,
        num_bytes=loan.block.room.view.nbytes,
        digest=loan.block.digest,
        codec=str(loan.block.codec),
        layout=layout_message(loan.block.meta.layout),
    )
