"""kill -9 at any moment: what is served after the restart is right, and the index agrees with the files.

Children are forked from a server that has everything imported. Half of them carry a fuse: they kill themselves before,
after or in the middle of the n-th thing that they do to a file. The others are killed from outside, wherever they
are then, in SQLite's own writes too.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from halfmoon.catalog.block_identity import block_id
from halfmoon.catalog.entry import Tier
from halfmoon.errors import HalfmoonError
from services.kvstore.pool import Pool
from services.kvstore.tiers.disk import DiskTier
from services.kvstore.tiers.disk_index import DiskIndex
from services.kvstore.tiers.record import HEADER_BYTES
from services.kvstore.tiers.segments import SegmentFiles
from tests.services.kvstore.blocks import LAYOUT, is_right, key, put_chain

NUM_KILLS = 100
BUDGET_BYTES = 64 * (HEADER_BYTES + LAYOUT.block_bytes)


@pytest.mark.slow
@pytest.mark.timeout(900)  # a hundred processes
def test_a_killed_store_serves_only_what_is_right(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.services.kvstore.test_kill"])
    chance = random.Random(5)
    num_served = 0
    for kill in range(NUM_KILLS):
        ours, theirs = context.Pipe(duplex=False)
        fuse = chance.randrange(1, 70) if kill % 2 else 0
        child = context.Process(target=_live, args=(tmp_path, kill, fuse, theirs))
        child.start()
        theirs.close()
        last = _watch(ours, chance.randrange(1, 14), child.pid)
        child.join()
        assert child.exitcode == -signal.SIGKILL
        ours.close()
        num_served += asyncio.run(_inspect(tmp_path, last))
    assert num_served > 20 * NUM_KILLS, "too little survived for the test to mean anything"
    assert min(_sizes(tmp_path)) > NUM_KILLS / 4, "files came and went"


def _watch(told: Connection, num_steps: int, pid: int | None) -> tuple[str, bytes] | None:
    """What the child last said to have made durable; kills it after that many steps, if it does not itself."""
    last: tuple[str, bytes] | None = None
    assert pid is not None
    try:
        for _ in range(num_steps):
            last = told.recv()
        os.kill(pid, signal.SIGKILL)
        while True:  # what was on its way
            last = told.recv()
    except (EOFError, ProcessLookupError):
        return last


def _sizes(directory: Path) -> dict[int, int]:
    return {int(path.stem): path.stat().st_size for path in directory.glob("*.blocks")}


async def _inspect(directory: Path, last: tuple[str, bytes] | None) -> int:
    disk = DiskTier(directory, BUDGET_BYTES)
    rows = disk.recovered()
    ends: dict[int, int] = {}
    for row in rows:
        disk.admit(row)
        ends[row.place.segment] = max(ends.get(row.place.segment, 0), row.place.offset + row.place.num_bytes)
    assert _sizes(directory) == ends, "every file ends with a record that the index names, and there is no other"
    for row in rows:
        assert (await disk.read(row.meta.id)).meta == row.meta, "a row names another record"
    await disk.close()
    pool = Pool(memoryview(bytearray(1 << 20)), disk=DiskTier(directory, BUDGET_BYTES))
    async with pool.running():
        pool.catalog.check_integrity()
        held = [entry.meta.id for entry in pool.catalog]
        assert len(held) == len(rows), "the disk holds whole prefixes"
        for block in held:
            assert await is_right(pool, block)
        if last is not None:
            what, block = last
            assert (block in held) == (what == "stored"), f"{what} before the kill"
        assert pool.counts.total("corrupted") == 0
    return len(held)


def _live(directory: Path, number: int, fuse: int, tell: Connection) -> None:
    """A child's life: stores, pins and drops prompts until it is killed, and says what lasts."""
    if fuse:
        _light(fuse, tell.fileno())
    asyncio.run(_work(directory, number, tell))


async def _work(directory: Path, number: int, tell: Connection) -> None:
    chance = random.Random(number)
    pool = Pool(memoryview(bytearray(64 * LAYOUT.block_bytes)), disk=DiskTier(directory, BUDGET_BYTES))
    async with pool.running():
        for step in range(10_000):
            if chance.random() < 0.2 and len(list(pool.catalog)) > 3:
                block = chance.choice([entry.meta.id for entry in pool.catalog])
                await pool.drop([block])
                tell.send(("dropped", block))
                continue
            prompt = [key(number, step, depth) for depth in range(chance.randrange(1, 5))]
            try:
                ids = await put_chain(pool, prompt)
            except HalfmoonError:
                continue
            await pool.settled()
            if pool.catalog.is_in(ids[-1], Tier.DISK):
                tell.send(("stored", block_id(prompt[-1])))


def _light(fuse: int, told: int) -> None:
    """From now on the `fuse`-th operation on files is the last one; `told`: a descriptor that is not meant."""
    left = [fuse]

    def burns() -> bool:
        left[0] -= 1
        return left[0] == 0

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    real_write, real_sync, real_apply, real_remove = os.write, os.fdatasync, DiskIndex.apply, SegmentFiles.remove

    def write(file: int, data: Any) -> int:
        if file != told and burns():
            real_write(file, memoryview(data)[: len(data) // 2])
            die()
        return real_write(file, data)

    def sync(file: int) -> None:
        if burns():
            die()
        real_sync(file)

    def apply(index: DiskIndex, *arguments: Any, **named: Any) -> None:
        if burns():
            die()
        real_apply(index, *arguments, **named)
        if burns():
            die()

    def remove(files: SegmentFiles, segment: int) -> None:
        if burns():
            die()
        real_remove(files, segment)
        if burns():
            die()

    patch = pytest.MonkeyPatch()
    patch.setattr(os, "write", write)
    patch.setattr(os, "fdatasync", sync)
    patch.setattr(DiskIndex, "apply", apply)
    patch.setattr(SegmentFiles, "remove", remove)
