"""What happens to the disk while the store runs: it fills up, is deleted, unmounted, made read-only."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path

import pytest

from halfmoon.catalog.entry import Tier
from halfmoon.errors import InvalidRequest, NotFound, Unavailable
from services.kvstore import assembly
from services.kvstore.options import PoolOptions
from services.kvstore.pool import Pool
from services.kvstore.settings import KVStoreSettings
from services.kvstore.tiers.disk import DiskTier
from services.kvstore.tiers.disk_room import DiskRoom, Space, space_of
from tests.services.kvstore.blocks import is_right, put_chain
from tests.services.kvstore.pools import IDS, KEYS, pool, tiers

SLOW = PoolOptions(sweep_s=3600.0, retry_pause_s=0.001, drain_s=0.0)  # so that only writes and the test look


@asynccontextmanager
async def on_disk(directory: Path, num: int = 4, options: PoolOptions = SLOW) -> AsyncIterator[Pool]:
    """A pool with the first blocks in memory and on disk."""
    async with pool(directory=directory, options=options) as it:
        await put_chain(it, KEYS[:num])
        await it.settled()
        assert tiers(it, IDS[num - 1]) == [Tier.DRAM, Tier.DISK]
        yield it


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.msg for record in caplog.records if record.levelno >= logging.WARNING]


async def test_a_store_waits_for_the_one_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, attempts, again = asyncio.get_running_loop(), count(1), asyncio.Event()

    def tried(directory: Path, *others: object) -> DiskTier:
        if next(attempts) == 3:
            loop.call_soon_threadsafe(again.set)
        return DiskTier(directory, *others)  # type: ignore[arg-type]

    async def started() -> bool:
        async with assembly.running_store(KVStoreSettings(dram_bytes=1 << 20, disk_dir=tmp_path)) as store:
            return store.pool.disk is not None

    monkeypatch.setattr(assembly, "DiskTier", tried)
    before = DiskTier(tmp_path, 1 << 20)
    starting = asyncio.create_task(started())
    await again.wait()
    await before.close()
    assert await starting
    monkeypatch.setattr(assembly, "_PREDECESSOR_S", 0.0)
    before = DiskTier(tmp_path, 1 << 20)
    with pytest.raises(InvalidRequest, match="another store uses it"):
        await started()
    await before.close()


def remove_all(directory: Path) -> None:
    shutil.rmtree(directory)


def remove_the_index(directory: Path) -> None:
    (directory / "index.sqlite").unlink()


def remove_the_files(directory: Path) -> None:
    for file in directory.glob("*.blocks"):
        file.unlink()


def replace_the_directory(directory: Path) -> None:
    directory.rename(directory.with_name("away"))
    directory.mkdir()


@pytest.mark.parametrize("remove", [remove_all, remove_the_index, remove_the_files, replace_the_directory])
async def test_a_deleted_directory_is_noticed_by_the_next_write(
    tmp_path: Path, remove: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "blocks"
    async with on_disk(directory) as it:
        for block in (IDS[3], IDS[2]):
            it.catalog.lose(block, Tier.DRAM)
        remove(directory)
        await put_chain(it, KEYS[8:9])
        await it.settled()
        assert warnings(caplog) == ["disk.began_anew"]
        assert it.match(IDS[:4]) == it.match(IDS[:2]), "what was on disk alone is gone"
        assert len(it.match(IDS[:2])) == 2
        for block in (*IDS[:2], IDS[8]):
            assert tiers(it, block) == [Tier.DRAM, Tier.DISK], "what is in memory was written again"
    async with pool(directory=directory) as it:
        assert [await is_right(it, block) for block in (*IDS[:2], IDS[8])] == [True] * 3


async def test_a_deleted_directory_is_noticed_without_a_write(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = tmp_path / "blocks"
    async with on_disk(directory) as it:
        it.catalog.lose(IDS[3], Tier.DRAM)
        shutil.rmtree(directory)
        await it.look_after_disk()
        await it.look_after_disk()
        assert warnings(caplog) == ["disk.began_anew"]
        with pytest.raises(NotFound):
            await it.acquire(IDS[3])
        await it.settled()
        assert tiers(it, IDS[2]) == [Tier.DRAM, Tier.DISK]


async def test_a_directory_that_cannot_be_made_again_is_an_outage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "over" / "blocks"
    async with on_disk(directory) as it:
        shutil.rmtree(directory.parent)
        directory.parent.write_text("a file is in the way")
        for _ in range(3):
            await it.look_after_disk()
        assert warnings(caplog) == ["disk.away"]
        assert it.trouble(Tier.DISK)
        assert await is_right(it, IDS[3])
        directory.parent.unlink()
        await it.look_after_disk()
        await it.settled()
        assert it.trouble(Tier.DISK) == ""
        assert tiers(it, IDS[3]) == [Tier.DRAM, Tier.DISK]


async def test_a_full_disk_is_one_warning_and_a_pause(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The worst case: the tier believes that there is room until the file system says otherwise."""
    directory = small_disk / "blocks"
    disk = DiskTier(directory, DiskRoom(64 << 20, 0, lambda _: Space(1 << 30, 1 << 30)))
    it = Pool(memoryview(bytearray(1 << 20)), PoolOptions(sweep_s=0.001, retry_pause_s=0.001, drain_s=0.0), disk)
    async with it.running():
        await put_chain(it, KEYS[:8])
        await it.settled()
        fill(small_disk / "others")
        for n in range(8, 40):
            await put_chain(it, KEYS[n : n + 1])
        while it.counts.by_tier[Tier.DISK]["full"] < 3:
            await it.look_after_disk()
        assert "No space left" in it.trouble(Tier.DISK)
        assert [await is_right(it, block) for block in IDS[:40]] == [True] * 40
        it.catalog.lose(IDS[7], Tier.DRAM)
        assert await is_right(it, IDS[7]), "a full disk can be read"
        assert warnings(caplog) == ["demotion.failed"]
        (small_disk / "others").unlink()
        await it.settled()
        assert tiers(it, IDS[39]) == [Tier.DRAM, Tier.DISK]
        assert it.trouble(Tier.DISK) == ""
        assert warnings(caplog) == ["demotion.failed"]
    it = Pool(memoryview(bytearray(1 << 20)), disk=DiskTier(directory, 64 << 20))
    async with it.running():
        assert it.catalog.num_blocks(Tier.DISK) == 40
        assert [await is_right(it, block) for block in IDS[:40]] == [True] * 40


