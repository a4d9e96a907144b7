"""A run that is given up while it is copied, and runs that want the same blocks in another order."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing

import pytest
import xxhash

from halfmoon.catalog.block_identity import block_id
from halfmoon.errors import InvalidRequest
from halfmoon.pb import kvstore_pb2
from halfmoon.rpc.layout_message import layout_message
from halfmoon.rpc.transport.memfd import SharedSegment, host_id
from services.kvstore.movement import shared_memory_put as taking
from services.kvstore.movement.incoming import Arrivals, Run, run_metas
from services.kvstore.movement.shared_memory_put import SharedMemoryPut
from services.kvstore.pool import Pool
from tests.services.kvstore.blocks import LAYOUT, content, is_right, key, meta, put

KEYS = [key(n) for n in range(3)]


def make_pool() -> Pool:
    return Pool(memoryview(bytearray(4 * LAYOUT.block_bytes)))


@asynccontextmanager
async def offered() -> AsyncIterator[kvstore_pb2.TakeRequest]:
    with closing(SharedSegment(len(KEYS) * LAYOUT.block_bytes)) as segment:
        blocks = []
        for index, one in enumerate(KEYS):
            start = index * LAYOUT.block_bytes
            segment.memory[start : start + LAYOUT.block_bytes] = content(one)
            digest = xxhash.xxh3_64_intdigest(content(one))
            blocks.append(kvstore_pb2.OfferedBlock(key=one, offset=start, digest=digest))
        name = f"{host_id()}/{segment.name}"
        yield kvstore_pb2.TakeRequest(segment=name, layout=layout_message(LAYOUT), blocks=blocks)


async def test_rooms_are_nobody_elses_while_a_cancelled_copy_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, copied, loop = make_pool(), taking._copied, asyncio.get_running_loop()
    begun, go_on = asyncio.Event(), threading.Event()

    def held_up(*given: object) -> int:
        loop.call_soon_threadsafe(begun.set)
        go_on.wait()
        return copied(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(taking, "_copied", held_up)
    with closing(SharedMemoryPut(pool, Arrivals(pool))) as taker:
        async with offered() as request:
            call = asyncio.ensure_future(taker.take(request))
            await begun.wait()
            for _ in range(2):  # the caller goes away, then the server ends
                call.cancel()
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            other = await put(pool, meta(block_id(key(9))))
            is_held = pool.dram.reserved_bytes == len(KEYS) * LAYOUT.block_bytes
            go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await call
        assert is_held
        assert pool.dram.reserved_bytes == 0
        assert await is_right(pool, other)
        assert not pool.match([block_id(KEYS[0])])
        pool.dram.check_integrity()


async def test_a_block_deeper_than_a_record_can_say_is_refused() -> None:
    pool = make_pool()
    with closing(SharedMemoryPut(pool, Arrivals(pool))) as taker:
        async with offered() as request:
            request.depth = 2**32 - 2
            with pytest.raises(InvalidRequest, match="before it"):
                await taker.take(request)


@pytest.mark.parametrize("cost_s", [-1.0, math.inf, math.nan])
async def test_a_cost_that_has_no_mean_is_refused(cost_s: float) -> None:
    with closing(SharedMemoryPut(pool := make_pool(), Arrivals(pool))) as taker:
        async with offered() as request:
            request.recompute_s = cost_s
            with pytest.raises(InvalidRequest, match="infinite"):
                await taker.take(request)


async def test_a_block_that_would_come_before_itself_is_refused() -> None:
    pool = make_pool()
    await put(pool, meta(block_id(key(9)), block_id(KEYS[2]), 3))
    with closing(SharedMemoryPut(pool, Arrivals(pool))) as taker:
        async with offered() as request:
            request.parent, request.depth = key(9), 4
            response = await taker.take(request)
    assert response.num_new == 2
    assert pool.dram.reserved_bytes == 0
    assert await pool.drop([block_id(KEYS[0])]) == 2
    assert await pool.drop([block_id(key(9))]) == 1


async def test_runs_in_opposite_order_do_not_wait_for_each_other() -> None:
    arrivals = Arrivals(make_pool())
    one, middle, other = KEYS

    async def bring(keys: list[bytes]) -> int:
        async with arrivals.expecting(Run(run_metas(keys, b"", 0, b"", LAYOUT, 0.0))) as arrival:
            return len(arrival.drafts)

    async with asyncio.timeout(20), arrivals.expecting(Run(run_metas([middle], b"", 0, b"", LAYOUT, 0.0))):
        both = [asyncio.ensure_future(bring(keys)) for keys in ([one, middle, other], [other, middle, one])]
        await asyncio.sleep(0)
        assert not any(task.done() for task in both)
    async with asyncio.timeout(20):
        assert await asyncio.gather(*both) == [3, 3]
