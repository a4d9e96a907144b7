"""Keeps the files of a state directory from other users of the host: logs and the ledger hold what clients sent."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PRIVATE_UMASK = 0o077  # of every service: new files are 0600, new directories 0700

_OTHERS = 0o077
# What services write there. A state directory may be any directory, so what else it holds is left alone.
_OURS = (
    *(
        "logs",
        "profiles",
        "kvstore",
        "simulated-model",
        "stores",
        "prometheus-targets.json",
        "cluster_secret",
        "label_key",
    ),
    *("ledger.db*", "classes-*.json", "tenants-*.json"),
)


def make_private(state_dir: Path) -> int:
    """Takes from other users what earlier versions let them read. Returns the number of files and directories changed.

    Those that belong to somebody else are left as they are.
    """
    return sum(_changed(path) for path in _written_by_us(state_dir))


def _written_by_us(state_dir: Path) -> Iterator[Path]:
    """Yields the directory itself, unless it is shared or nothing of ours is in it, and what services wrote there."""
    state_dir = state_dir.resolve()
    found = [path for pattern in _OURS for path in state_dir.glob(pattern)]
    if found and not state_dir.stat().st_mode & stat.S_ISVTX:
        yield state_dir
    for path in found:
        yield path
        if path.is_dir() and not path.is_symlink():
            yield from path.rglob("*")


def _changed(path: Path) -> bool:
    with suppress(OSError):
        mode = path.lstat().st_mode
        if mode & _OTHERS and not stat.S_ISLNK(mode):
            os.chmod(path, stat.S_IMODE(mode) & ~_OTHERS, follow_symlinks=True)
            return True
    return False
