"""The disk tier: records in segment files, indexed in SQLite; all of its I/O is off the event loop.

One thread writes: records, then their rows, then compaction. So the device sees long sequential runs and nothing needs
a lock. Two threads read. The dead bytes in the files are bounded: before the budget is exceeded, the live records of
the file with the most dead bytes are copied and the file is removed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from halfmoon.errors import DataLoss, NotFound
from halfmoon.kv.kv_layout import KVBytes
from services.kvstore.catalog.block_identity import BlockMeta
from services.kvstore.tiers.disk_index import DiskIndex, IndexedBlock, whole_rows
from services.kvstore.tiers.record import Record, decode_record
from services.kvstore.tiers.seal import Seal
from services.kvstore.tiers.segments import Location, SegmentFiles

log = logging.getLogger(__name__)

LIVE_SHARE = 0.75  # share of the budget for live records; the rest keeps compaction from copying much to gain little
_SEGMENTS_IN_BUDGET = 16
_NUM_READERS = 2
_COPY_BYTES = 16 << 20  # held in memory while a file is copied

Result = TypeVar("Result")
Write = tuple[BlockMeta, tuple[KVBytes, KVBytes]]  # a record as (header, payload)


@dataclass(slots=True)
class _Compacted:
    """Result of copying one segment."""

    segment: int
    moved: list[tuple[bytes, Location, Location]]
    damaged: list[bytes]


class DiskTier:
    """Owns the files, their index and the location of each block. The catalog decides what is evicted when."""

    def __init__(self, directory: Path, budget_bytes: int, seal: Seal | None = None) -> None:
        self._directory = directory
        self.seal = seal or Seal()
        self.budget_bytes = budget_bytes
        self._limit_bytes = budget_bytes - budget_bytes // _SEGMENTS_IN_BUDGET  # room to copy a file
        self.live_budget_bytes = int(budget_bytes * LIVE_SHARE)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="kvstore-disk-write")
        self._readers = ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="kvstore-disk-read")
        self._places: dict[bytes, Location] = {}
        self._removed: set[bytes] = set()  # left the catalog; their rows are removed by the next write
        self._files, self._index, self._recovered = self._open()
        self.file_bytes = sum(self._files.sizes().values())
        self.num_compacted = 0

    def recovered(self) -> list[IndexedBlock]:
        """Blocks found at the start, each after its parent. Pass every row to `admit` or `forget`."""
        rows, self._recovered = self._recovered, []
        return rows

    def admit(self, row: IndexedBlock) -> None:
        """Admits a recovered block that the catalog took."""
        self._places[row.meta.id] = row.place

    async def write(self, records: Sequence[Write]) -> list[tuple[BlockMeta, int]]:
        """Writes records to the device; returns them with their sizes.

        Raises OSError (the disk is full, gone or broken); then none of them was stored.
        """
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
        if not self._removed and not pins:
            return
        removed, self._removed = self._removed, set()
        try:
            await self._write(lambda: self._index.apply(removed=removed, pinned=pins))
        except OSError:
            self._removed |= removed
            raise

    async def compact(self, num_bytes: int) -> list[bytes]:
        """Makes room for `num_bytes` more in the budget if dead bytes allow; returns blocks found damaged."""
        damaged: list[bytes] = []
        while self.file_bytes + num_bytes > self._limit_bytes:
            await self.flush()
            done = await self._write(self._copy_deadest)
            if done is None:
                break
            for block, before, after in done.moved:
                if self._places.get(block) == before:
                    self._places[block] = after
            damaged += done.damaged
            await self._write(partial(self._files.remove, done.segment))
            self._measure()
            self.num_compacted += 1
        return damaged

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

    def _open(self) -> tuple[SegmentFiles, DiskIndex, list[IndexedBlock]]:
        files = SegmentFiles(self._directory, max(1, self.budget_bytes // _SEGMENTS_IN_BUDGET))
        index = DiskIndex(self._directory / "index.sqlite", self.seal.key_id)
        if index.num_foreign:
            log.warning("disk.other_key", extra={"num_blocks": index.num_foreign})
        sizes = files.sizes()
        rows = index.load()
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
        return files, index, whole

    def _store(self, records: Sequence[Write], removed: set[bytes]) -> list[Location]:
        places = self._files.append([parts for _, parts in records])
        self._index.apply(zip((meta for meta, _ in records), places, strict=True), removed=removed)
        self._measure()
        return places

    def _copy_deadest(self) -> _Compacted | None:
        """Copies the live records of the file with the most dead bytes to the active one; None if there are none."""
        live = self._index.live_bytes()
        dead = {segment: size - live.get(segment, 0) for segment, size in self._files.sizes().items()}
        segment = max(dead, key=lambda number: dead[number], default=0)
        if not dead.get(segment):
            return None
        if segment == self._files.active:
            self._files.close()
        done = _Compacted(segment, [], [])
        batch: list[tuple[IndexedBlock, bytes]] = []
        for row in self._index.in_segment(segment):
            data = self._files.read(row.place)
            try:
                decode_record(data, row.meta.id, self.seal)
            except DataLoss:
                done.damaged.append(row.meta.id)
                continue
            batch.append((row, data))
            if sum(len(data) for _, data in batch) >= _COPY_BYTES:
                self._copy(batch, done)
                batch = []
        self._copy(batch, done)
        self._index.apply(removed=done.damaged, moved=[(block, place) for block, _, place in done.moved])
        return done

    def _copy(self, batch: Sequence[tuple[IndexedBlock, bytes]], done: _Compacted) -> None:
        places = self._files.append([(data,) for _, data in batch])
        done.moved += [(row.meta.id, row.place, place) for (row, _), place in zip(batch, places, strict=True)]

    def _measure(self) -> None:
        self.file_bytes = sum(self._files.sizes().values())

    def _close(self) -> None:
        self._files.close()
        self._index.close()
