"""Memory on a CPU for KV, in huge pages, some of it present before a request writes there."""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress

import torch

from halfmoon.errors import Incompatible
from halfmoon.host_limits import free_memory_bytes

AHEAD_BYTES = 512 << 10  # of each region, behind what was ever used; at most an eighth of it
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14: pages become present, what is in them stays


class HostPages:
    """Owns memory of regions of one size, each used from its front, such as every head of every layer.

    In pages of 2 MiB where the system has them: each region is a page of its own otherwise. Memory counts as used once
    it is touched, which huge pages are as a whole, and whoever touches a page waits until the kernel has cleared it.
    """

    def __init__(self, num_regions: int, region_bytes: int) -> None:
        """Raises Incompatible if the system has not so much memory."""
        self._region_bytes, self._num_regions = region_bytes, num_regions
        num_bytes = num_regions * region_bytes
        try:
            pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise Incompatible(
                f"this host has no {num_bytes >> 20} MiB for KV, {free_memory_bytes() >> 20} MiB are free: make "
                "kv_memory smaller",
                param="kv_memory",
            ) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without them
                pages.madvise(mmap.MADV_HUGEPAGE)
        self.memory = torch.frombuffer(pages, dtype=torch.uint8)  # holds `pages`
        self._can_populate = True
        self._present_bytes = 0  # of the regions before `_next`; the others have `_before_bytes`
        self._before_bytes = 0
        self._next = num_regions

    def prefault(self, used_bytes: int) -> bool:
        """Makes some bytes present behind the first `used_bytes` of a region. One thread, also while others write.

        Returns whether to call it again for the next region; never again once the system could not.
        """
        if not self._can_populate:
            return False
        if self._next == self._num_regions:
            ahead_bytes = min(AHEAD_BYTES, self._region_bytes // 8)
            if self._present_bytes >= min(used_bytes + ahead_bytes // 2, self._region_bytes):
                return False
            self._before_bytes = max(self._present_bytes, used_bytes)
            self._present_bytes = min(used_bytes + ahead_bytes, self._region_bytes)
            self._next = 0
        begin = self._next * self._region_bytes
        self._can_populate = self._populate(begin + self._before_bytes, begin + self._present_bytes)
        self._next += 1
        return self._can_populate

    def _populate(self, begin: int, end: int) -> bool:
        begin -= begin % mmap.PAGESIZE
        address = ctypes.c_void_p(self.memory.data_ptr() + begin)
        # not by `mmap.madvise`, which keeps other threads of Python waiting
        return bool(_libc.madvise(address, ctypes.c_size_t(end - begin), _POPULATE_WRITE) == 0)


_libc = ctypes.CDLL(None)
