"""The disk tier by itself: what it brings back, what it makes of damage, how it keeps to its budget."""

from __future__ import annotations

import math
import os
import random
import shutil
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.catalog.block_identity import block_id
from halfmoon.errors import DataLoss, InvalidRequest, NotFound
from halfmoon.kv.entry_codec import EntryCodec
from services.kvstore.tiers.disk import DiskTier, Write
from services.kvstore.tiers.record import HEADER_BYTES, decode_record, encode_record
from services.kvstore.tiers.seal import Seal
from tests.services.kvstore.blocks import LAYOUT, content, key, meta

RECORD_BYTES = HEADER_BYTES + LAYOUT.block_bytes
IDS = [block_id(key(n)) for n in range(200)]
SEAL = Seal()


@asynccontextmanager
async def opened(directory: Path, budget_bytes: int = 1 << 20) -> AsyncIterator[DiskTier]:
    """The tier, with all that was there admitted."""
    tier = DiskTier(directory, budget_bytes)
    for row in tier.recovered():
        tier.admit(row)
    try:
        yield tier
    finally:
        await tier.close()


def record(block: bytes) -> Write:
    return meta(block), encode_record(meta(block), EntryCodec(), content(block), SEAL)


async def whole(tier: DiskTier, block: bytes) -> bool:
    return bytes((await tier.read(block)).payload) == content(block)


def block_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.blocks"))


async def test_what_was_written_is_there_after_a_restart(tmp_path: Path) -> None:
    async with opened(tmp_path) as tier:
        stored = await tier.write([record(block) for block in IDS[:3]])
        assert [num_bytes for _, num_bytes in stored] == [RECORD_BYTES] * 3
        assert await whole(tier, IDS[1])
        tier.forget(IDS[2])
    async with opened(tmp_path) as tier:
        assert await whole(tier, IDS[0])
        assert await whole(tier, IDS[1])
        with pytest.raises(NotFound):
            await tier.read(IDS[2])


async def test_the_tail_that_no_row_names_is_cut_off(tmp_path: Path) -> None:
    async with opened(tmp_path) as tier:
        await tier.write([record(IDS[0])])
    [file] = block_files(tmp_path)
    with file.open("ab") as stream:
        stream.write(b"half a record")
    (tmp_path / "00000777.blocks").write_bytes(b"a file that no row names")
    async with opened(tmp_path) as tier:
        assert await whole(tier, IDS[0])
        assert block_files(tmp_path) == [file]
        assert file.stat().st_size == RECORD_BYTES
        await tier.write([record(IDS[1])])
        assert file.stat().st_size == RECORD_BYTES, "an old file is never appended to"


async def test_a_directory_has_one_store_at_a_time(tmp_path: Path) -> None:
    async with opened(tmp_path) as tier:
        await tier.write([record(IDS[0])])
        with pytest.raises(OSError, match="another store uses it"):
            DiskTier(tmp_path, 1 << 20)
        assert await whole(tier, IDS[0])
        assert await tier.check() == "same"
    async with opened(tmp_path) as tier:
        assert await whole(tier, IDS[0])


async def test_a_tier_that_begins_anew_has_its_directory_to_itself(tmp_path: Path) -> None:
    directory = tmp_path / "blocks"
    async with opened(directory) as tier:
        shutil.rmtree(directory)
        (directory / "index.sqlite").mkdir(parents=True)  # no index can be opened
        assert await tier.check() == "away"
        assert await tier.check() == "away"
        (directory / "index.sqlite").rmdir()
        assert await tier.check() == "anew"
        with pytest.raises(OSError, match="another store uses it"):
            DiskTier(directory, 1 << 20)
        await tier.write([record(IDS[0])])
        shutil.rmtree(directory)
        async with opened(directory) as other:
            assert await tier.check() == "away"
            assert "another store uses it" in tier.away.reason
            await other.write([record(IDS[1])])
        assert await tier.check() == "anew"
        assert [row.meta.id for row in tier.recovered()] == [IDS[1]]


async def test_a_directory_that_could_not_be_read_is_not_locked_by_that(tmp_path: Path) -> None:
    async with opened(tmp_path) as tier:
        (tmp_path / "index.sqlite").unlink()
        unreadable = tmp_path / "00000009.blocks"
        unreadable.symlink_to("nowhere")
        assert await tier.check() == "away"
        unreadable.unlink()
        assert await tier.check() == "anew"


