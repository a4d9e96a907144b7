"""The end of a prompt keeps its precision; what the prompt has left behind becomes coarse, in every tier."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from halfmoon.catalog.block_identity import block_id
from halfmoon.kv.codec import Codec, decode, encode
from halfmoon.kv.codec.lossless import Lossless
from halfmoon.kv.entry_codec import EntryCodec
from services.kvstore.options import PoolOptions
from services.kvstore.pool import Pool
from services.kvstore.tiers.disk import DiskTier
from tests.services.kvstore.blocks import LAYOUT, content, key, meta, put, put_chain, read

WINDOW = 128 // LAYOUT.block_tokens
KEYS = [key(n) for n in range(WINDOW + 8)]
IDS = [block_id(one) for one in KEYS]
INT2 = EntryCodec(Codec.INT2)


def coarse(block: bytes) -> bytes:
    shape = LAYOUT.shape(LAYOUT.num_layers, LAYOUT.block_tokens)
    bits = np.frombuffer(content(block), np.uint16).reshape(shape)
    return decode(Codec.INT2, encode(Codec.INT2, bits, LAYOUT.dtype), shape, LAYOUT.dtype).tobytes()


def in_memory(options: PoolOptions, disk: DiskTier | None = None) -> Pool:
    return Pool(memoryview(bytearray(32 * LAYOUT.block_bytes)), options, disk)


async def num_coarse(pool: Pool, blocks: list[bytes]) -> int:
    """How many of the leading blocks are coarse; the rest has to be exact."""
    cells = [await read(pool, block) for block in blocks]
    num = next((n for n, (got, block) in enumerate(zip(cells, blocks, strict=True)) if got == content(block)), None)
    assert num is not None
    assert [got == coarse(block) for got, block in zip(cells[:num], blocks, strict=False)] == [True] * num
    assert [got == content(block) for got, block in zip(cells[num:], blocks[num:], strict=True)] == [True] * (
        len(blocks) - num
    )
    return num


async def test_a_block_becomes_coarse_when_its_prompt_has_gone_on() -> None:
    async with in_memory(PoolOptions(dram_codec=INT2, drain_s=0)).running() as pool:
        await put_chain(pool, KEYS[:WINDOW])
        assert await num_coarse(pool, IDS[:WINDOW]) == 0
        used = pool.catalog.used_bytes
        await put(pool, meta(IDS[WINDOW], IDS[WINDOW - 1], WINDOW))
        assert await num_coarse(pool, IDS[: WINDOW + 1]) == 1
        for n in range(WINDOW + 1, WINDOW + 4):
            await put(pool, meta(IDS[n], IDS[n - 1], n))
        assert await num_coarse(pool, IDS[: WINDOW + 4]) == 4
        await put(pool, meta(IDS[1], IDS[0], 1))  # it comes a second time
        assert await num_coarse(pool, IDS[: WINDOW + 4]) == 4
        assert used(next(iter(pool.catalog.get(IDS[0]).tiers))) < (WINDOW + 4) * LAYOUT.block_bytes  # type: ignore[union-attr]
        pool.catalog.check_integrity()
        pool.dram.check_integrity()


@pytest.mark.parametrize("codec", [INT2, EntryCodec(Codec.INT2, Lossless.ZSTD)])
async def test_a_slower_tier_renews_what_it_had_whole(tmp_path: Path, codec: EntryCodec) -> None:
    options = PoolOptions(disk_codec=codec, drain_s=0)
    async with in_memory(options, DiskTier(tmp_path, 1 << 20)).running() as pool:
        await put_chain(pool, KEYS[:WINDOW])
        await pool.settled()  # all of it is on the disk, exactly
        for n in range(WINDOW, WINDOW + 3):
            await put(pool, meta(IDS[n], IDS[n - 1], n))
        await pool.settled()
        assert await num_coarse(pool, IDS[: WINDOW + 3]) == 0  # memory has them as they were
        pool.catalog.check_integrity()
    async with in_memory(options, DiskTier(tmp_path, 1 << 20)).running() as pool:
        assert await num_coarse(pool, IDS[: WINDOW + 3]) == 3


async def test_the_longest_prompt_decides() -> None:
    async with in_memory(PoolOptions(dram_codec=INT2, drain_s=0)).running() as pool:
        await put_chain(pool, KEYS[: WINDOW + 1])
        branch = block_id(key(999))
        await put(pool, meta(branch, IDS[0], 1))
        assert await read(pool, IDS[0]) == coarse(IDS[0])
        assert await read(pool, branch) == content(branch)
