"""Where blocks of the store are read from: its memory, or what it sends."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager

from halfmoon.errors import Incompatible
from halfmoon.kv.codec import Codec
from halfmoon.kv.frame import KVRange
from halfmoon.kv.kv_layout import KVBytes, KVLayout
from halfmoon.rpc.store.kvstore_client import KVStoreClient, Lent
from halfmoon.worker.store.block_source import BlockSource

LAYOUT = KVLayout(2, 2, 8, "bfloat16", 16)


class Sending(KVStoreClient):
    """A store that lends nothing."""

    def __init__(self) -> None:
        self.num_asked = 0

    @asynccontextmanager
    async def borrow(self, keys: Sequence[bytes], *, deadline_s: float) -> AsyncIterator[list[Lent]]:
        self.num_asked += 1
        raise Incompatible("its memory is not shared")
        yield []

    async def get_run(
        self,
        keys: Sequence[bytes],
        layout: KVLayout,
        part: KVRange | None = None,
        codec: Codec = Codec.RAW,
        *,
        deadline_s: float,
    ) -> AsyncGenerator[memoryview, None]:
        for key in keys:
            yield memoryview(key)


async def test_a_store_that_lends_nothing_is_asked_again_a_minute_later() -> None:
    clock, written = [1000.0], []

    async def write(index: int, cells: KVBytes) -> None:
        written.append((index, bytes(cells)))

    source, store = BlockSource(LAYOUT, lambda: clock[0]), Sending()
    for clock[0], num_asked in ((1000.0, 1), (1059.0, 1), (1060.0, 2), (1100.0, 2)):
        assert await source.load(store, {3: b"three", 4: b"four"}, write) == [3, 4]
        assert store.num_asked == num_asked
    assert written == [(3, b"three"), (4, b"four")] * 4
