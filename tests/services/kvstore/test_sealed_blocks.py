"""Somebody who can write to the disk and the cold tier, and who knows the format, cannot make KV that is served."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from halfmoon.catalog.entry import Tier
from halfmoon.errors import DataLoss, HalfmoonError
from halfmoon.kv.entry_codec import EntryCodec
from halfmoon.kv.kv_layout import KVLayout
from halfmoon.rpc.credentials.credential import credential_from, new_secret
from services.kvstore.assembly import running_store
from services.kvstore.pool import Pool
from services.kvstore.settings import KVStoreSettings
from services.kvstore.tiers.cold import PREFIX, object_name
from services.kvstore.tiers.record import HEADER_BYTES, decode_record, encode_record
from services.kvstore.tiers.seal import Seal
from tests.services.kvstore.blocks import LAYOUT, content, is_right, meta, put_chain, read
from tests.services.kvstore.cold_memory import ColdMemory
from tests.services.kvstore.pools import IDS, KEYS, pool, tiers, until

KEY = bytes(range(32))
OTHER = bytes(32)
RECORD_BYTES = HEADER_BYTES + LAYOUT.block_bytes
FORGED = b"\x42" * LAYOUT.block_bytes

Attack = Callable[[Path], None]


def forged(seal: Seal, depth: int, key_id: bytes | None = None) -> bytes:
    """A record of the chain's block with bytes of the attacker's choice, sealed with what the attacker has."""
    of = meta(IDS[depth], IDS[depth - 1] if depth else None, depth)
    head, payload = encode_record(of, EntryCodec(), FORGED, seal)
    return head[:8] + (key_id or head[8:16]) + head[16:] + bytes(payload)


def rewrite_the_bytes(directory: Path) -> None:
    [file] = block_files(directory)
    file.write_bytes(b"".join(forged(Seal(OTHER), depth) for depth in range(3)))


def rewrite_the_bytes_and_say_whose_key_it_is(directory: Path) -> None:
    [file] = block_files(directory)
    file.write_bytes(b"".join(forged(Seal(), depth, Seal(KEY).key_id) for depth in range(3)))


def rewrite_the_payloads(directory: Path) -> None:
    [file] = block_files(directory)
    data = bytearray(file.read_bytes())
    for start in range(0, len(data), RECORD_BYTES):
        data[start + HEADER_BYTES : start + RECORD_BYTES] = FORGED
    file.write_bytes(data)


def rewrite_the_digest(directory: Path) -> None:
    [file] = block_files(directory)
    data = bytearray(file.read_bytes())
    for start in range(0, len(data), RECORD_BYTES):
        record = forged(Seal(), start // RECORD_BYTES, Seal(KEY).key_id)
        data[start + HEADER_BYTES - 32 : start + RECORD_BYTES] = record[HEADER_BYTES - 32 :]
    file.write_bytes(data)


def swap_the_rows(directory: Path) -> None:
    edit_index(directory, "UPDATE blocks_v2 SET offset = (2 - depth) * ? WHERE depth != 1", RECORD_BYTES)
    edit_index(directory, "UPDATE blocks_v2 SET offset = 0 WHERE depth = 1")


def swap_the_records_ids(directory: Path) -> None:
    """Each record says that it is the next one of the prompt."""
    [file] = block_files(directory)
    data = bytearray(file.read_bytes())
    for depth in range(3):
        data[depth * RECORD_BYTES + 16 : depth * RECORD_BYTES + 40] = IDS[(depth + 1) % 3]
    file.write_bytes(data)
    edit_index(directory, "UPDATE blocks_v2 SET offset = ((depth + 2) % 3) * ?", RECORD_BYTES)


def lie_about_the_layout(directory: Path) -> None:
    """Of equal size: other heads, so what would be served is scrambled."""
    other = KVLayout(2, 4, 4, "bfloat16", 16)
    assert other.block_bytes == LAYOUT.block_bytes
    edit_index(directory, "UPDATE blocks_v2 SET num_kv_heads = 4, head_dim = 4")


def lie_about_the_place(directory: Path) -> None:
    """All are first blocks now."""
    edit_index(directory, "UPDATE blocks_v2 SET parent = NULL, depth = depth + 1")


def block_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.blocks"))


def edit_index(directory: Path, statement: str, *values: Any) -> None:
    connection = sqlite3.connect(directory / "index.sqlite")
    with connection:
        connection.execute(statement, values)
    connection.close()


async def nothing_is_served(it: Pool) -> None:
    for block in IDS[:3]:
        with pytest.raises(HalfmoonError):
            await read(it, block)
    assert it.match(IDS[:3]) == []


@pytest.mark.parametrize(
    "attack",
    [
        rewrite_the_bytes,
        rewrite_the_bytes_and_say_whose_key_it_is,
        rewrite_the_payloads,
        rewrite_the_digest,
        swap_the_rows,
        swap_the_records_ids,
        lie_about_the_layout,
        lie_about_the_place,
    ],
)
async def test_forged_blocks_on_disk_are_misses(
    tmp_path: Path, attack: Attack, caplog: pytest.LogCaptureFixture
) -> None:
    async with pool(directory=tmp_path, block_key=KEY) as it:
        await put_chain(it, KEYS[:3])
        await it.settled()
    attack(tmp_path)
    async with pool(directory=tmp_path, block_key=KEY) as it:
        await nothing_is_served(it)
        assert it.counts.by_tier[Tier.DISK]["corrupted"] >= 1
        assert sum(record.msg == "block.refused" for record in caplog.records if record.levelname == "WARNING") == 1
        await put_chain(it, KEYS[:3])  # computed again
        assert [await is_right(it, block) for block in IDS[:3]] == [True] * 3


async def test_what_has_the_key_is_served(tmp_path: Path) -> None:
    """The attacks above fail for want of the key alone."""
    async with pool(directory=tmp_path, block_key=KEY) as it:
        await put_chain(it, KEYS[:3])
        await it.settled()
    [file] = block_files(tmp_path)
    file.write_bytes(b"".join(forged(Seal(KEY), depth) for depth in range(3)))
    async with pool(directory=tmp_path, block_key=KEY) as it:
        assert await read(it, IDS[0]) == FORGED


async def test_forged_objects_are_misses() -> None:
    cold = ColdMemory()
    async with pool(cold=cold, block_key=KEY) as it:
        await put_chain(it, KEYS[:3])
        await it.settled()
    names = sorted(cold.objects, key=lambda name: int(name.rpartition("-")[2]))
    cold.objects[names[0]] = forged(Seal(), 0, Seal(KEY).key_id)
    async with pool(cold=cold, block_key=KEY) as it:
        await listed(it)
        with pytest.raises(DataLoss):
            await read(it, IDS[0])
        assert it.match(IDS[:3]) == []
        assert await read(it, IDS[1]) == content(IDS[1]), "it is whole and may be of use again"


@pytest.mark.parametrize(("of", "under"), [(1, meta(IDS[1])), (0, meta(IDS[5])), (2, meta(IDS[2], IDS[0], 1))])
async def test_an_object_copied_under_another_name_is_a_miss(of: int, under: Any) -> None:
    cold = ColdMemory()
    async with pool(cold=cold, block_key=KEY) as it:
        await put_chain(it, KEYS[:3])
        await it.settled()
        assert it.cold is not None
        copied = cold.objects[it.cold.name_of(meta(IDS[of], IDS[of - 1] if of else None, of))]
        first = cold.objects[it.cold.name_of(meta(IDS[0]))]
        cold.objects.clear()
        cold.objects[it.cold.name_of(meta(IDS[0]))] = first
        cold.objects[it.cold.name_of(under)] = copied
    async with pool(cold=cold, block_key=KEY) as it:
        await listed(it)
        assert len(it.match([under.id])) == 1, "that much a name can say"
        with pytest.raises(DataLoss):
            await read(it, under.id)
        assert tiers(it, under.id) == []


async def test_rows_that_make_a_ring_are_misses(tmp_path: Path) -> None:
    async with pool(directory=tmp_path, block_key=KEY) as it:
        await put_chain(it, KEYS[:3])
        await it.settled()
    edit_index(tmp_path, "UPDATE blocks_v2 SET parent = ? WHERE depth = 0", IDS[2])
    async with pool(directory=tmp_path, block_key=KEY) as it:
        assert await read(it, IDS[1]) == content(IDS[1])
        assert tiers(it, IDS[2]) == []
        with pytest.raises(DataLoss):
            await read(it, IDS[0])
        assert await it.drop(IDS[:3]) == 1


async def test_objects_whose_names_make_a_ring_are_misses() -> None:
    cold = ColdMemory()
    async with pool(cold=cold, block_key=KEY) as it:
        assert it.cold is not None
        names = [it.cold.name_of(one) for one in (meta(IDS[0], IDS[1]), meta(IDS[1], IDS[0], 1), meta(IDS[2], IDS[2]))]
    cold.objects.update(dict.fromkeys(names, b"any"))
    async with pool(cold=cold, block_key=KEY) as it:
        await until(lambda: IDS[0] in it.catalog, it)
        assert [tiers(it, block) for block in IDS[:3]] == [[Tier.COLD], [], []]
        assert await it.drop(IDS[:3]) == 1


async def listed(it: Pool) -> None:
    assert it.cold is not None
    for of, num_bytes in await it.cold.list(5.0):
        if it.catalog.get(of.id) is None:
            it.catalog.add(of, Tier.COLD, num_bytes)


async def test_another_clusters_blocks_are_neither_seen_nor_deleted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cold = ColdMemory()
    async with pool(directory=tmp_path, cold=cold, block_key=OTHER) as it:
        await put_chain(it, KEYS[:3])
        await it.settled()
    theirs = dict(cold.objects)
    async with pool(directory=tmp_path, cold=cold, block_key=KEY) as it:
        await listed(it)
        assert it.match(IDS[:1]) == []
        assert [vars(record)["num_blocks"] for record in caplog.records if record.msg == "disk.other_key"] == [3]
        assert not block_files(tmp_path)
        await put_chain(it, KEYS[:3])
        await it.settled()
        await it.drop(IDS[:1])
        assert it.cold is not None
        await it.cold.sweep()
    assert cold.objects == theirs


async def test_blocks_of_the_old_format_are_misses(tmp_path: Path) -> None:
    (tmp_path / "00000001.blocks").write_bytes(b"HMKB\x01" + bytes(RECORD_BYTES))
    edit_index(tmp_path, "CREATE TABLE blocks_v1 (id BLOB PRIMARY KEY, segment INTEGER, offset INTEGER)")
    edit_index(tmp_path, "INSERT INTO blocks_v1 VALUES (?, 1, 0)", IDS[0])
    cold = ColdMemory()
    cold.objects["halfmoon-kv-v1/" + object_name(meta(IDS[0]))] = b"HMKB\x01" + bytes(RECORD_BYTES)
    async with pool(directory=tmp_path, cold=cold, block_key=KEY) as it:
        await listed(it)
        assert it.match(IDS[:1]) == []
        assert not block_files(tmp_path)
    old = b"HMKB\x01" + forged(Seal(KEY), 0)[5:]
    with pytest.raises(DataLoss):
        decode_record(old, IDS[0], Seal(KEY))


async def test_a_store_seals_with_the_key_of_its_cluster(tmp_path: Path) -> None:
    settings = KVStoreSettings(dram_bytes=1 << 20, disk_dir=tmp_path)
    ours, theirs = (credential_from(new_secret(), "store") for _ in range(2))
    async with running_store(settings, ours) as store:
        await put_chain(store.pool, KEYS[:3])
        await store.pool.settled()
    [file] = block_files(tmp_path)
    assert len(decode_record(file.read_bytes()[:RECORD_BYTES], IDS[0], Seal(ours.block_key)).payload) > 0
    async with running_store(settings, ours) as store:
        assert await is_right(store.pool, IDS[2])
    for stranger in (None, theirs):
        async with running_store(settings, stranger) as store:
            assert store.pool.match(IDS[:3]) == []


def test_keys_have_names_that_do_not_tell_them() -> None:
    assert Seal(KEY).key_id == Seal(KEY).key_id != Seal(OTHER).key_id
    assert Seal(KEY).digest(b"a", b"bc") != Seal(OTHER).digest(b"a", b"bc")
    assert Seal().key_id not in (Seal(KEY).key_id, Seal(OTHER).key_id)
    assert object_name(meta(IDS[0])) not in PREFIX


async def test_a_block_on_its_way_back_to_disk_is_sealed_anew(tmp_path: Path) -> None:
    """What is copied from the disk to the cold tier was checked, and carries the tier's own seal."""
    cold = ColdMemory()
    async with pool(num_blocks=4, directory=tmp_path, cold=cold, block_key=KEY) as it:
        await put_chain(it, KEYS[:3])
        await it.settled()
        assert it.cold is not None
        data = cold.objects[it.cold.name_of(meta(IDS[0]))]
    assert bytes(decode_record(data, IDS[0], Seal(KEY)).payload) == content(IDS[0])
    with pytest.raises(DataLoss, match="another cluster"):
        decode_record(data, IDS[0], Seal(OTHER))
