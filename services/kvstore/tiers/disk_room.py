"""How many bytes the disk tier may take: its budget, or less where others need the file system.

Whatever the tier gives back or takes moves free space by as much, so what it is allowed does not depend on what it has
taken, and it grows again as soon as others leave room.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_RESERVE_BYTES = 1 << 30
_RESERVE_SHARE = 10  # of a small file system, that fraction


@dataclass(frozen=True, slots=True)
class Space:
    """The size of a file system and what a process without privileges can still write to it."""

    total_bytes: int
    free_bytes: int


def space_of(directory: Path) -> Space:
    """Space of the directory's file system. Raises OSError."""
    stat = os.statvfs(directory)
    return Space(stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize)


@dataclass(frozen=True, slots=True)
class DiskRoom:
    """The limits of one tier."""

    budget_bytes: int
    reserve_bytes: int | None = None  # left free; None: 1 GiB, a tenth of a file system below 10 GiB
    space: Callable[[Path], Space] = space_of

    def allowed_bytes(self, directory: Path, file_bytes: int) -> int:
        """Most bytes of files that the tier may have now, of which it has `file_bytes`. Raises OSError."""
        space = self.space(directory)
        reserve_bytes = self.reserve_bytes
        if reserve_bytes is None:
            reserve_bytes = min(_RESERVE_BYTES, space.total_bytes // _RESERVE_SHARE)
        return max(0, min(self.budget_bytes, file_bytes + space.free_bytes - reserve_bytes))