async def test_rows_without_their_bytes_are_dropped(tmp_path: Path) -> None:
    async with opened(tmp_path) as tier:
        await tier.write([record(IDS[0]), record(IDS[1])])
    [file] = block_files(tmp_path)
    os.truncate(file, RECORD_BYTES + 5)
    tier = DiskTier(tmp_path, 1 << 20)
    assert [row.meta.id for row in tier.recovered()] == [IDS[0]]
    await tier.close()


@pytest.mark.parametrize("offset", [0, 5, 20, HEADER_BYTES - 1, HEADER_BYTES, RECORD_BYTES - 1])
async def test_a_flipped_bit_is_data_loss(tmp_path: Path, offset: int) -> None:
    async with opened(tmp_path) as tier:
        await tier.write([record(IDS[0])])
        [file] = block_files(tmp_path)
        data = bytearray(file.read_bytes())
        data[offset] ^= 4
        file.write_bytes(data)
        with pytest.raises(DataLoss):
            await tier.read(IDS[0])


async def test_a_missing_file_is_data_loss(tmp_path: Path) -> None:
    async with opened(tmp_path) as tier:
        await tier.write([record(IDS[0])])
        block_files(tmp_path)[0].unlink()
        with pytest.raises(DataLoss):
            await tier.read(IDS[0])


async def test_a_file_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (alien := tmp_path / "copy of 00000001.blocks").write_bytes(b"any")
    async with opened(tmp_path) as tier:
        await tier.write([record(IDS[0])])
        assert await tier.check() == "same"
        assert await whole(tier, IDS[0])
    assert alien.exists()


async def test_a_damaged_index_begins_anew(tmp_path: Path) -> None:
    async with opened(tmp_path) as tier:
        await tier.write([record(IDS[0])])
    (tmp_path / "index.sqlite").write_bytes(b"not a database" * 1000)
    async with opened(tmp_path) as tier:
        with pytest.raises(NotFound):
            await tier.read(IDS[0])
        await tier.write([record(IDS[0])])
        assert await whole(tier, IDS[0])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dtype", "bfloat12"),
        ("num_layers", 0),
        ("offset", -1),
        ("parent", b"short"),
        ("tenant", "\u00e9"),
        ("depth", "x"),
        ("recompute_s", "x"),
        ("recompute_s", -1.0),
        ("recompute_s", math.inf),
        ("expires_at_s", "x"),
    ],
)
async def test_an_index_with_a_row_that_cannot_be_begins_anew(tmp_path: Path, name: str, value: object) -> None:
    async with opened(tmp_path) as tier:
        await tier.write([record(IDS[0])])
    with closing(sqlite3.connect(tmp_path / "index.sqlite")) as index:
        index.execute(f"UPDATE blocks_v2 SET {name} = ?", (value,))
        index.commit()
    async with opened(tmp_path) as tier:
        with pytest.raises(NotFound):
            await tier.read(IDS[0])
        await tier.write([record(IDS[0])])
        assert await whole(tier, IDS[0])


@pytest.mark.parametrize("place", [0, 16, 18, 19, 44, 59])
async def test_an_index_with_another_header_begins_anew(tmp_path: Path, place: int) -> None:
    async with opened(tmp_path) as tier:
        await tier.write([record(IDS[0])])
    with (tmp_path / "index.sqlite").open("r+b") as index:
        index.seek(place)
        index.write(b"\x7f")
    async with opened(tmp_path) as tier:
        await tier.write([record(IDS[1])])
        assert await whole(tier, IDS[1])


async def test_a_store_starts_whatever_bits_of_its_index_were_flipped(tmp_path: Path) -> None:
    whole_index, chance = tmp_path / "index", random.Random(1)
    async with opened(tmp_path / "0") as tier:
        await tier.write([record(block) for block in IDS[:60]])
    (tmp_path / "0" / "index.sqlite").rename(whole_index)
    for attempt in range(1, 60):
        bits = bytearray(whole_index.read_bytes())
        for _ in range(chance.choice([1, 3, 20])):
            bits[chance.randrange(len(bits))] ^= 1 << chance.randrange(8)
        (directory := tmp_path / str(attempt)).mkdir()
        (directory / "index.sqlite").write_bytes(bits)
        async with opened(directory) as tier:
            await tier.write([record(block) for block in IDS[:60]])
            assert all([await whole(tier, block) for block in IDS[:60]])


