"""Allocates byte ranges of an arena: best fit, neighbours coalesced at once. Offsets only, no memory.

Best fit suits a pool. Blocks of one model all have one size, so freed runs fit exactly and nothing fragments. With
several models or codecs, taking the smallest run that fits keeps large runs whole.
"""

from __future__ import annotations

from bisect import bisect_left, insort

ALIGNMENT_BYTES = 64  # a cache line, and enough for vector loads from a mapping


class Allocator:
    """Owns the free and the allocated runs of `capacity_bytes`. Knows nothing of their content."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes - capacity_bytes % ALIGNMENT_BYTES
        self.free_bytes = 0
        self._used: dict[int, int] = {}  # offset -> size
        self._free: dict[int, int] = {}  # offset -> size
        self._free_ends: dict[int, int] = {}  # end -> offset
        self._by_size: list[tuple[int, int]] = []  # (size, offset) of the free runs, sorted
        if self.capacity_bytes:
            self._add_free(0, self.capacity_bytes)

    def allocate(self, num_bytes: int) -> int | None:
        """Offset of an aligned run of at least `num_bytes`; None if no free run is long enough."""
        size = rounded_bytes(num_bytes)
        place = bisect_left(self._by_size, (size, 0))
        if place == len(self._by_size):
            return None
        run_bytes, offset = self._by_size[place]
        self._remove_free(offset, run_bytes)
        if run_bytes > size:
            self._add_free(offset + size, run_bytes - size)
        self._used[offset] = size
        return offset

    def free(self, offset: int) -> None:
        """Frees a run."""
        size = self._used.pop(offset)
        after = self._free.get(offset + size)
        if after is not None:
            self._remove_free(offset + size, after)
            size += after
        before = self._free_ends.get(offset)
        if before is not None:
            size += offset - before
            self._remove_free(before, offset - before)
            offset = before
        self._add_free(offset, size)

    def check_integrity(self) -> None:
        """Asserts that used and free runs tile the arena and that no two free runs touch. For tests."""
        runs = sorted([(o, s, "used") for o, s in self._used.items()] + [(o, s, "free") for o, s in self._free.items()])
        at, before = 0, "used"
        for offset, size, kind in runs:
            assert offset == at
            assert size > 0
            assert (before, kind) != ("free", "free")
            at, before = offset + size, kind
        assert at == self.capacity_bytes
        assert self._by_size == sorted((size, offset) for offset, size in self._free.items())
        assert self._free_ends == {offset + size: offset for offset, size in self._free.items()}
        assert self.free_bytes == sum(self._free.values())

    def _add_free(self, offset: int, size: int) -> None:
        self._free[offset] = size
        self._free_ends[offset + size] = offset
        insort(self._by_size, (size, offset))
        self.free_bytes += size

    def _remove_free(self, offset: int, size: int) -> None:
        del self._free[offset]
        del self._free_ends[offset + size]
        del self._by_size[bisect_left(self._by_size, (size, offset))]
        self.free_bytes -= size


def rounded_bytes(num_bytes: int) -> int:
    """Bytes that an allocation of `num_bytes` takes."""
    return max(1, -(-num_bytes // ALIGNMENT_BYTES)) * ALIGNMENT_BYTES
