"""Keeps memory that messages of a megabyte free for the next ones."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h
_LARGEST = 32 << 20  # largest value that glibc accepts for its mmap threshold
_KEEP_BYTES = 256 << 20


def keep_freed_memory() -> bool:
    """Makes glibc reuse freed memory, up to about `_KEEP_BYTES`, instead of returning it; returns whether it could.

    Otherwise every gRPC message of a megabyte or two is new pages at both ends, and touching a page for the first time
    costs more than copying it.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library
        return False
    wanted = {_M_MMAP_THRESHOLD: _LARGEST, _M_TRIM_THRESHOLD: _KEEP_BYTES, _M_TOP_PAD: 16 << 20}
    return all(mallopt(ctypes.c_int(option), ctypes.c_int(value)) == 1 for option, value in wanted.items())
