"""Encoding takes a while beside the event loop: what happens to a block meanwhile counts."""

from __future__ import annotations

import asyncio

from halfmoon.catalog.block_identity import block_id
from halfmoon.catalog.entry import Tier
from halfmoon.kv.codec import Codec
from halfmoon.kv.entry_codec import EntryCodec
from services.kvstore.options import PoolOptions
from services.kvstore.pool import Pool
from services.kvstore.tiers.dram_encoder import DramEncoder
from tests.services.kvstore.blocks import LAYOUT, key, meta, put_chain

INT2 = EntryCodec(Codec.INT2)
IDS = [block_id(key(n)) for n in range(128 // LAYOUT.block_tokens + 1)]


def in_memory(codec: EntryCodec) -> Pool:
    return Pool(memoryview(bytearray(32 * LAYOUT.block_bytes)), PoolOptions(dram_codec=codec))


async def test_a_block_is_visible_once_it_is_encoded() -> None:
    pool = in_memory(EntryCodec(Codec.INT8))
    draft = pool.reserve(meta(IDS[0]))
    entering = asyncio.create_task(pool.commit(draft))
    await asyncio.sleep(0)
    assert pool.catalog.get(IDS[0]) is None
    await entering
    assert pool.catalog.used_bytes(Tier.DRAM) < LAYOUT.block_bytes
    pool.dram.check_integrity()


async def test_a_block_that_is_dropped_while_it_is_encoded_anew_does_not_come_back() -> None:
    pool = in_memory(EntryCodec())
    await put_chain(pool, [key(n) for n in range(len(IDS))])
    encoding = asyncio.create_task(
        DramEncoder(INT2, pool.dram, pool.catalog).encode_left_behind(meta(IDS[-1], IDS[-2], len(IDS) - 1))
    )
    await asyncio.sleep(0)
    assert await pool.drop([IDS[0]]) > 0
    await encoding
    assert not pool.catalog.is_in(IDS[0], Tier.DRAM)
    assert pool.catalog.num_blocks(Tier.DRAM) == 0
    pool.catalog.check_integrity()
    pool.dram.check_integrity()
