"""Memory of KV is present before it is used: a little ahead of what was used, and what is in it stays."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import pytest
from numpy.typing import NDArray

from halfmoon.engine.kv_memory.host_pages import AHEAD_BYTES, HostPages
from halfmoon.engine.kv_memory.kv_arena import KVArena
from halfmoon.errors import Incompatible
from halfmoon.kv.kv_layout import KVLayout

NUM_REGIONS = 3
REGION_BYTES = 16 << 20


def present(pages: HostPages) -> NDArray[np.bool_]:
    """Which pages of the system's size are in memory, by region (mincore(2))."""
    num_pages = NUM_REGIONS * REGION_BYTES // mmap.PAGESIZE
    found = (ctypes.c_ubyte * num_pages)()
    address = ctypes.c_void_p(pages.memory.data_ptr())
    assert ctypes.CDLL(None).mincore(address, ctypes.c_size_t(NUM_REGIONS * REGION_BYTES), found) == 0
    is_present: NDArray[np.bool_] = np.frombuffer(bytes(found), np.uint8).reshape(NUM_REGIONS, -1) % 2 == 1
    return is_present


def prefault_all(pages: HostPages, used_bytes: int) -> int:
    """Number of calls that had something to do."""
    num_calls = 0
    while pages.prefault(used_bytes):
        num_calls += 1
    return num_calls


@pytest.fixture
def pages() -> HostPages:
    pages = HostPages(NUM_REGIONS, REGION_BYTES)
    if not HostPages(1, mmap.PAGESIZE).prefault(0):
        pytest.skip("the system makes no pages present (Linux before 5.14)")
    assert not present(pages).any()
    return pages


def test_more_than_the_host_has_is_refused() -> None:
    with pytest.raises(Incompatible, match=r"no \d+ MiB for KV, \d+ MiB are free: make kv_memory smaller"):
        HostPages(1 << 20, 1 << 40)


def test_the_front_of_every_region_is_present(pages: HostPages) -> None:
    assert prefault_all(pages, 0) == NUM_REGIONS
    ahead = AHEAD_BYTES // mmap.PAGESIZE
    there = present(pages)
    assert there[:, :ahead].all()
    assert not there[:, ahead + (4 << 20) // mmap.PAGESIZE :].any(), "huge pages round up, no more"
    assert prefault_all(pages, AHEAD_BYTES // 2) == 0, "there is enough ahead"


def test_it_goes_on_where_use_went_and_changes_nothing(pages: HostPages) -> None:
    prefault_all(pages, 0)
    used = 5 << 20
    regions = pages.memory.view(NUM_REGIONS, REGION_BYTES)
    regions[:, :used] = 7
    assert prefault_all(pages, used) == NUM_REGIONS
    assert present(pages)[:, : (used + AHEAD_BYTES) // mmap.PAGESIZE].all()
    assert (regions[:, :used] == 7).all()
    assert not regions[:, used : used + AHEAD_BYTES].any()
    assert prefault_all(pages, REGION_BYTES) == NUM_REGIONS
    assert prefault_all(pages, REGION_BYTES) == 0, "a region ends"


def test_an_arena_prepares_what_follows_its_blocks(pages: HostPages) -> None:
    layout = KVLayout(2, 2, 64, "float32", 16)
    arena = KVArena(layout, 4096, "cpu")
    num_calls = 0
    while arena.prefault(100):
        num_calls += 1
    assert num_calls == 2 * 2 * 2, "a layer's keys, and values, of a head"
    elsewhere = KVArena(layout, 4096, "cpu", memory=arena.tensor)
    assert not elsewhere.prefault(100), "whoever owns the memory prepares it"
