"""How much of a file system the disk tier takes, and how it gives back what others need."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.catalog.entry import Tier
from services.kvstore.options import PoolOptions
from services.kvstore.pool import Pool
from services.kvstore.tiers.disk import DiskTier
from services.kvstore.tiers.disk_room import DiskRoom, Space, space_of
from services.kvstore.tiers.record import HEADER_BYTES
from tests.services.kvstore.blocks import LAYOUT, is_right, put_chain
from tests.services.kvstore.pools import IDS, KEYS

GIB = 1 << 30
RECORD_BYTES = HEADER_BYTES + LAYOUT.block_bytes
SOMEWHERE = Path("/")


def allowed(total: int, free: int, held: int = 0, budget: int = 8 * GIB, reserve: int | None = None) -> int:
    return DiskRoom(budget, reserve, lambda _: Space(total, free)).allowed_bytes(SOMEWHERE, held)


def test_a_large_disk_gives_the_whole_budget() -> None:
    assert allowed(total=252 * GIB, free=60 * GIB) == 8 * GIB


def test_a_gibibyte_is_left_to_others() -> None:
    assert allowed(total=252 * GIB, free=3 * GIB) == 2 * GIB
    assert allowed(total=252 * GIB, free=0, held=3 * GIB) == 2 * GIB


def test_of_a_small_file_system_a_tenth_is_left() -> None:
    assert allowed(total=50 << 20, free=50 << 20) == 45 << 20


def test_the_setting_decides() -> None:
    assert allowed(total=252 * GIB, free=60 * GIB, reserve=55 * GIB) == 5 * GIB
    assert allowed(total=252 * GIB, free=60 * GIB, reserve=0) == 8 * GIB
    assert allowed(total=252 * GIB, free=60 * GIB, reserve=100 * GIB) == 0


@given(st.integers(0, 100 * GIB), st.integers(0, 100 * GIB), st.integers(0, 8 * GIB))
def test_what_the_tier_takes_or_gives_back_does_not_move_its_limit(total: int, free: int, held: int) -> None:
    assert allowed(total, free + held, 0) == allowed(total, free, held)


def test_a_file_system_is_asked(tmp_path: Path) -> None:
    space = space_of(tmp_path)
    assert 0 <= space.free_bytes <= space.total_bytes


class Shared:
    """A file system of which others take some."""

    def __init__(self, directory: Path, total_bytes: int) -> None:
        self._directory = directory
        self.total_bytes = total_bytes
        self.others_bytes = 0

    def __call__(self, directory: Path) -> Space:
        ours = sum(file.stat().st_size for file in self._directory.glob("*.blocks"))
        return Space(self.total_bytes, max(0, self.total_bytes - ours - self.others_bytes))

    @property
    def free_bytes(self) -> int:
        return self(self._directory).free_bytes


@pytest.mark.parametrize("others_blocks", [20, 34, 39])
async def test_a_tier_gives_back_what_others_need_and_grows_again(tmp_path: Path, others_blocks: int) -> None:
    shared = Shared(tmp_path, 40 * RECORD_BYTES)
    reserve = 4 * RECORD_BYTES
    disk = DiskTier(tmp_path, DiskRoom(1 << 20, reserve, shared))
    options = PoolOptions(sweep_s=0.001, retry_pause_s=0.001, drain_s=0.0)
    it = Pool(memoryview(bytearray(32 * LAYOUT.block_bytes)), options, disk)
    async with it.running():
        for n in range(24):
            await put_chain(it, KEYS[n : n + 1])
        await it.settled()
        assert shared.free_bytes >= reserve
        held = it.catalog.num_blocks(Tier.DISK)
        assert held == 24

        shared.others_bytes = others_blocks * RECORD_BYTES
        await until_changed(it, lambda: shared.free_bytes >= min(reserve, shared.total_bytes - shared.others_bytes))
        assert it.catalog.num_blocks(Tier.DISK) <= max(0, (36 - others_blocks) * 3 // 4)
        assert (it.budget_bytes(Tier.DISK), it.configured_bytes(Tier.DISK)) == (
            max(0, (36 - others_blocks) * RECORD_BYTES), 1 << 20,
        )  # fmt: skip
        assert [await is_right(it, block) for block in IDS[:24]] == [True] * 24, "from memory"
        for entry in it.catalog:
            if Tier.DISK in entry.tiers:
                assert (await disk.read(entry.meta.id)).payload
        it.catalog.check_integrity()

        shared.others_bytes = 0
        await until_changed(it, lambda: disk.budget_bytes == 36 * RECORD_BYTES)
        for n in range(24, 32):
            await put_chain(it, KEYS[n : n + 1])
        await it.settled()
        assert tiers_hold(it, 24, 32)
        assert shared.free_bytes >= reserve
    disk = DiskTier(tmp_path, DiskRoom(1 << 20, reserve, shared))
    it = Pool(memoryview(bytearray(32 * LAYOUT.block_bytes)), options, disk)
    async with it.running():
        assert tiers_hold(it, 24, 32)
        assert [await is_right(it, block) for block in IDS[24:32]] == [True] * 8


def tiers_hold(it: Pool, start: int, end: int) -> bool:
    return all(it.catalog.is_in(block, Tier.DISK) for block in IDS[start:end])


async def until_changed(it: Pool, condition: Callable[[], bool]) -> None:
    """Lets upkeep run until that holds and nothing is given back any more."""
    assert it.disk is not None
    while not condition() or it.disk.file_bytes > it.disk.budget_bytes:
        await it.look_after_disk()


async def test_a_tier_starts_with_what_is_free(tmp_path: Path) -> None:
    shared = Shared(tmp_path, 40 * RECORD_BYTES)
    shared.others_bytes = 28 * RECORD_BYTES
    disk = DiskTier(tmp_path, DiskRoom(1 << 20, 4 * RECORD_BYTES, shared))
    it = Pool(memoryview(bytearray(32 * LAYOUT.block_bytes)), PoolOptions(sweep_s=0.001, drain_s=0.0), disk)
    async with it.running():
        for n in range(24):
            await put_chain(it, KEYS[n : n + 1])
        await it.settled()
        assert 1 <= it.catalog.num_blocks(Tier.DISK) <= 6
        assert shared.free_bytes >= 4 * RECORD_BYTES
