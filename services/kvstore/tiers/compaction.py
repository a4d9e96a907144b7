"""Copies what is still wanted out of a segment, so that its file can be removed. Blocking: for the writing thread."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from halfmoon.errors import DataLoss
from services.kvstore.tiers.disk_index import DiskIndex, IndexedBlock
from services.kvstore.tiers.record import decode_record
from services.kvstore.tiers.seal import Seal
from services.kvstore.tiers.segments import Location, SegmentFiles

_COPY_BYTES = 16 << 20  # held in memory while a file is copied


@dataclass(slots=True)
class Moved:
    """Result of emptying one segment."""

    places: list[tuple[bytes, Location, Location]] = field(default_factory=list)
    damaged: list[bytes] = field(default_factory=list)


def move_out(files: SegmentFiles, index: DiskIndex, seal: Seal, segment: int, wanted: Collection[bytes]) -> Moved:
    """Copies the wanted records of `segment` to the active file. Raises OSError; then nothing has moved."""
    if segment == files.active:
        files.close()
    moved = Moved()
    batch: list[tuple[IndexedBlock, bytes]] = []
    for row in index.in_segment(segment):
        if row.meta.id not in wanted:
            continue
        data = files.read(row.place)
        try:
            decode_record(data, row.meta.id, seal)
        except DataLoss:
            moved.damaged.append(row.meta.id)
            continue
        batch.append((row, data))
        if sum(len(data) for _, data in batch) >= _COPY_BYTES:
            _copy(files, batch, moved)
            batch = []
    _copy(files, batch, moved)
    index.apply(removed=moved.damaged, moved=[(block, place) for block, _, place in moved.places])
    return moved


def _copy(files: SegmentFiles, batch: Sequence[tuple[IndexedBlock, bytes]], moved: Moved) -> None:
    places = files.append([(data,) for _, data in batch])
    moved.places += [(row.meta.id, row.place, place) for (row, _), place in zip(batch, places, strict=True)]