async def test_files_stay_within_the_budget_however_much_is_replaced(tmp_path: Path) -> None:
    budget = 64 * RECORD_BYTES
    async with opened(tmp_path, budget) as tier:
        live: list[bytes] = []
        files: set[Path] = set()
        for block in IDS:
            while (len(live) + 1) * RECORD_BYTES > tier.live_budget_bytes:
                tier.forget(live.pop(len(live) // 2))
            assert await tier.compact(RECORD_BYTES) == []
            await tier.write([record(block)])
            live.append(block)
            assert sum(file.stat().st_size for file in block_files(tmp_path)) == tier.file_bytes <= budget
            files.update(block_files(tmp_path))
        assert len(files - set(block_files(tmp_path))) > 3  # were compacted
        assert [await whole(tier, block) for block in live] == [True] * len(live)
    async with opened(tmp_path, budget) as tier:
        assert [await whole(tier, block) for block in live] == [True] * len(live)


async def test_compaction_tells_what_it_found_damaged(tmp_path: Path) -> None:
    async with opened(tmp_path, 64 * RECORD_BYTES) as tier:  # four records in a file
        await tier.write([record(block) for block in IDS[:48]])
        for block in IDS[:48:2]:
            tier.forget(block)
        for file in block_files(tmp_path):
            data = bytearray(file.read_bytes())
            data[-1] ^= 1
            file.write_bytes(data)
        damaged = await tier.compact(60 * RECORD_BYTES)
        assert set(damaged) == set(IDS[3:48:4])
        assert [await whole(tier, block) for block in IDS[1:48:4]] == [True] * 12


async def test_a_write_that_fails_leaves_nothing_and_the_next_one_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as tier:
        await tier.write([record(IDS[0])])
        real = os.write

        def full(file: int, data: memoryview) -> int:
            real(file, data[:100])
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space"):
            await tier.write([record(IDS[1]), record(IDS[2])])
        with pytest.raises(OSError, match="No space"):
            await tier.write([record(IDS[2])])
        monkeypatch.undo()
        assert [file.stat().st_size for file in block_files(tmp_path)] == [RECORD_BYTES]
        with pytest.raises(NotFound):
            await tier.read(IDS[1])
        await tier.write([record(IDS[1])])
        assert await whole(tier, IDS[0])
        assert await whole(tier, IDS[1])


async def test_a_pin_lasts(tmp_path: Path) -> None:
    async with opened(tmp_path) as tier:
        await tier.write([record(IDS[0]), record(IDS[1])])
        await tier.flush([(IDS[1], True)])
    tier = DiskTier(tmp_path, 1 << 20)
    assert {row.meta.id: row.pinned for row in tier.recovered()} == {IDS[0]: False, IDS[1]: True}
    await tier.close()


@given(st.binary(max_size=200))
def test_what_is_not_a_record_is_data_loss(data: bytes) -> None:
    with pytest.raises(DataLoss):
        decode_record(data, IDS[0], SEAL)


def test_a_record_says_all_about_its_block() -> None:
    wanted = replace(meta(IDS[1], IDS[0], 7), recompute_s=0.25, expires_at_s=99.5, tenant="somebody")
    head, payload = encode_record(wanted, EntryCodec.parse("int8+zstd"), b"payload", SEAL)
    got = decode_record(head + payload, IDS[1], SEAL)
    assert (got.meta, str(got.codec), bytes(got.payload)) == (wanted, "int8+zstd", b"payload")
    with pytest.raises(DataLoss):
        decode_record(head + payload, IDS[0], SEAL)


@pytest.mark.parametrize("name", ["raw", "lz4", "zstd", "int8", "int4", "fp8", "int8+zstd", "int4+lz4"])
def test_codecs_by_name(name: str) -> None:
    codec = EntryCodec.parse(name)
    assert str(codec) == name
    cells = content(IDS[0])
    payload = codec.encode(cells, LAYOUT)
    got = codec.decode(payload, LAYOUT)
    assert got.nbytes == LAYOUT.block_bytes
    if name in ("raw", "lz4", "zstd"):
        assert bytes(got) == cells
    else:
        assert memoryview(payload).nbytes < LAYOUT.block_bytes
    if name != "raw":
        with pytest.raises((DataLoss, InvalidRequest)):
            codec.decode(memoryview(payload)[: LAYOUT.block_bytes // 4], LAYOUT)


@pytest.mark.parametrize("name", ["", "gzip", "int8+int4", "lz4+zstd", "none", "int8+"])
def test_what_is_no_codec(name: str) -> None:
    with pytest.raises(InvalidRequest):
        EntryCodec.parse(name)