def fill(path: Path) -> None:
    """Takes the last byte."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT)
    with suppress(OSError):
        while True:
            os.write(file, bytes(4096))
    os.close(file)


async def test_others_get_their_room_on_a_small_disk(small_disk: Path) -> None:
    disk = DiskTier(small_disk / "blocks", DiskRoom(64 << 20))  # a tenth is left free
    it = Pool(memoryview(bytearray(2 << 20)), PoolOptions(sweep_s=3600.0, retry_pause_s=0.001, drain_s=0.0), disk)
    async with it.running():
        for n in range(64):
            for m in range(14):
                await put_chain(it, [KEYS[n][:8] + m.to_bytes(8, "big")])
        await it.settled()
        reserve = space_of(small_disk).total_bytes // 10
        index = size_of_index(small_disk / "blocks")
        assert it.catalog.num_blocks(Tier.DISK) > 200
        assert space_of(small_disk).free_bytes >= reserve - index
        (small_disk / "others").write_bytes(bytes(150 << 10))
        await it.look_after_disk()
        assert space_of(small_disk).free_bytes >= reserve


def size_of_index(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.glob("index*"))


def modes_in(directory: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mode & 0o777 for path in (directory, *directory.iterdir())}


@pytest.fixture
def bound_disk(small_disk: Path) -> Iterator[Path]:
    """The same file system at a place where it can be unmounted and mounted again."""
    directory = small_disk.with_name("bound")
    directory.mkdir()
    mount_again(directory)
    yield directory
    subprocess.run(["umount", "-l", str(directory)], check=False, capture_output=True)


def mount_again(bound: Path) -> None:
    subprocess.run(["mount", "--bind", str(bound.with_name("mounted")), str(bound)], check=True)


def unmount(bound: Path) -> None:
    subprocess.run(["umount", "-l", str(bound)], check=True)


async def test_an_unmounted_disk_is_an_outage_and_comes_back(
    bound_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with on_disk(bound_disk / "blocks") as it:
        it.catalog.lose(IDS[3], Tier.DRAM)
        unmount(bound_disk)
        for _ in range(2):
            await it.look_after_disk()
        assert warnings(caplog) == ["disk.away"]
        assert "not mounted" in it.trouble(Tier.DISK)
        assert os.listdir(bound_disk) == [], "nothing is written beneath the mount point"
        with pytest.raises(Unavailable):
            await it.acquire(IDS[3])
        assert len(it.match(IDS[:4])) == 3
        assert await is_right(it, IDS[2])
        await put_chain(it, KEYS[8:9])
        assert await is_right(it, IDS[8])
        mount_again(bound_disk)
        await it.look_after_disk()
        assert await is_right(it, IDS[3]), "an outage is no loss"
        await it.settled()
        assert tiers(it, IDS[8]) == [Tier.DRAM, Tier.DISK]
        assert it.trouble(Tier.DISK) == ""


async def test_a_disk_that_cannot_be_written_is_read_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with on_disk(tmp_path / "blocks") as it:
        it.catalog.lose(IDS[3], Tier.DRAM)
        real = os.write

        def read_only(file: int, data: bytes) -> int:
            if len(data) > 64:  # a record; asyncio's own wake-ups go through
                raise OSError(errno.EROFS, "Read-only file system")
            return real(file, data)

        monkeypatch.setattr(os, "write", read_only)
        await put_chain(it, KEYS[8:9])
        while it.counts.by_tier[Tier.DISK]["failed"] < 3:
            await it.look_after_disk()
        assert await is_right(it, IDS[3]), "from disk"
        assert warnings(caplog) == ["demotion.failed"]
        assert "Read-only" in it.trouble(Tier.DISK)
        monkeypatch.undo()
        await it.settled()
        assert it.trouble(Tier.DISK) == ""


async def test_what_is_dropped_while_the_disk_is_away_does_not_come_back_with_it(tmp_path: Path) -> None:
    directory, elsewhere = tmp_path / "blocks", tmp_path / "elsewhere"
    async with on_disk(directory) as it:
        directory.rename(elsewhere)
        directory.write_text("a file is in the way")
        await it.look_after_disk()
        assert it.trouble(Tier.DISK)
        assert await it.drop([IDS[2]]) == 2
        directory.unlink()
        elsewhere.rename(directory)
        await it.look_after_disk()
        assert it.trouble(Tier.DISK) == ""
        assert [tiers(it, block) for block in IDS[1:4]] == [[Tier.DRAM, Tier.DISK], [], []]
    async with pool(directory=directory) as it:
        assert len(it.match(IDS[:4])) == 2


@pytest.fixture(params=[0o000, 0o022, 0o777])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


async def test_blocks_are_their_owners_alone_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    directory = tmp_path / "blocks"
    async with pool(directory=directory) as it:
        await put_chain(it, KEYS[:2])
        await it.settled()
        modes = modes_in(directory)
        assert modes.pop("blocks") == 0o700
        assert set(modes) >= {"index.sqlite", "00000001.blocks"}
        assert set(modes.values()) == {0o600}, modes


async def test_an_index_of_old_is_made_its_owners_alone(tmp_path: Path) -> None:
    (tmp_path / "index.sqlite").touch(0o644)
    os.chmod(tmp_path, 0o755)
    async with pool(directory=tmp_path):
        modes = modes_in(tmp_path)
        assert modes["index.sqlite"] == 0o600
        assert modes[tmp_path.name] == 0o755, "a directory that was there stays as it was"
