"""What glibc does with freed memory: it is kept for the next messages, or given back to the system."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h
_LARGEST = 32 << 20  # largest value that glibc accepts for its mmap threshold
_KEEP_BYTES = 256 << 20


def keep_freed_memory() -> bool:
    """Makes glibc reuse freed memory, up to about `_KEEP_BYTES`, instead of returning it; returns whether it could.

    Otherwise every gRPC message of a megabyte or two is new pages at both ends, and touching a page for the first time
    costs more than copying it.
    """
    mallopt = _glibc("mallopt")
    if mallopt is None:
        return False
    wanted = {_M_MMAP_THRESHOLD: _LARGEST, _M_TRIM_THRESHOLD: _KEEP_BYTES, _M_TOP_PAD: 16 << 20}
    return all(mallopt(ctypes.c_int(option), ctypes.c_int(value)) == 1 for option, value in wanted.items())


def give_back_freed_memory() -> None:
    """Gives free memory back to the system, after work that took much. glibc keeps what lies between pieces in use."""
    trim = _glibc("malloc_trim")
    if trim is not None:
        trim(ctypes.c_size_t(0))


def _glibc(name: str) -> Any:
    """The function; None in another C library."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None
