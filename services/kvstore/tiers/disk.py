"""The disk tier: records in segment files, indexed in SQLite; all of its I/O is off the event loop.

One thread writes: records, then their rows, then compaction. So the device sees long sequential runs. Two threads read.
The dead bytes in the files are bounded: before the budget is exceeded, the live records of the file with the most dead
bytes are copied and the file is removed. The budget shrinks while others need the file system, and blocks are a cache:
if there is no room for a copy, a file is removed with what it holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

from halfmoon.catalog.block_identity import BlockMeta
from halfmoon.errors import DataLoss, NotFound
from halfmoon.kv.kv_layout import KVBytes
from services.kvstore.outage import Outage
from services.kvstore.tiers.compaction import Moved, move_out
from services.kvstore.tiers.disk_index import DiskIndex, IndexedBlock, whole_rows
from services.kvstore.tiers.disk_room import DiskRoom
from services.kvstore.tiers.record import Record, decode_record
from services.kvstore.tiers.seal import Seal
from services.kvstore.tiers.segments import Location, SegmentFiles

log = logging.getLogger(__name__)

LIVE_SHARE = 0.75  # share of the budget for live records; the rest keeps compaction from copying much to gain little
_SEGMENTS_IN_BUDGET = 16
_NUM_READERS = 2

Result = TypeVar("Result")
Write = tuple[BlockMeta, tuple[KVBytes, KVBytes]]  # a record as (header, payload)
DiskState = Literal["same", "anew", "away"]


class DiskTier:
    """Owns the files, their index and the location of each block. The catalog decides what is evicted when."""

    def __init__(self, directory: Path, room: DiskRoom | int, seal: Seal | None = None) -> None:
        """room: the budget, and what is left free on the file system. Raises OSError."""
        self._directory = directory
        self._room = DiskRoom(room) if isinstance(room, int) else room
        self.seal = seal or Seal()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="kvstore-disk-write")
        self._readers = ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="kvstore-disk-read")
        self._changing = asyncio.Lock()  # one change of the files at a time
        self._places: dict[bytes, Location] = {}
        self._removed: set[bytes] = set()  # left the catalog; their rows are removed by the next write
        self.configured_bytes = self._room.budget_bytes
        self.budget_bytes = self.configured_bytes
        self.file_bytes = 0
        self.is_here = True
        self.away = Outage("disk.away", directory=str(directory))
        self._files, self._index, self._recovered = self._open(1)
        self._device = self._files.device

    @property
    def live_budget_bytes(self) -> int:
        """Most bytes of live records."""
        return int(self.budget_bytes * LIVE_SHARE)

    def recovered(self) -> list[IndexedBlock]:
        """Blocks found at the start, or anew, each after its parent. Pass every row to `admit` or `forget`."""
        rows, self._recovered = self._recovered, []
        return rows

    def admit(self, row: IndexedBlock) -> None:
        """Admits a recovered block that the catalog took."""
        self._places[row.meta.id] = row.place
        self._removed.discard(row.meta.id)

    async def check(self) -> DiskState:
        """Looks after the directory, and after the room that others leave.

        `anew`: it or its index had been removed; the tier has begun again, with what is recovered. `away`: it cannot be
        used at present.
        """
        async with self._changing:
            try:
                is_same = await self._write(self._look)
            except OSError as err:
                self.is_here = False
                self.away.failed(err)
                return "away"
            self.is_here = True
            self.away.succeeded()
            if is_same:
                return "same"
            self._places.clear()
            self._recovered = [row for row in self._recovered if row.meta.id not in self._removed]  # not written yet
            return "anew"

    async def write(self, records: Sequence[Write]) -> list[tuple[BlockMeta, int]]:
        """Writes records to the device; returns them with their sizes.

        Raises OSError (the disk is full, gone or broken); then none of them was stored.
        """
        async with self._changing:
            removed, self._removed = self._removed, set()
            try:
                places = await self._write(lambda: self._store(records, removed))
            except OSError:
                self._removed |= removed
                raise
            for (meta, _), place in zip(records, places, strict=True):
                self._places[meta.id] = place
                self._removed.discard(meta.id)
            return [(meta, place.num_bytes) for (meta, _), place in zip(records, places, strict=True)]

    async def read(self, block: bytes) -> Record:
        """Reads a record. Raises NotFound if it is not here, DataLoss if it is damaged, OSError if the disk fails."""
        place = self._places.get(block)
        while place is not None:
            try:
                return await asyncio.get_running_loop().run_in_executor(self._readers, self._read, place, block)
            except FileNotFoundError:
                if not self.is_here:
                    raise
                if self._places.get(block) == place:
                    raise DataLoss("the file of a stored block is missing") from None
            place = self._places.get(block)  # compaction has moved it in the meantime
        raise NotFound("the disk has no such block")

    def forget(self, block: bytes) -> None:
        """Notes that the block has left this tier; its row is removed by the next write or `flush`."""
        self._places.pop(block, None)
        self._removed.add(block)

    async def flush(self, pins: Sequence[tuple[bytes, bool]] = ()) -> None:
        """Makes removals and pins durable. Raises OSError."""
        if self._removed or pins:
            async with self._changing:
                await self._flush(pins)

    async def compact(self, num_bytes: int) -> list[bytes]:
        """Makes room for `num_bytes` more in the budget if dead bytes allow; returns blocks that were lost."""
        room_to_copy = self.budget_bytes // _SEGMENTS_IN_BUDGET
        return await self._reclaim(self.budget_bytes - room_to_copy - num_bytes, gives_up=False)

    async def give_back(self) -> list[bytes]:
        """Brings the files within the budget, without room for copies if need be; returns blocks that were lost."""
        return await self._reclaim(self.budget_bytes, gives_up=True)

    async def close(self) -> None:
        """Writes what is pending and closes the files."""
        try:
            await self.flush()
        except OSError as err:
            log.warning("disk.flush_failed", extra={"reason": str(err)})
        await self._write(self._close)
        self._writer.shutdown()
        self._readers.shutdown()

    def _read(self, place: Location, block: bytes) -> Record:
        return decode_record(self._files.read(place), block, self.seal)

    async def _write(self, work: Callable[[], Result]) -> Result:
        """Runs `work` on the writing thread, to its end even if the caller is cancelled."""
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._writer, work))

    async def _flush(self, pins: Sequence[tuple[bytes, bool]] = ()) -> None:
        removed, self._removed = self._removed, set()
        try:
            await self._write(lambda: self._index.apply(removed=removed, pinned=pins))
        except OSError:
            self._removed |= removed
            raise

    async def _reclaim(self, target_bytes: int, gives_up: bool) -> list[bytes]:
        """Removes files with dead bytes until there are `target_bytes` at most; returns the blocks that were lost."""
        lost: list[bytes] = []
        async with self._changing:
            while self.file_bytes > target_bytes and (segment := self._deadest()) is not None:
                with contextlib.suppress(OSError) if gives_up else contextlib.nullcontext():
                    await self._flush()  # on a full disk rows may outlive their file; the next start drops them
                wanted = [block for block, place in self._places.items() if place.segment == segment]
                try:
                    moved = await self._write(partial(self._empty, segment, wanted, gives_up))
                except OSError:
                    if not gives_up:
                        raise
                    moved = Moved(damaged=wanted)
                for block, before, after in moved.places:
                    if self._places.get(block) == before:
                        self._places[block] = after
                for block in moved.damaged:
                    self._places.pop(block, None)
                lost += moved.damaged
                await self._write(partial(self._discard, segment))
        return lost

    def _deadest(self) -> int | None:
        """The file with the most bytes that no block needs; None if there are no such bytes."""
        dead = self._files.sizes()
        for place in self._places.values():
            dead[place.segment] = dead.get(place.segment, 0) - place.num_bytes
        segment = max(dead, key=lambda number: dead[number], default=None)
        return segment if segment is not None and dead[segment] > 0 else None

    def _empty(self, segment: int, wanted: Sequence[bytes], gives_up: bool) -> Moved:
        num_bytes = self._files.sizes().get(segment, 0)
        if gives_up and wanted and self._room.space(self._directory).free_bytes < 2 * num_bytes:
            raise OSError(errno.ENOSPC, "no room to copy a file before it is removed")
        return move_out(self._files, self._index, self.seal, segment, set(wanted))

    def _discard(self, segment: int) -> None:
        self._files.remove(segment)
        self._measure()

    def _look(self) -> bool:
        """Whether files and index are those that were opened; if not, opens them again. Raises OSError."""
        if self.is_here and self._files.are_here() and self._index.is_here() and not self._files.missing():
            self._measure()
            return True
        self._files.abandon()
        self._index.close()
        first_ancestor = next(path for path in (self._directory, *self._directory.parents) if path.exists())
        if first_ancestor.stat().st_dev != self._device:
            raise OSError(errno.ENODEV, "the file system of the directory is not mounted any more")
        self._files, self._index, self._recovered = self._open(self._files.active + 1)
        log.warning("disk.began_anew", extra={"directory": str(self._directory), "num_blocks": len(self._recovered)})
        return False

    def _open(self, first: int) -> tuple[SegmentFiles, DiskIndex, list[IndexedBlock]]:
        files = SegmentFiles(self._directory, max(1, self.budget_bytes // _SEGMENTS_IN_BUDGET), first)
        self._files = files  # whatever fails below, the next attempt ends this one's lock
        index = DiskIndex(self._directory / "index.sqlite", self.seal.key_id)
        if index.num_foreign:
            log.warning("disk.other_key", extra={"num_blocks": index.num_foreign})
        sizes = files.sizes()
        rows = index.take_found()
        whole = whole_rows(rows, sizes)
        kept = {row.meta.id for row in whole}
        index.apply(removed=[row.meta.id for row in rows if row.meta.id not in kept])
        ends = dict.fromkeys(sizes, 0)
        for row in whole:
            ends[row.place.segment] = max(ends[row.place.segment], row.place.offset + row.place.num_bytes)
        for segment, end in ends.items():
            if end == 0:
                files.remove(segment)
            elif end < sizes[segment]:
                files.truncate(segment, end)
        self._measure()
        return files, index, whole

    def _store(self, records: Sequence[Write], removed: set[bytes]) -> list[Location]:
        if not self.is_here:
            raise OSError(errno.ENODEV, f"the disk tier is away: {self.away.reason}")
        places = self._files.append([parts for _, parts in records])
        self._index.apply(zip((meta for meta, _ in records), places, strict=True), removed=removed)
        self.file_bytes = sum(self._files.sizes().values())
        return places

    def _measure(self) -> None:
        """Reads how many bytes the files have, and how many they may have."""
        self.file_bytes = sum(self._files.sizes().values())
        self.budget_bytes = self._room.allowed_bytes(self._directory, self.file_bytes)
        self._files.segment_bytes = max(1, self.budget_bytes // _SEGMENTS_IN_BUDGET)

    def _close(self) -> None:
        self._files.close()
        self._index.close()
